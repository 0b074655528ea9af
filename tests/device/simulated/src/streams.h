// Streams that run late and in order, each in its own thread, and events.
#pragma once

#include "capture.h"

#include <condition_variable>
#include <deque>

namespace simulated {

// A point in the work of a stream: the last recording of an event.
class Moment {
 public:
  explicit Moment(const void* captured) : captured(captured) {}
  const void* const captured;  // the capture in which it was recorded, null if none
  Clock::time_point when;

  void reach() {
    { std::lock_guard g(m_); reached_ = true; when = Clock::now(); }
    changed_.notify_all();
  }
  bool reached() {
    std::lock_guard g(m_);
    return reached_;
  }
  void wait() {  // also ends with the device
    std::unique_lock l(m_);
    while (!reached_ && !driver().fault && !driver().ended) changed_.wait_for(l, std::chrono::milliseconds(20));
  }

 private:
  std::mutex m_;
  std::condition_variable changed_;
  bool reached_ = false;
};
using MomentPtr = std::shared_ptr<Moment>;

class Stream {
 public:
  Stream(int device, int64_t id) : key(device, id) { std::thread([this] { run(); }).detach(); }
  const StreamKey key;
  Clock::time_point free_at{};  // when the last timed kernel ends; used only by its own thread

  void push(Work work) {
    { std::lock_guard g(m_); queue_.push_back(std::move(work)); begun_++; }
    more_.notify_one();
  }
  bool idle() {
    std::lock_guard g(m_);
    return begun_ == done_;
  }
  void wait() {
    std::unique_lock l(m_);
    auto until = begun_;
    fewer_.wait(l, [&] { return done_ >= until || driver().ended; });
  }

 private:
  void run() {
    while (true) {
      Work work;
      {
        std::unique_lock l(m_);
        more_.wait(l, [&] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      if (!driver().fault && !driver().ended) attempt(work);
      work = nullptr;
      { std::lock_guard g(m_); done_++; }
      fewer_.notify_all();
    }
  }
  static void attempt(const Work& work) {
    try {
      work();
    } catch (const std::exception& error) {
      fprintf(stderr, "simulated device: a kernel has failed: %s\n", error.what());
      driver().fault = ILLEGAL_ADDRESS;
    }
  }

  std::mutex m_;
  std::condition_variable more_, fewer_;
  std::deque<Work> queue_;
  uint64_t begun_ = 0, done_ = 0;
};

// All existing streams. Number 0 is the default stream of a device. torch has 32 of each priority, used in rotation,
// so the 33rd is the first again. Higher numbers are streams created outside of torch.
class Streams {
 public:
  Stream& at(StreamKey key) {
    std::lock_guard g(m_);
    auto& found = streams_[key];
    if (!found) found = new Stream(key.first, key.second);
    return *found;
  }
  int64_t from_pool(int device, int priority) {
    std::lock_guard g(m_);
    int level = std::min(PRIORITIES - 1, std::max(0, -priority));
    return 1 + level * IN_POOL + given_[device][level]++ % IN_POOL;
  }
  int64_t own() {
    std::lock_guard g(m_);
    return 1 + PRIORITIES * IN_POOL + made_++;
  }
  std::vector<Stream*> of(int device) {
    std::lock_guard g(m_);
    std::vector<Stream*> found;
    for (auto& [key, stream] : streams_)
      if (key.first == device) found.push_back(stream);
    return found;
  }
  static int priority_of(int64_t id) { return id == 0 || id > PRIORITIES * IN_POOL ? 0 : -int((id - 1) / IN_POOL); }

 private:
  static constexpr int PRIORITIES = 4, IN_POOL = 32;
  std::mutex m_;
  std::map<StreamKey, Stream*> streams_;
  int64_t given_[MOST_DEVICES][PRIORITIES] = {};
  int64_t made_ = 0;
};
inline Streams& streams() {
  static Streams* one = new Streams;
  return *one;
}

// The current device and streams of a thread: each starts with the first device and the default streams.
inline thread_local int current_device = 0;
inline thread_local int64_t current_stream[MOST_DEVICES] = {};
inline StreamKey current(int device) { return {device, current_stream[device]}; }

inline void put(StreamKey key, Work work, const char* call = "cudaLaunchKernel") {
  driver().enter(call);
  driver().wake(key.first);
  if (!capture().take(key, work)) streams().at(key).push(std::move(work));
}
inline MomentPtr record(StreamKey key) {
  auto moment = std::make_shared<Moment>(capture().of(key));
  put(key, [moment] { moment->reach(); }, "cudaEventRecord");
  return moment;
}
inline void wait_on_stream(StreamKey key, const MomentPtr& moment) {
  capture().depend(key, moment->captured);
  if (moment->captured) return;  // the nodes of a graph run in order anyway
  put(key, [moment] { moment->wait(); }, "cudaStreamWaitEvent");
}
inline bool query(const MomentPtr& moment) {
  capture().refuse("cudaEventQuery");
  if (moment->captured) fail(CAPTURED_EVENT, "cudaEventQuery");
  driver().enter("cudaEventQuery");
  return moment->reached();
}
inline void synchronize(const MomentPtr& moment) {
  capture().refuse("cudaEventSynchronize");
  { WithoutGil others; moment->wait(); }
  driver().enter("cudaEventSynchronize");
}
inline void synchronize(StreamKey key) {
  capture().refuse("cudaStreamSynchronize");
  driver().enter("cudaStreamSynchronize");
  { WithoutGil others; streams().at(key).wait(); }
  driver().enter("cudaStreamSynchronize");
}
inline void synchronize(int device) {
  capture().refuse("cudaDeviceSynchronize");
  driver().enter("cudaDeviceSynchronize");
  { WithoutGil others; for (Stream* stream : streams().of(device)) stream->wait(); }
  driver().enter("cudaDeviceSynchronize");
}

}  // namespace simulated

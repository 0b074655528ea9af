// Graph capture: work on a capturing stream is recorded instead of done, and unsafe calls invalidate the capture.
//
// Two modes decide about an unsafe call (one that waits, queries or allocates): that of the capture and that of the
// calling thread. A "global" capture is invalidated by any thread that has not left this mode itself, "thread_local"
// only by its own thread, and "relaxed" by no thread. One capture at a time is simulated.
#pragma once

#include "driver.h"

#include <optional>
#include <set>

namespace simulated {

enum Mode { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
inline thread_local int thread_mode = GLOBAL;

using StreamKey = std::pair<int, int64_t>;  // device and number

struct Graph {
  int64_t pool;  // of the allocator, for memory allocated during the capture
  std::vector<Work> nodes;
};

class Capture {
 public:
  void begin(StreamKey stream, int mode, int64_t pool) {
    std::lock_guard g(m_);
    if (graph_) fail(CAPTURE_UNSUPPORTED, "cudaStreamBeginCapture");
    graph_ = std::make_shared<Graph>(Graph{pool ? pool : ++pools_, {}});
    streams_ = {stream};
    mode_ = mode, by_ = std::this_thread::get_id(), spoilt_by_.clear();
  }
  std::shared_ptr<Graph> end() {
    std::lock_guard g(m_);
    auto done = std::exchange(graph_, nullptr);
    streams_.clear();
    if (!done || !spoilt_by_.empty()) fail(CAPTURE_INVALIDATED, "cudaStreamEndCapture; spoilt by " + spoilt_by_);
    return done;
  }

  // An unsafe call: rejected, and the capture is invalidated, unless the two modes allow it.
  void refuse(const char* call) {
    std::lock_guard g(m_);
    if (!graph_ || thread_mode == RELAXED || mode_ == RELAXED) return;
    bool ours = std::this_thread::get_id() == by_;
    if (!ours && (mode_ != GLOBAL || thread_mode != GLOBAL)) return;
    spoil(std::string(call) + (ours ? "" : " of another thread"));
    fail(CAPTURE_UNSUPPORTED, call);
  }
  // Return true if the work was recorded because this stream is captured.
  bool take(StreamKey stream, Work& work) {
    std::lock_guard g(m_);
    if (!graph_ || !streams_.count(stream)) return false;
    if (!spoilt_by_.empty()) fail(CAPTURE_INVALIDATED, "spoilt by " + spoilt_by_);
    graph_->nodes.push_back(std::move(work));
    return true;
  }
  // The capture that a stream belongs to, null if none. Its address identifies it.
  const void* of(StreamKey stream) {
    std::lock_guard g(m_);
    return graph_ && streams_.count(stream) ? graph_.get() : nullptr;
  }
  int64_t pool_of(StreamKey stream) {
    std::lock_guard g(m_);
    return graph_ && streams_.count(stream) ? graph_->pool : 0;
  }
  // A stream waits for an event that was recorded in the capture `event`, null if in none.
  void depend(StreamKey stream, const void* event) {
    std::lock_guard g(m_);
    bool inside = graph_ && streams_.count(stream);
    if (graph_ && event == graph_.get()) {
      streams_.insert(stream);
    } else if (inside) {
      spoil("an event from outside");
      fail(CAPTURE_ISOLATION, "cudaStreamWaitEvent");
    }
  }
  int64_t new_pool() {
    std::lock_guard g(m_);
    return ++pools_;
  }

 private:
  void spoil(const std::string& call) { if (spoilt_by_.empty()) spoilt_by_ = call; }

  std::mutex m_;
  std::shared_ptr<Graph> graph_;
  std::set<StreamKey> streams_;
  int mode_ = GLOBAL;
  std::thread::id by_;
  std::string spoilt_by_;
  int64_t pools_ = 0;
};
inline Capture& capture() {
  static Capture* one = new Capture;
  return *one;
}

}  // namespace simulated

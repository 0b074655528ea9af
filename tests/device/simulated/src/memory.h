// Memory of the device, as torch's caching allocator provides it, and page-locked memory of the host.
#pragma once

#include "streams.h"

#include <c10/core/Allocator.h>

#include <cstring>
#include <tuple>

namespace simulated {

constexpr unsigned char POISON = 0xCB;  // as a float -2.7e7: easily detected, and not NaN, which would spread

struct Block {
  void* at;
  size_t size;
  StreamKey owner;  // its stream: the next tensor there reuses the memory immediately after it is freed
  int64_t pool;     // of a graph, 0 if none
  std::set<int64_t> users;  // other streams, registered by record_stream
};

// The next tensor of the *same stream* reuses a freed block immediately, even if other streams still read it, unless
// record_stream was called for them. The old data is lost when the stream reaches the release.
class DeviceMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    driver().enter("cudaMalloc");
    StreamKey owner = current(current_device);
    driver().wake(current_device);
    int64_t pool = capture().pool_of(owner);
    size_t size = std::max<size_t>(512, (n + 511) / 512 * 512);
    Block* block = reuse(owner, pool, size);
    if (!block) block = grow(owner, pool, size);
    count(owner.first, size);
    return {n ? block->at : nullptr, block, &drop, c10::Device(c10::DeviceType::CUDA, current_device)};
  }
  void record(const c10::DataPtr& ptr, int64_t stream) {
    if (ptr.get_deleter() != &drop) return;  // foreign memory
    auto* block = static_cast<Block*>(ptr.get_context());
    std::lock_guard g(m_);
    if (block && block->owner.second != stream) block->users.insert(stream);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }

  std::tuple<size_t, size_t, size_t> counts(int device) {
    std::lock_guard g(m_);
    return {used_[device], peak_[device], reserved_[device]};
  }
  void reset_peak(int device) {
    std::lock_guard g(m_);
    peak_[device] = used_[device];
  }

 private:
  using Kind = std::tuple<StreamKey, int64_t, size_t>;

  static void drop(void* block);
  void count(int device, size_t size) {
    std::lock_guard g(m_);
    used_[device] += size;
    peak_[device] = std::max(peak_[device], used_[device]);
  }
  Block* reuse(StreamKey owner, int64_t pool, size_t size) {
    collect();
    std::lock_guard g(m_);
    auto& blocks = free_[{owner, pool, size}];
    if (blocks.empty()) return nullptr;
    Block* found = blocks.back();
    blocks.pop_back();
    return found;
  }
  Block* grow(StreamKey owner, int64_t pool, size_t size) {
    if (!pool) capture().refuse("cudaMalloc");  // for its own graph, torch relaxes the thread's mode
    void* at = nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&at, 512, size) == 0, "CUDA out of memory");
    if (knobs().poison) memset(at, POISON, size);
    std::lock_guard g(m_);
    reserved_[owner.first] += size;
    return new Block{at, size, owner, pool, {}};
  }
  void release(Block* block) {
    { std::lock_guard g(m_); used_[block->owner.first] -= block->size; }
    std::vector<MomentPtr> ends;
    if (!driver().fault && !driver().ended)
      for (int64_t user : std::exchange(block->users, {}))
        ends.push_back(simulated::record({block->owner.first, user}));
    if (ends.empty()) return put_back(block);
    std::lock_guard g(m_);
    waiting_.push_back({block, std::move(ends)});
  }
  void put_back(Block* block) {
    // A graph captured on this stream would poison it at every replay.
    bool foreign = capture().of(block->owner) && capture().pool_of(block->owner) != block->pool;
    if (knobs().poison && !driver().fault && !driver().ended && !foreign)
      put(block->owner, [at = block->at, size = block->size] { memset(at, POISON, size); });
    std::lock_guard g(m_);
    free_[{block->owner, block->pool, block->size}].push_back(block);
  }
  void collect() {  // frees blocks whose other users have finished
    std::vector<Block*> over;
    {
      std::lock_guard g(m_);
      for (size_t i = 0; i < waiting_.size();) {
        bool all = true;
        for (auto& end : waiting_[i].second) all = all && end->reached();
        if (!all) { i++; continue; }
        over.push_back(waiting_[i].first);
        waiting_.erase(waiting_.begin() + i);
      }
    }
    for (Block* block : over) put_back(block);
  }

  std::mutex m_;
  std::map<Kind, std::vector<Block*>> free_;
  std::vector<std::pair<Block*, std::vector<MomentPtr>>> waiting_;
  size_t used_[MOST_DEVICES] = {}, peak_[MOST_DEVICES] = {}, reserved_[MOST_DEVICES] = {};
};
inline DeviceMemory& device_memory() {
  static DeviceMemory* one = new DeviceMemory;
  return *one;
}
inline void DeviceMemory::drop(void* block) {
  if (!block) return;
  try {
    device_memory().release(static_cast<Block*>(block));
  } catch (const std::exception&) {  // the device has just failed, and no caller can handle it
  }
}

enum class Locked { None, Whole, Part };

// Ranges of host memory registered with the driver, one per call. A copy must be within one of them or outside of all.
class PageLocks {
 public:
  // Return the result of cudaHostRegister. It takes time, and all other calls wait.
  int add(uintptr_t at, size_t size) {
    WithoutGil others;
    std::lock_guard alone(driver().alone);
    if (driver().fault) return driver().fault;
    driver().wake(current_device);
    if (size > knobs().lock_call_bytes || total() + size > knobs().lock_bytes) return OUT_OF_MEMORY;
    if (look(at, size) != Locked::None) return ALREADY_LOCKED;
    if (knobs().lock_gbs > 0) sleep_until(Clock::now() + seconds(size / (knobs().lock_gbs * 1e9)));
    std::lock_guard g(m_);
    ranges_[at] = size;
    return OK;
  }
  int remove(uintptr_t at) {
    std::lock_guard g(m_);
    bool known = ranges_.erase(at);  // also after a fault: the device may be healed, and the memory reused
    return driver().fault ? driver().fault.load() : known ? OK : NOT_LOCKED;
  }
  Locked look(uintptr_t at, size_t size) {
    std::lock_guard g(m_);
    bool some = false;
    for (auto& [start, length] : ranges_) {
      if (at >= start && at + size <= start + length) return Locked::Whole;
      some = some || (at < start + length && at + size > start);
    }
    return some ? Locked::Part : Locked::None;
  }
  // torch's own pinned memory (pin_memory=True) mostly comes from its cache, so it takes no time.
  void note(uintptr_t at, size_t size) {
    std::lock_guard g(m_);
    ranges_[at] = size;
  }

 private:
  double total() {
    std::lock_guard g(m_);
    double sum = 0;
    for (auto& [start, length] : ranges_) sum += length;
    return sum;
  }
  std::mutex m_;
  std::map<uintptr_t, size_t> ranges_;
};
inline PageLocks& page_locks() {
  static PageLocks* one = new PageLocks;
  return *one;
}

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    void* at = nullptr;
    size_t size = std::max<size_t>(n, 1);
    TORCH_CHECK(posix_memalign(&at, 4096, size) == 0, "no host memory");
    page_locks().note(reinterpret_cast<uintptr_t>(at), size);
    return {at, at, &drop, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }

 private:
  // torch keeps it until no copy uses it. Here it is never released while the device may write to it.
  static void drop(void* at) {
    page_locks().remove(reinterpret_cast<uintptr_t>(at));
    for (int device = 0; device < device_count(); device++)
      for (Stream* stream : streams().of(device))
        if (!stream->idle()) return;
    free(at);
  }
};
inline PinnedMemory& pinned_memory() {
  static PinnedMemory* one = new PinnedMemory;
  return *one;
}

}  // namespace simulated

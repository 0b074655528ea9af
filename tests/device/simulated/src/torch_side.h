// The interface of torch to a device: a guard (autograd, streams and events in Python) and hooks (available devices).
#pragma once

#include "kernels.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simulated {

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    uncheckedSetDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return device(current_device); }
  void setDevice(c10::Device d) const override { uncheckedSetDevice(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) current_device = d.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
  void synchronizeDevice(c10::DeviceIndex d) const override { synchronize(static_cast<int>(d)); }

  c10::Stream getStream(c10::Device d) const override { return stream(current(number(d))); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream({number(d), 0}); }
  c10::Stream getNewStream(c10::Device d, int priority) const override {
    return stream({number(d), streams().from_pool(number(d), priority)});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool high) const override {
    return getNewStream(d, high ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    current_stream[number(s.device())] = s.id();
    return before;
  }
  bool queryStream(const c10::Stream& s) const override {
    capture().refuse("cudaStreamQuery");
    driver().enter("cudaStreamQuery");
    return streams().at(key(s)).idle();
  }
  void synchronizeStream(const c10::Stream& s) const override { synchronize(key(s)); }
  bool isStreamCapturing(const c10::Stream& s) const override { return capture().of(key(s)); }
  void* getStreamNativeHandle(const c10::Stream s) const override { return reinterpret_cast<void*>(s.id()); }

  // An event is a pointer to the moment of its last recording.
  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new MomentPtr;
    *static_cast<MomentPtr*>(*event) = simulated::record(key(s));
  }
  void block(void* event, const c10::Stream& s) const override { wait_on_stream(key(s), moment(event)); }
  bool queryEvent(void* event) const override { return query(moment(event)); }
  void synchronizeEvent(void* event) const override { synchronize(moment(event)); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<MomentPtr*>(event); }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(moment(to)->when - moment(from)->when).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& s) const override {
    device_memory().record(ptr, s.id());
  }

 private:
  static c10::Device device(int index) {
    return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
  }
  static int number(c10::Device d) { return d.index() < 0 ? current_device : d.index(); }
  static StreamKey key(const c10::Stream& s) { return {s.device_index(), s.id()}; }
  static c10::Stream stream(StreamKey key) { return c10::Stream(c10::Stream::UNSAFE, device(key.first), key.second); }
  static const MomentPtr& moment(void* event) { return *static_cast<MomentPtr*>(event); }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return device_count() > 0; }
  bool hasPrimaryContext(at::DeviceIndex d) const override { return driver().awake[d]; }
  bool isPinnedPtr(const void* p) const override {
    return page_locks().look(reinterpret_cast<uintptr_t>(p), 1) == Locked::Whole;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory(); }
  const at::Generator& getDefaultGenerator(at::DeviceIndex d) const override {
    return default_generator(d < 0 ? simulated::current_device : d);
  }
  at::Generator getNewGenerator(at::DeviceIndex d) const override {
    return at::make_generator<DeviceGenerator>(d < 0 ? getCurrentDevice() : d);
  }
  at::Device getDeviceFromPtr(void*) const override { return Guard().getDevice(); }
  at::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  int getNumGPUs() const override { return device_count(); }
  at::DeviceIndex current_device() const override { return getCurrentDevice(); }
  void setCurrentDevice(at::DeviceIndex d) const override { simulated::current_device = d; }
  at::DeviceIndex getCurrentDevice() const override { return static_cast<at::DeviceIndex>(simulated::current_device); }
  at::DeviceIndex exchangeDevice(at::DeviceIndex d) const override {
    auto before = getCurrentDevice();
    if (d >= 0) simulated::current_device = d;
    return before;
  }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex d) const override { return exchangeDevice(d); }
  void deviceSynchronize(at::DeviceIndex d) const override { synchronize(static_cast<int>(d)); }
};

}  // namespace simulated

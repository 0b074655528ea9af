// Random numbers of the device: a seed and the number of kernels that have drawn numbers, as in CUDA (16 bytes).
#pragma once

#include "driver.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>

namespace simulated {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(c10::DeviceType::CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    auto* words = reinterpret_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }
  // For a kernel launched now. It runs later, after others have been launched.
  at::Generator next() {
    std::lock_guard g(mutex_);
    return at::detail::createCPUGenerator(seed_ * 0x9E3779B97F4A7C15ull + ++offset_);
  }

 private:
  DeviceGenerator* clone_impl() const override {
    auto* other = new DeviceGenerator(device().index());
    other->seed_ = seed_, other->offset_ = offset_;
    return other;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

inline const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (c10::DeviceIndex i = 0; i < MOST_DEVICES; i++) made->push_back(at::make_generator<DeviceGenerator>(i));
    return made;
  }();
  return all->at(device);
}

}  // namespace simulated

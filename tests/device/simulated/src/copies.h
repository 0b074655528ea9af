// Copies between the host and a device, and between devices, by the rules of torch's Copy.cu.
//
// A copy of page-locked memory is asynchronous. For other memory the call waits (to the host) or reads the bytes
// immediately (to the device). A range that is only partly page-locked is rejected. Data that is not contiguous
// with the same layout on both sides goes through temporaries.
#pragma once

#include "memory.h"

#include <ATen/ATen.h>

namespace simulated {

using at::Tensor;

// The memory of a tensor as seen by the CPU. It does not keep it alive, like a kernel in flight.
inline Tensor host_view(const Tensor& t) {
  auto options = t.options().device(at::kCPU).requires_grad(false).pinned_memory(false);
  auto view = at::from_blob(t.mutable_data_ptr(), t.sizes(), t.strides(), options);
  view._set_conj(t.is_conj());
  view._set_neg(t.is_neg());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

// The bus of one device: a copy engine for each direction, and the effect of copies on kernels.
class Bus {
 public:
  enum Direction { DOWN = 0, UP = 1 };

  void carry(void* to, const void* from, size_t size, Direction direction) {
    std::lock_guard engine(engines_[direction]);
    double rate = (direction == DOWN ? knobs().d2h_gbs : knobs().h2d_gbs) * 1e9;
    if (direction == DOWN) going_down_++;
    if (knobs().poison && rate > 0) memset(to, POISON, size);
    auto chunk = static_cast<size_t>(knobs().chunk_bytes);
    auto due = Clock::now();
    for (size_t at = 0; at < size && !driver().ended; at += chunk) {
      size_t n = std::min(chunk, size - at);
      if (rate > 0) sleep_until(due += seconds(n / rate));
      memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, n);
    }
    if (direction == DOWN) going_down_--;
  }
  // A kernel takes its time from the end of the one before it, and is slower during copies to the host.
  void spend(Stream& stream, double us) {
    constexpr double SLICE_US = 50;  // then the bus is checked again
    auto end = std::max(stream.free_at, Clock::now() - seconds(1e-3));
    for (double left = us; left > 0 && !driver().ended; left -= SLICE_US) {
      end += seconds(std::min(left, SLICE_US) * 1e-6 * (going_down_ ? knobs().kernels_slowed.load() : 1.0));
      sleep_until(end);
    }
    stream.free_at = end;
  }

 private:
  std::mutex engines_[2];
  std::atomic<int> going_down_{0};
};
inline Bus& bus(int device) {
  static Bus* all = new Bus[MOST_DEVICES];
  return all[device];
}

// The work of a kernel, with its duration.
inline void launch(int device, Work work) {
  StreamKey key = current(device);
  put(key, [key, work = std::move(work)] {
    if (double us = knobs().kernel_us; us > 0) bus(key.first).spend(streams().at(key), us);
    work();
  });
  check_launch();
}

inline bool one_piece(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

inline void copy_bytes(const Tensor& to, const Tensor& from, bool non_blocking) {
  bool down = from.is_cuda();
  int device = (down ? from : to).device().index();
  StreamKey key = current(device);
  size_t size = to.numel() * to.element_size();
  void* target = to.mutable_data_ptr();
  const void* source = from.const_data_ptr();
  Locked locked = page_locks().look(reinterpret_cast<uintptr_t>(down ? target : source), size);
  if (locked == Locked::Part) fail(INVALID_VALUE, "cudaMemcpyAsync across page-locked and other memory");
  if (locked == Locked::None && !down) {
    capture().refuse("cudaMemcpyAsync of pageable memory");
    auto taken = std::make_shared<std::string>(static_cast<const char*>(source), size);
    put(key, [=] { bus(device).carry(target, taken->data(), size, Bus::UP); }, "cudaMemcpyAsync");
  } else {
    put(key, [=] { bus(device).carry(target, source, size, down ? Bus::DOWN : Bus::UP); }, "cudaMemcpyAsync");
  }
  if (!non_blocking || (down && locked == Locked::None)) synchronize(key);
}

// Runs on the stream of the source, which first waits for the target's stream. That stream then waits for the copy.
inline void copy_on_devices(const Tensor& to, const Tensor& from) {
  int source = from.device().index(), target = to.device().index();
  if (source != target) wait_on_stream(current(source), record(current(target)));
  Tensor there = host_view(to), here = host_view(from).expand_as(there);
  launch(source, [there, here]() mutable {
    at::AutoDispatchBelowADInplaceOrView plain;
    there.copy_(here);
  });
  if (source != target) wait_on_stream(current(target), record(current(source)));
}

inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  if (self.is_cuda() && source.is_cuda()) {
    copy_on_devices(self, source);
  } else if (one_piece(self, source)) {
    copy_bytes(self, source, non_blocking);
  } else {  // dtypes change on the device for asynchronous copies, else on the host, which has enough memory
    bool at_source = source.is_cuda() == non_blocking;
    auto dtype = at_source ? self.scalar_type() : source.scalar_type();
    Tensor from = source.to(dtype).resolve_conj().resolve_neg().expand_as(self).contiguous();
    bool direct = self.is_contiguous() && self.scalar_type() == dtype && !self.is_conj() && !self.is_neg();
    Tensor to = direct ? self : at::empty(self.sizes(), self.options().dtype(dtype));
    copy_bytes(to, from, non_blocking);
    if (!direct) self.copy_(to, non_blocking);
  }
  return self;
}

inline Tensor copy_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  const_cast<Tensor&>(target).copy_(self);
  return target;
}

}  // namespace simulated

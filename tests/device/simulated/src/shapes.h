// Storage and shape of tensors on the device, and views: these need no kernel.
#pragma once

#include "copies.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace simulated {

constexpr c10::DispatchKeySet ON_DEVICE(c10::DispatchKey::CUDA);

inline Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard there(device);
  return at::detail::empty_generic(size, &device_memory(), ON_DEVICE, c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard there(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory(), ON_DEVICE, c10::dtype_or_default(dtype));
}

// Replace the memory of a tensor, or release it. Old data is kept as far as it fits.
inline void resize_storage(const Tensor& self, size_t size) {
  auto* storage = self.storage().unsafeGetStorageImpl();
  c10::DeviceGuard there(self.device());
  auto fresh = device_memory().allocate(size);
  void *to = fresh.get(), *from = storage->mutable_data();
  if (size_t both = std::min(storage->nbytes(), size)) put(current(self.device().index()), [=] { memcpy(to, from, both); });
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(size);
}

inline const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  size_t needed = (self.storage_offset() + self.numel()) * self.element_size();
  if (self.storage().nbytes() < needed) resize_storage(self, needed);
  return self;
}

inline Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> at) {
  return at::cpu::as_strided(self, size, stride, at);
}

inline Tensor& set_part(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  }
  return self;
}
inline Tensor& set_whole(Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_part(self, std::move(source), 0, {count}, {1});
}
inline Tensor& set_like(Tensor& self, const Tensor& source) {
  return set_part(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline void record_stream(Tensor& self, c10::Stream stream) {
  device_memory().record(self.storage().data_ptr(), stream.id());
}

inline void register_shapes(torch::Library& m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Tensor", &set_like);
  m.impl("record_stream", &record_stream);
  m.impl("copy_", &copy_);
  m.impl("_copy_from_and_resize", &copy_and_resize);
}

}  // namespace simulated

// Every operator except views and copies: the CPU runs it on the memory of the device, in the order of its stream.
//
// torch's own rules (device "meta") give the shapes of the results at the call, so the host need not wait. If shapes
// depend on values, as for `nonzero` or `item`, the host waits, as with a real device.
#pragma once

#include "random.h"
#include "shapes.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace simulated {

using torch::jit::Stack;
using c10::IValue;

inline void call(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView plain;
  op.callBoxed(&stack);
}

// The same value with other tensors, and with another device.
template <class Replace>
IValue replaced(const IValue& value, c10::DeviceType device, Replace replace) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(replace(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> found;
    for (const Tensor& t : value.toTensorVector()) found.push_back(t.defined() ? replace(t) : t);
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> found;
    for (std::optional<Tensor> t : value.toOptionalTensorList())
      found.push_back(t && t->defined() ? std::optional(replace(*t)) : t);
    return found;
  }
  return value.isDevice() ? IValue(at::Device(device)) : value;
}
template <class Visit>
void each_tensor(const Stack& values, Visit visit) {
  for (const IValue& value : values) replaced(value, at::kCPU, [&](const Tensor& t) { visit(t); return t; });
}

inline bool is_written(const c10::Argument& one) { return one.alias_info() && one.alias_info()->isWrite(); }
inline bool is_generator(const c10::Argument& one) {
  auto type = one.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

inline Tensor as_number_of(const Tensor& made, const Tensor& of) {
  if (of.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}
inline Tensor for_kernel(const Tensor& t) {
  if (t.is_cuda()) return host_view(t);
  return t.is_cpu() && t.dim() == 0 ? as_number_of(t.clone(), t) : t;  // a number is read at launch
}
inline Tensor for_shapes(const Tensor& t) {
  auto options = t.options().device(at::kMeta).requires_grad(false).pinned_memory(false);
  return as_number_of(at::empty_strided(t.sizes(), t.strides(), options), t);
}

// One call of an operator.
class Launch {
 public:
  Launch(const c10::OperatorHandle& op, Stack& stack) : op_(op), schema_(op.schema()), stack_(stack) {
    size_t count = schema_.arguments().size();
    args_.assign(stack.end() - count, stack.end());
    torch::jit::drop(stack, count);
    device_ = current_device;
    bool found = false;
    each_tensor(args_, [&](const Tensor& t) {
      if (t.is_cuda() && !std::exchange(found, true)) device_ = t.device().index();
    });
  }

  void run() {
    driver().enter("cudaLaunchKernel");
    for (auto& result : schema_.returns())
      TORCH_CHECK(!result.alias_info() || is_written(result), "no such view is simulated: ", schema_.operator_name());
    c10::DeviceGuard there(at::Device(at::kCUDA, device_));
    for (size_t i = 0; i < args_.size(); i++) {
      bool random = is_generator(schema_.arguments()[i]);
      on_host_.push_back(random ? generator(args_[i]) : replaced(args_[i], at::kCPU, for_kernel));
    }
    if (writes_arguments()) run_in_place();
    else if (find_shapes()) run_later();
    else run_now();
  }

 private:
  IValue generator(const IValue& given) {
    const at::Generator& one = given.isGenerator() ? given.toGenerator() : default_generator(device_);
    return one.device().is_cpu() ? one : static_cast<DeviceGenerator*>(one.unsafeGetGeneratorImpl())->next();
  }
  bool writes_arguments() {
    for (auto& result : schema_.returns()) if (!is_written(result)) return false;
    return true;
  }

  void run_in_place() {
    grow_results();
    launch(device_, [op = op_, args = on_host_] { Stack mine = args; call(op, mine); });
    for (auto& result : schema_.returns())
      for (size_t i = 0; i < args_.size(); i++) {
        auto& argument = schema_.arguments()[i];
        if (is_written(argument) && *argument.alias_info() == *result.alias_info()) stack_.push_back(args_[i]);
      }
  }
  // An empty tensor passed as `out` is resized to the result.
  void grow_results() {
    bool some = false;
    for (size_t i = 0; i < args_.size(); i++)
      some = some || (schema_.arguments()[i].is_out() && args_[i].isTensor() && args_[i].toTensor().numel() == 0);
    if (!some) return;
    Stack shapes = shapes_of_args(), before = shapes;
    call(op_, shapes);
    for (size_t i = 0; i < args_.size(); i++) {
      if (!schema_.arguments()[i].is_out() || !args_[i].isTensor()) continue;
      args_[i].toTensor().resize_(before[i].toTensor().sizes());
      on_host_[i] = host_view(args_[i].toTensor());
    }
  }

  Stack shapes_of_args() {
    Stack shapes;
    for (auto& value : args_)
      shapes.push_back(value.isGenerator() ? IValue() : replaced(value, at::kMeta, for_shapes));
    return shapes;
  }
  bool find_shapes() {
    for (auto& result : schema_.returns()) {
      auto type = result.type();
      if (!type->isSubtypeOf(*c10::TensorType::get()) && !type->isSubtypeOf(*c10::ListType::ofTensors())) return false;
    }
    shapes_ = shapes_of_args();
    try {
      call(op_, shapes_);
    } catch (const std::exception&) {  // shapes depend on values, or the CPU will report an error
      return false;
    }
    return true;
  }
  void run_later() {
    std::vector<Tensor> targets;
    for (auto& value : shapes_)
      stack_.push_back(replaced(value, at::kCUDA, [&](const Tensor& t) {
        Tensor made = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::Device(at::kCUDA, device_)));
        targets.push_back(host_view(made));
        return made;
      }));
    launch(device_, [op = op_, args = on_host_, targets] {
      Stack results = args;
      call(op, results);
      auto target = targets.begin();
      at::AutoDispatchBelowADInplaceOrView plain;
      each_tensor(results, [&](const Tensor& t) { Tensor(*target++).copy_(t); });
    });
  }
  void run_now() {
    synchronize(current(device_));
    Stack results = on_host_;
    call(op_, results);
    at::Device back(at::kCUDA, device_);
    for (auto& value : results)
      stack_.push_back(replaced(value, at::kCUDA, [&](const Tensor& t) { return t.to(back); }));
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  Stack args_, on_host_, shapes_;
  int device_;
};

inline void run_kernel(const c10::OperatorHandle& op, Stack* stack) { Launch(op, *stack).run(); }

}  // namespace simulated

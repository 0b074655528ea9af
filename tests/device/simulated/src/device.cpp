// A CUDA device made of host memory and threads, for a torch built without CUDA; see ../__init__.py.
//
// It simulates problems of concurrent copies: order and delay, reused memory, invalidated captures, faults and waits.
// It does not simulate the duration of kernels, NCCL, or more than one process.
#include "torch_side.h"

#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

namespace simulated {
namespace py = pybind11;

REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &device_memory())
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

TORCH_LIBRARY_IMPL(aten, CUDA, m) { register_shapes(m); }
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_kernel>()); }

static void set_device(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "CUDA error: invalid device ordinal");
  driver().enter("cudaSetDevice");
  driver().wake(device);
  current_device = device;
}

// Queued work is dropped, and running work ends normally.
static void end() {
  WithoutGil others;
  driver().ended = true;
  auto deadline = Clock::now() + std::chrono::seconds(1);
  for (int device = 0; device < device_count(); device++)
    for (Stream* stream : streams().of(device))
      while (!stream->idle() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

static void begin_stream(int device) {
  driver().enter("cudaStreamCreate");
  driver().wake(device);
}

static void bind_streams(py::module_& m) {
  m.def("device_count", &device_count);
  m.def("resize_storage", &resize_storage);
  m.def("get_device", [] { return current_device; });
  m.def("set_device", &set_device);
  m.def("exchange_device", [](int device) {
    return int(Guard().exchangeDevice(c10::Device(at::kCUDA, device)).index());
  });
  m.def("is_awake", [](int device) { return driver().awake[device].load(); });
  m.def("new_stream", [](int device, int priority) {
    begin_stream(device);
    return streams().from_pool(device, priority);
  });
  m.def("own_stream", [](int device) {
    begin_stream(device);
    return streams().own();
  });
  m.def("priority_of", &Streams::priority_of);
  m.def("get_stream", [](int device) { return current_stream[device]; });
  m.def("set_stream", [](int device, int64_t id) { current_stream[device] = id; });
  m.def("synchronize", [](int device) { synchronize(device); });
  m.def("sleep", [](int64_t cycles) {
    StreamKey key = current(current_device);
    put(key, [key, us = cycles / (knobs().clock_ghz * 1e3)] { bus(key.first).spend(streams().at(key), us); });
  });
}

static void bind_capture(py::module_& m) {
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def_readonly("pool", &Graph::pool)
      .def("__len__", [](Graph& graph) { return graph.nodes.size(); })
      .def("replay", [](std::shared_ptr<Graph> graph) {
        put(current(current_device), [graph] { for (auto& node : graph->nodes) node(); }, "cudaGraphLaunch");
      });
  m.def("capture_begin", [](const std::string& mode, int64_t pool) {
    int number = mode == "global" ? GLOBAL : mode == "thread_local" ? THREAD_LOCAL : RELAXED;
    capture().begin(current(current_device), number, pool);
  });
  m.def("capture_end", [] { return capture().end(); });
  m.def("new_pool", [] { return capture().new_pool(); });
  m.def("is_capturing", [] { return capture().of(current(current_device)) != nullptr; });
  m.def("exchange_mode", [](int mode) { return std::exchange(thread_mode, mode); });
}

static void bind_memory(py::module_& m) {
  m.def("host_register", [](uintptr_t at, size_t size) {
    capture().refuse("cudaHostRegister");
    return returned(page_locks().add(at, size));
  });
  m.def("host_unregister", [](uintptr_t at) { return returned(page_locks().remove(at)); });
  m.def("text_of", &text_of);
  m.def("memory_counts", [](int device) { return device_memory().counts(device); });
  m.def("reset_peak", [](int device) { device_memory().reset_peak(device); });
  m.def("generator", [](int device) {
    return py::reinterpret_borrow<py::object>(THPGenerator_initDefaultGenerator(default_generator(device)));
  });
}

static void bind_faults(py::module_& m) {
  py::class_<Moment, MomentPtr>(m, "Moment").def("reach", &Moment::reach);
  m.def("turn", &turn);
  m.def("end", &end);
  // A collective with a dead peer: later work runs only after the moment is reached.
  m.def("hang", [](int device, int64_t id) {
    auto moment = std::make_shared<Moment>(nullptr);
    wait_on_stream({device, id}, moment);
    return moment;
  });
  // A kernel that fails when it runs.
  m.def("fault", [](int device, int64_t id) { put({device, id}, [] { driver().fault = ILLEGAL_ADDRESS; }); });
  m.def("heal", [] { driver().fault = OK; });
}

}  // namespace simulated

namespace at {
using SimulatedHooks = simulated::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks)
}  // namespace at

// Functions with the names of CUDA's own library, for code that calls it without torch.
#define OF_CUDA extern "C" __attribute__((visibility("default"))) int

OF_CUDA cudaThreadExchangeStreamCaptureMode(int* mode) {
  *mode = std::exchange(simulated::thread_mode, *mode);
  return 0;
}

OF_CUDA cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  simulated::begin_stream(simulated::current_device);
  *stream = reinterpret_cast<void*>(simulated::streams().own());
  return 0;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  simulated::bind_streams(m);
  simulated::bind_capture(m);
  simulated::bind_memory(m);
  simulated::bind_faults(m);
}

// Shared parts of the simulated device: its knobs, errors of driver calls, and which devices are in use.
#pragma once

#include <Python.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace simulated {

constexpr int MOST_DEVICES = 8;
using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
using Work = std::function<void()>;  // work of a stream

// May be changed at any time. A rate of 0 means no delay.
struct Knobs {
  std::atomic<double> devices{1};
  std::atomic<double> d2h_gbs{0}, h2d_gbs{0};       // of one copy engine; there is one for each direction
  std::atomic<double> chunk_bytes{256 << 10};       // pieces of a copy: it may be torn between two of them
  std::atomic<double> kernel_us{0};                 // minimum duration of a kernel
  std::atomic<double> kernels_slowed{1};            // factor while data is copied to the host
  std::atomic<double> clock_ghz{2};                 // for kernels that sleep a number of cycles
  std::atomic<double> lock_gbs{0};                  // of page-locking
  std::atomic<double> lock_call_bytes{1e18};        // larger calls are rejected
  std::atomic<double> lock_bytes{1e18};             // a larger total is rejected
  std::atomic<double> poison{1};                    // fill freed memory and unwritten parts of copies
};
inline Knobs& knobs() {
  static Knobs* one = new Knobs;  // never destroyed, like all shared objects here: stream threads outlive `exit`
  return *one;
}
inline void turn(const std::string& name, double value) {
  auto& k = knobs();
  const std::map<std::string, std::atomic<double>*> known{
      {"devices", &k.devices}, {"d2h_gbs", &k.d2h_gbs}, {"h2d_gbs", &k.h2d_gbs}, {"chunk_bytes", &k.chunk_bytes},
      {"kernel_us", &k.kernel_us}, {"kernels_slowed", &k.kernels_slowed}, {"clock_ghz", &k.clock_ghz},
      {"lock_gbs", &k.lock_gbs}, {"lock_call_bytes", &k.lock_call_bytes}, {"lock_bytes", &k.lock_bytes},
      {"poison", &k.poison}};
  auto found = known.find(name);
  TORCH_CHECK(found != known.end(), "the simulated device has no knob called ", name);
  found->second->store(value);
}
inline int device_count() { return static_cast<int>(knobs().devices); }

// CUDA's error numbers.
enum Code { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, ILLEGAL_ADDRESS = 700, ALREADY_LOCKED = 712, NOT_LOCKED = 713,
            CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_ISOLATION = 905, CAPTURED_EVENT = 907 };
inline const char* text_of(int code) {
  switch (code) {
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case ILLEGAL_ADDRESS: return "an illegal memory access was encountered";
    case ALREADY_LOCKED: return "part or all of the requested memory range is already mapped";
    case NOT_LOCKED: return "pointer does not correspond to a registered memory region";
    case CAPTURE_UNSUPPORTED: return "operation not permitted when stream is capturing";
    case CAPTURE_INVALIDATED: return "operation failed due to a previous error during capture";
    case CAPTURE_ISOLATION: return "dependency created on uncaptured work in another stream";
    case CAPTURED_EVENT: return "operation not permitted on an event last recorded in a capturing stream";
    default: return "no error";
  }
}
[[noreturn]] inline void fail(int code, const std::string& call) {
  std::string text = std::string("CUDA error: ") + text_of(code) + " (" + call + ")";
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code, text);
}

class Driver {
 public:
  std::atomic<int> fault{OK};         // once a kernel has failed, every call fails
  std::atomic<bool> ended{false};     // the process is about to end: no more work is done
  std::atomic<bool> awake[MOST_DEVICES] = {};  // devices that have a context
  std::mutex alone;                   // held by a call that blocks all others

  // Every call starts here.
  void enter(const char* call) {
    { std::lock_guard wait(alone); }
    if (fault) fail(fault, call);
  }
  void wake(int device) { awake[device] = true; }
};
inline Driver& driver() {
  static Driver* one = new Driver;
  return *one;
}

// CUDA keeps a thread's last error until it is read. torch reads it after each kernel launch.
inline thread_local int last_error = OK;
inline int returned(int code) {
  if (code != OK) last_error = code;
  return code;
}
inline void check_launch() {
  int code = std::exchange(last_error, OK);
  if (code != OK) fail(code, "found when a kernel was launched");
}

inline void sleep_until(Clock::time_point end) { std::this_thread::sleep_until(end); }
inline Clock::duration seconds(double s) { return std::chrono::duration_cast<Clock::duration>(Seconds(s)); }

// Wraps code that waits for the device, so that other Python threads can run.
class WithoutGil {
 public:
  WithoutGil() { if (Py_IsInitialized() && PyGILState_Check()) held_ = PyEval_SaveThread(); }
  ~WithoutGil() { if (held_) PyEval_RestoreThread(held_); }
 private:
  PyThreadState* held_ = nullptr;
};

}  // namespace simulated

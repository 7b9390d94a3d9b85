// SPDX-License-Identifier: Apache-2.0
// A double of OpenCL's loader: the same functions, which go to the loader that OPENCL_DOUBLE_OF
// names, unless a fault is injected. FLOWNPU_OPENCL names the double; tests/loader_double.py steers
// it.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>

#include "ops/gpu/opencl/abi.h"
#include "tests/ops/gpu/doubles/faults.h"
#include "tests/ops/gpu/doubles/processor.h"

using namespace flownpu::gpu::cl;  // NOLINT(google-build-using-namespace): the interface's types

namespace opencl_double {

using loader_double::Faults;
using loader_double::faults;
using loader_double::Way;

namespace {

Functions load() {
  const char* file = std::getenv("OPENCL_DOUBLE_OF");
  void* library = file == nullptr ? nullptr : dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "the double of OpenCL's loader: expected OPENCL_DOUBLE_OF to name one\n");
    std::abort();
  }
  name_unknown_processor();
  Functions functions;
#define LOAD(result, name, parameters) \
  functions.name = reinterpret_cast<decltype(functions.name)>(dlsym(library, #name));
  FLOWNPU_OPENCL_FUNCTIONS(LOAD)
#undef LOAD
  return functions;
}

const Functions& loader() {
  static const Functions functions = load();
  return functions;
}

// Ends a call with a code: returns it or, for functions that make an object, writes it to the last
// argument and returns nullptr.
template <typename Result, typename... Arguments>
Result refuse(Int code, Arguments... arguments) {
  if constexpr (std::is_same_v<Result, Int>) {
    return code;
  } else {
    const auto set = [&](auto last) {
      if constexpr (std::is_same_v<decltype(last), Int*>) *last = code;
    };
    (set(arguments), ...);
    return nullptr;
  }
}

// A command that is not done still has an event, if one is asked for.
Int do_nothing(Queue queue, Event* event) {
  return event == nullptr ? 0 : loader().clEnqueueMarkerWithWaitList(queue, 0, nullptr, event);
}

template <typename Result, typename First, typename... Rest>
Result forward(Result (*Functions::*function)(First, Rest...), const char* name, First first,
               Rest... rest) {
  const Faults::Fate fate = faults().meet(name);
  if (fate.way == Way::kNone) return (loader().*function)(first, rest...);
  if constexpr (std::is_same_v<First, Queue>) {
    if (fate.way == Way::kLate || fate.way == Way::kHung) {
      Event* event = nullptr;
      const auto find = [&](auto argument) {
        if constexpr (std::is_same_v<decltype(argument), Event*>) event = argument;
      };
      (find(rest), ...);
      return do_nothing(first, event);
    }
  }
  return refuse<Result>(fate.code, first, rest...);
}

// clCreateProgramWithSource of one text: OPENCL_DOUBLE_BEFORE, such as a pragma, comes before it.
Program forward(Program (*Functions::*function)(Context, UInt, const char**, const std::size_t*,
                                                Int*),
                const char* name, Context context, UInt count, const char** texts,
                const std::size_t* lengths, Int* code) {
  const char* before = std::getenv("OPENCL_DOUBLE_BEFORE");
  if (before == nullptr)
    return forward<Program, Context>(function, name, context, count, texts, lengths, code);
  const std::string text = before + std::string("\n") + texts[0];
  const char* whole = text.c_str();
  return forward<Program, Context>(function, name, context, 1U, &whole,
                                   static_cast<const std::size_t*>(nullptr), code);
}

// By each mark's event, the fault that had begun among the commands before the mark.
class Marks {
 public:
  void keep(Event event, const Faults::Fate& fate) {
    const std::lock_guard lock(mutex_);
    fates_[event] = fate;
  }
  Faults::Fate of(Event event) const {
    const std::lock_guard lock(mutex_);
    const auto found = fates_.find(event);
    return found == fates_.end() ? Faults::Fate{} : found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<Event, Faults::Fate> fates_;
};

Marks& marks() {
  static Marks all;
  return all;
}

// clEnqueueMarkerWithWaitList.
Int forward(Int (*Functions::*function)(Queue, UInt, const Event*, Event*), const char* name,
            Queue queue, UInt count, const Event* before, Event* event) {
  const Int code = forward<Int, Queue>(function, name, queue, count, before, event);
  if (code == 0) marks().keep(*event, faults().begun());
  return code;
}

// clGetEventInfo: a mark behind a command that hangs does not end. A mark behind a command that
// failed ends with its error, after all earlier commands: the caller that sees the error frees the
// memory of these.
Int forward(Int (*Functions::*function)(Event, UInt, std::size_t, void*, std::size_t*),
            const char* name, Event event, UInt what, std::size_t bytes, void* value,
            std::size_t* had) {
  constexpr Int kSubmitted = 2;
  const Int code = forward<Int, Event>(function, name, event, what, bytes, value, had);
  if (code != 0 || what != kEventStatus) return code;
  const Faults::Fate fate = marks().of(event);
  Int& status = *static_cast<Int*>(value);
  if (fate.way == Way::kHung) status = kSubmitted;
  if (fate.way == Way::kLate && status == kComplete) status = fate.code;
  return code;
}

}  // namespace
}  // namespace opencl_double

#pragma GCC visibility push(default)
extern "C" {

// --- The loader's functions. A list of types becomes one of parameters, a9 .. a1, and one of their
// names.
#define PARAMETER(type, name) std::type_identity_t<type> name
#define PARAMETERS_1(type) PARAMETER(type, a1)
#define PARAMETERS_2(type, ...) PARAMETER(type, a2), PARAMETERS_1(__VA_ARGS__)
#define PARAMETERS_3(type, ...) PARAMETER(type, a3), PARAMETERS_2(__VA_ARGS__)
#define PARAMETERS_4(type, ...) PARAMETER(type, a4), PARAMETERS_3(__VA_ARGS__)
#define PARAMETERS_5(type, ...) PARAMETER(type, a5), PARAMETERS_4(__VA_ARGS__)
#define PARAMETERS_6(type, ...) PARAMETER(type, a6), PARAMETERS_5(__VA_ARGS__)
#define PARAMETERS_7(type, ...) PARAMETER(type, a7), PARAMETERS_6(__VA_ARGS__)
#define PARAMETERS_8(type, ...) PARAMETER(type, a8), PARAMETERS_7(__VA_ARGS__)
#define PARAMETERS_9(type, ...) PARAMETER(type, a9), PARAMETERS_8(__VA_ARGS__)
#define NAMES_1 a1
#define NAMES_2 a2, NAMES_1
#define NAMES_3 a3, NAMES_2
#define NAMES_4 a4, NAMES_3
#define NAMES_5 a5, NAMES_4
#define NAMES_6 a6, NAMES_5
#define NAMES_7 a7, NAMES_6
#define NAMES_8 a8, NAMES_7
#define NAMES_9 a9, NAMES_8
#define TENTH(a, b, c, d, e, f, g, h, i, count, ...) count
#define COUNT(...) TENTH(__VA_ARGS__, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define PARAMETERS(...) JOIN(PARAMETERS_, COUNT(__VA_ARGS__))(__VA_ARGS__)
#define NAMES(...) JOIN(NAMES_, COUNT(__VA_ARGS__))

#define FORWARD(result, name, parameters)                                     \
  result name(PARAMETERS parameters) {                                        \
    return opencl_double::forward(&Functions::name, #name, NAMES parameters); \
  }
FLOWNPU_OPENCL_FUNCTIONS(FORWARD)

// --- How tests steer it.
void opencl_double_inject(const char* call, std::int64_t nth, std::int32_t way, Int code) {
  loader_double::faults().inject(call, nth, static_cast<loader_double::Way>(way), code);
}
void opencl_double_reset() { loader_double::faults().reset(); }
std::int64_t opencl_double_calls(const char* call) { return loader_double::faults().calls(call); }
std::int64_t opencl_double_endless_waits() { return loader_double::faults().endless_waits(); }

}  // extern "C"
#pragma GCC visibility pop

// SPDX-License-Identifier: Apache-2.0
// Makes an entry of a kernel table from a kernel's own signature.
#pragma once

#include <aie_api/aie.hpp>
#include <array>
#include <cstdio>
#include <exception>
#include <utility>

#include "aie/host/kernel_table.h"

namespace flownpu::aie_host {

template <typename T>
constexpr const char* type_name() {
  if constexpr (std::is_same_v<T, std::uint8_t>) return "uint8";
  if constexpr (std::is_same_v<T, std::int32_t>) return "int32";
  if constexpr (std::is_same_v<T, float>) return "float32";
  if constexpr (std::is_same_v<T, bfloat16>) return "bfloat16";
  if constexpr (std::is_same_v<T, bfp16ebs8>) return "bfp16ebs8";
}

template <typename T>
constexpr Parameter parameter_of() {
  if constexpr (std::is_pointer_v<T>) {
    using Element = std::remove_pointer_t<T>;
    using Plain = std::remove_const_t<Element>;
    return {type_name<Plain>(), sizeof(Plain), true, !std::is_const_v<Element>};
  } else {
    static_assert(std::is_same_v<T, std::int32_t>, "a kernel takes buffers and int32");
    return {type_name<T>(), sizeof(T), false, false};
  }
}

template <typename T>
T take(const Argument& argument) {
  if constexpr (std::is_pointer_v<T>) {
    return static_cast<T>(argument.data);
  } else {
    return argument.value;
  }
}

// Throws Trap where two buffers overlap and one of them is written, unless both begin at the same
// address (a kernel that works in place).
inline void check_overlaps() {
  const auto& ranges = aie::host::ranges;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const auto& a = ranges[i];
      const auto& b = ranges[j];
      const bool overlap = a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes;
      if (overlap && (a.writable || b.writable) && a.begin != b.begin) {
        throw aie::host::Trap(b.name + " and " + a.name + " overlap");
      }
    }
  }
}

inline void open_buffers(const Parameter* parameters, const Argument* arguments,
                         std::size_t count) {
  auto& ranges = aie::host::ranges;
  ranges.clear();
  for (std::size_t i = 0; i < count; ++i) {
    if (!parameters[i].is_buffer) continue;
    ranges.push_back({reinterpret_cast<std::uintptr_t>(arguments[i].data), arguments[i].bytes,
                      parameters[i].is_written,
                      "argument " + std::to_string(i) + " (" + parameters[i].type + ")"});
  }
  check_overlaps();
}

template <auto Function, typename Signature = decltype(Function)>
struct Caller;
template <auto Function, typename... Ts>
struct Caller<Function, void (*)(Ts...)> {
  static constexpr std::array<Parameter, sizeof...(Ts)> kParameters = {parameter_of<Ts>()...};

  static bool call(const Argument* arguments, char* error, std::size_t capacity) {
    try {
      aie::host::core_state = {};
      open_buffers(kParameters.data(), arguments, kParameters.size());
      [&]<std::size_t... I>(std::index_sequence<I...>) {
        Function(take<Ts>(arguments[I])...);
      }(std::index_sequence_for<Ts...>());
      aie::host::ranges.clear();
      return true;
    } catch (const std::exception& trapped) {
      aie::host::ranges.clear();
      std::snprintf(error, capacity, "%s", trapped.what());
      return false;
    }
  }
};

template <auto Function>
constexpr Kernel make_kernel(const char* name) {
  using Call = Caller<Function>;
  return {name, Call::kParameters.data(), Call::kParameters.size(), &Call::call};
}

}  // namespace flownpu::aie_host

#define FLOWNPU_KERNEL(entry) flownpu::aie_host::make_kernel<&entry>(#entry)
// Defines the library's one exported function over `kernels`, an array of Kernel.
#define FLOWNPU_EXPORT_KERNELS(kernels)                                                   \
  extern "C" __attribute__((visibility("default"))) const flownpu::aie_host::KernelTable* \
  flownpu_aie_kernels() {                                                                 \
    static constexpr flownpu::aie_host::KernelTable table = {                             \
        __AIE_ARCH__ == 20 ? "xdna" : "xdna2", kernels, std::size(kernels)};              \
    return &table;                                                                        \
  }

// SPDX-License-Identifier: Apache-2.0
// Functions for the operators of the host: their records, and rows in the buffers of a call.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/error.h"
#include "ops/formats/numbers.h"
#include "ops/npu/run/host_operators.h"

namespace flownpu::npu {

// Rows that a thread computes at a time: a few KB each, neighbours in memory.
inline constexpr std::size_t kRowsOfTask = 8;

using Arguments = std::vector<std::pair<std::string_view, std::size_t>>;

// Reads an operator's record; messages name the operator.
class HostCallReader {
 public:
  HostCallReader(const HostCallRecord& record, const std::string& label)
      : record_(record), label_(label) {}

  // A parameter from 1 to 2^31 - 1.
  std::size_t size(std::string_view name) const {
    const std::int64_t value = number(name);
    if (value < 1) fail(where(), "expected a ", name, " of 1 or more, got ", value);
    return static_cast<std::size_t>(value);
  }
  std::size_t number_below(std::string_view name, std::size_t end) const {
    const std::int64_t value = number(name);
    if (value < 0 || static_cast<std::size_t>(value) >= end)
      fail(where(), "expected a ", name, " below ", end, ", got ", value);
    return static_cast<std::size_t>(value);
  }
  float real(std::string_view name) const {
    return std::bit_cast<float>(static_cast<std::int32_t>(number(name)));
  }
  // A parameter: elements from one row to the next, at least `columns`.
  std::size_t line(std::string_view name, std::size_t columns) const {
    const std::size_t value = size(name);
    if (value < columns)
      fail(where(), "expected a ", name, " of ", columns, " or more, got ", value);
    return value;
  }
  // Checks the names of the arguments, and their sizes in bytes.
  void arguments(const Arguments& expected) const {
    if (record_.buffers.size() != expected.size())
      fail(where(), "expected ", expected.size(), " arguments, got ", record_.buffers.size());
    const BufferRecord* found = record_.buffers.data();
    for (const auto& [name, bytes] : expected) {
      if (found->name != name || found->bytes != bytes) {
        fail(where(), "expected ", name, " of ", bytes, " bytes, got ", found->name, " of ",
             found->bytes);
      }
      ++found;
    }
  }
  const BufferRecord& argument(std::size_t number) const {
    if (number >= record_.buffers.size())
      fail(where(), "expected more than ", number, " arguments, got ", record_.buffers.size());
    return record_.buffers[number];
  }
  std::string where() const { return "[FlowNPU] " + label_ + ", on the host: "; }

 private:
  std::int64_t number(std::string_view name) const {
    const auto found = record_.parameters.find(name);
    if (found == record_.parameters.end() || found->second.size() != 1)
      fail(where(), "expected a number as its parameter ", name, ", got ",
           found == record_.parameters.end() ? "none" : "several");
    return found->second.front();
  }

  const HostCallRecord& record_;
  const std::string& label_;
};

inline std::byte* bytes_of(const View& view) { return view.buffer->bytes().data() + view.offset; }

template <typename T>
T* elements_of(const View& view) {
  return reinterpret_cast<T*>(bytes_of(view));
}

inline void to_host(const View& view, std::size_t offset, std::size_t bytes) {
  if (!view.constant) view.buffer->to_host(view.offset + offset, bytes);
}

inline void to_device(const View& view, std::size_t offset, std::size_t bytes) {
  view.buffer->to_device(view.offset + offset, bytes);
}

inline void widen(const std::uint16_t* from, std::size_t count, float* to) {
  std::transform(from, from + count, to, from_bfloat16);
}

inline void narrow(const cpu::Kernels& kernels, const float* from, std::size_t count,
                   std::uint16_t* to) {
  kernels.store_cache(from, to, DataType::kBFloat16, static_cast<std::int64_t>(count));
}

// Calls task(row, scratch) for all rows, on all threads; `scratch` has `floats` elements for each.
template <typename Task>
void for_rows(const HostCompute& compute, std::size_t rows, std::size_t floats,
              std::vector<float>& scratch, const Task& task) {
  scratch.resize(static_cast<std::size_t>(compute.pool->threads()) * floats);
  const std::size_t tasks = (rows + kRowsOfTask - 1) / kRowsOfTask;
  compute.pool->run(static_cast<std::int64_t>(tasks), [&](std::int64_t index, std::size_t thread) {
    const std::size_t first = static_cast<std::size_t>(index) * kRowsOfTask;
    for (std::size_t row = first; row < std::min(rows, first + kRowsOfTask); ++row)
      task(row, scratch.data() + thread * floats);
  });
}

}  // namespace flownpu::npu

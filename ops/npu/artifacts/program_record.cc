// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/artifacts/program_record.h"

#include <algorithm>
#include <bit>
#include <sstream>
#include <utility>
#include <variant>

namespace flownpu::npu {
namespace {

using words::WordReader;

// A number of elements; in bytes it stays far below 2^64.
constexpr std::size_t kMostElements = std::size_t{1} << 31;

// An attribute as words, as `attribute_words` in aie/programs/program.py writes it.
struct WordsOf {
  using Words = std::vector<std::int64_t>;
  Words operator()(std::int64_t value) const { return {value}; }
  Words operator()(float value) const { return {std::bit_cast<std::int32_t>(value)}; }
  Words operator()(const std::string& text) const { return {text.begin(), text.end()}; }
  Words operator()(const Words& values) const { return values; }
  Words operator()(const std::vector<float>& values) const {
    Words words;
    for (const float value : values) words.push_back(std::bit_cast<std::int32_t>(value));
    return words;
  }
};

// An attribute's words as text for people; the model's attribute, `like`, tells their type.
std::string text_of(const std::vector<std::int64_t>& words, const Attribute& like) {
  if (std::holds_alternative<std::string>(like)) return {words.begin(), words.end()};
  const bool floats = std::holds_alternative<float>(like);
  std::ostringstream text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    text << (i > 0 ? "," : "");
    if (floats)
      text << std::bit_cast<float>(static_cast<std::int32_t>(words[i]));
    else
      text << words[i];
  }
  return text.str();
}

ViewRecord checked(const ViewRecord& view, const ProgramRecord& program, const std::string& what) {
  const ProgramBuffer& buffer = program.buffers[view.buffer];
  if (view.offset > buffer.bytes || view.bytes > buffer.bytes - view.offset) {
    throw words::Error("program " + program.kind + ", " + what + ": expected a part of the " +
                       std::to_string(buffer.bytes) + " bytes of " + buffer.name + ", got " +
                       std::to_string(view.bytes) + " from " + std::to_string(view.offset) + " on");
  }
  return view;
}

ProgramBuffer read_buffer(WordReader& reader) {
  return {.name = reader.text(),
          .role = static_cast<BufferRole>(reader.index(4, "roles")),
          .bytes = reader.size(),
          .line = reader.index(kMostElements, "elements"),
          .one = reader.index(kMostElements, "elements")};
}

RowsRecord read_rows(WordReader& reader, const ProgramRecord& program, const char* what) {
  RowsRecord rows;
  rows.view.buffer = reader.index(program.buffers.size(), "buffers");
  rows.view.offset = reader.size();
  rows.view.bytes = reader.size();
  checked(rows.view, program, what);
  if (program.buffers[rows.view.buffer].role == BufferRole::kCache) {
    throw words::Error("program " + program.kind + ", " + what +
                       ": expected a buffer that is no cache");
  }
  rows.columns = reader.index(kMostElements, "elements");
  rows.line = reader.index(kMostElements, "elements");
  if (rows.columns == 0 || rows.line < rows.columns || rows.view.offset % 2 != 0 ||
      rows.view.bytes % (rows.line * sizeof(std::uint16_t)) != 0) {
    throw words::Error("program " + program.kind + ", " + what + ": expected whole lines, got " +
                       std::to_string(rows.view.bytes) + " bytes in lines of " +
                       std::to_string(rows.line) + " with " + std::to_string(rows.columns) +
                       " elements");
  }
  return rows;
}

// Reads a step of a program. Its call is one of `calls`, which are the arrays' or the host's.
template <typename Record>
StepRecord read_step(WordReader& reader, const ProgramRecord& program,
                     std::span<const Record> calls) {
  StepRecord step;
  step.call = reader.index(calls.size(), "calls");
  step.label = reader.text();
  step.offset = static_cast<std::int64_t>(
      reader.index(static_cast<std::size_t>(program.tokens), "tokens of the program"));
  if (const std::size_t choices = reader.index(program.buffers.size() + 1, "buffers"); choices > 0)
    step.choices = choices - 1;
  const std::vector<BufferRecord>& arguments = calls[step.call].buffers;
  const std::size_t count = reader.count();
  if (count != arguments.size()) {
    throw words::Error("program " + program.kind + ", " + step.label + ": expected " +
                       std::to_string(arguments.size()) + " arguments of its call, got " +
                       std::to_string(count));
  }
  for (const BufferRecord& argument : arguments) {
    const std::size_t buffer = reader.index(program.buffers.size(), "buffers");
    step.views.push_back(checked({buffer, reader.size(), argument.bytes}, program, step.label));
  }
  return step;
}

// Throws unless an array reaches all buffers of its steps: an array does not see the host's own
// memory.
void require_reachable(const DispatchRecord& dispatch, const ProgramRecord& program) {
  if (dispatch.host) return;
  for (const StepRecord& step : dispatch.steps) {
    for (const ViewRecord& view : step.views) {
      const ProgramBuffer& buffer = program.buffers[view.buffer];
      if (buffer.role != BufferRole::kHost) continue;
      throw words::Error("program " + program.kind + ", " + step.label +
                         ": expected buffers that an array reaches, got the host's " + buffer.name);
    }
  }
}

}  // namespace

ProgramRecord read_program(WordReader& reader, std::span<const CallRecord> calls,
                           std::span<const HostCallRecord> host_calls) {
  ProgramRecord program;
  program.kind = reader.text();
  const std::size_t attributes = reader.count();
  for (std::size_t i = 0; i < attributes; ++i) {
    std::string key = reader.text();
    program.attributes[std::move(key)] = reader.integers();
  }
  // ONNX Runtime counts positions in 32 bits.
  program.tokens = static_cast<std::int64_t>(reader.index(kMostElements, "positions"));
  if (program.tokens == 0) throw words::Error("program " + program.kind + " is for no tokens");
  program.fewest = static_cast<std::int64_t>(reader.index(kMostElements, "positions"));
  program.context = static_cast<std::int64_t>(reader.index(kMostElements, "positions"));
  for (std::size_t* bytes : {&program.cache.layer, &program.cache.position, &program.cache.head,
                             &program.cache.value, &program.cache.int8_rows})
    *bytes = reader.size();
  program.buffers = reader.list([&] { return read_buffer(reader); });
  program.given = read_rows(reader, program, "given");
  program.made = read_rows(reader, program, "made");
  program.dispatches = reader.list([&] {
    DispatchRecord dispatch;
    dispatch.host = reader.flag();
    dispatch.steps = reader.list([&] {
      return dispatch.host ? read_step(reader, program, host_calls)
                           : read_step(reader, program, calls);
    });
    if (dispatch.steps.empty())
      throw words::Error("program " + program.kind + " has an empty dispatch");
    require_reachable(dispatch, program);
    return dispatch;
  });
  return program;
}

std::size_t ProgramRecord::array_dispatches() const {
  return static_cast<std::size_t>(
      std::ranges::count_if(dispatches, [](const DispatchRecord& each) { return !each.host; }));
}

std::string ProgramRecord::difference(const Node& node) const {
  for (const auto& [key, expected] : attributes) {
    const auto found = node.attributes.find(key);
    if (found == node.attributes.end()) return key + ", which the model has not";
    const std::vector<std::int64_t> words = std::visit(WordsOf{}, found->second);
    if (words != expected) {
      return key + " " + text_of(expected, found->second) + ", where this model has " +
             text_of(words, found->second);
    }
  }
  return "";
}

}  // namespace flownpu::npu

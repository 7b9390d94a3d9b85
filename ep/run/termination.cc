// SPDX-License-Identifier: Apache-2.0
#include "ep/run/termination.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "ep/model/onnx_model.h"
#include "ops/nodes/node.h"

namespace flownpu {
namespace {

using Clock = std::chrono::steady_clock;

// The interval is too short to notice, and so long that asking costs almost nothing. Most decode
// steps are shorter, and never ask.
constexpr std::chrono::milliseconds kInterval{20};

// A node that needs no input, and that ONNX Runtime does not fold.
constexpr const char* kOutput = "y";

std::string model_of_one_node() {
  Node node;
  node.name = "terminated";
  node.op_type = "RandomUniform";
  node.attributes["shape"] = std::vector<std::int64_t>{1};
  node.outputs.push_back(Value{.name = kOutput, .type = DataType::kFloat32, .shape = Shape{1}});
  return onnx_model({node}, {}, {kOutput}, {}, {{"", 21}});
}

}  // namespace

struct Termination::Running {
  const Termination* of = nullptr;
  const OrtRunOptions* options = nullptr;
  Clock::time_point next;  // when to ask
  bool usable = true;      // whether another session takes the options
};

thread_local std::vector<Termination::Running> Termination::runs;

void Termination::begin(const OrtRunOptions* options) {
  // Before the first run, because a decode step allocates nothing.
  std::call_once(once_, [this] { prepare(); });
  runs.push_back({.of = this, .options = options, .next = Clock::now() + kInterval});
}

void Termination::end() {
  if (running() != nullptr) runs.pop_back();
}

Termination::Running* Termination::running() const {
  return runs.empty() || runs.back().of != this ? nullptr : &runs.back();
}

void Termination::check() {
  Running* run = running();
  if (run != nullptr && run->usable && Clock::now() >= run->next) ask(*run);
}

const OrtRunOptions* Termination::options() {
  Running* run = running();
  if (run == nullptr) return nullptr;
  if (run->usable) ask(*run);
  return run->usable ? run->options : nullptr;
}

void Termination::ask(Running& run) {
  run.next = Clock::now() + kInterval;
  try {
    if (run.usable = !terminated_.empty(); !run.usable) return;
    run_model(run.options);
  } catch (const Error& error) {
    if (error.what() == terminated_) throw;
    run.usable = false;
  }
}

void Termination::run_model(const OrtRunOptions* options) const {
  OrtValue* result = nullptr;
  session_->run(options, {}, {}, {&kOutput, 1}, {&result, 1});
  api_.call(ort::ReleaseValue, result);
}

void Termination::prepare() {
  session_ =
      std::make_unique<OwnSession>(api_, model_of_one_node(), 1, ort::ORT_LOGGING_LEVEL_FATAL);
  OrtRunOptions* made = nullptr;
  api_.call(ort::CreateRunOptions, &made);
  const auto release = [this](OrtRunOptions* options) {
    api_.call(ort::ReleaseRunOptions, options);
  };
  const std::unique_ptr<OrtRunOptions, decltype(release)> options(made, release);
  api_.call(ort::RunOptionsSetTerminate, made);
  try {
    run_model(made);
  } catch (const Error& error) {
    terminated_ = error.what();
  }
}

}  // namespace flownpu

// SPDX-License-Identifier: Apache-2.0
// ExecutionPlan::Planner: decides for every value of a partition where its memory is
// (ExecutionPlan::Home).
#pragma once

#include <exception>
#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

#include "ep/partition/execution_plan.h"
#include "ep/partition/schedule.h"
#include "ops/error.h"

namespace flownpu {

class ExecutionPlan::Planner {
 public:
  Planner(ExecutionPlan& plan, const std::vector<std::string>& inputs,
          const std::vector<std::string>& outputs);

  // `nodes` in topological order; throws Error naming the node whose preparation fails.
  void plan(std::vector<Node> nodes);

 private:
  void find_lives(const std::vector<Node>& nodes);
  void add_step(Node node, std::unique_ptr<Step> step, std::size_t index);
  std::size_t read(const Value& value);
  // `same`: the value whose memory the output may share; kNowhere if none.
  std::size_t write(const Value& value, std::size_t same = kNowhere);
  std::size_t add(PlannedValue value);
  void find_last_readers();
  void find_late_readers();
  void find_streams();

  ExecutionPlan& plan_;
  Schedule schedule_;
  std::unordered_map<std::string, std::size_t> input_index_;
  std::unordered_map<std::string, std::size_t> output_index_;
  std::unordered_map<std::string, std::size_t> value_index_;
  // For each value its last reader among the steps, and for each step the values that it is the
  // last to use.
  std::unordered_map<std::string, std::size_t> last_reader_;
  std::vector<std::vector<std::string>> last_read_;
};

// The error's message, preceded by the node's name if the message lacks it.
inline std::string named(const Node& node, const std::exception& error) {
  std::string message = error.what();
  if (message.find(to_string(node)) != std::string::npos) return message;
  return "[FlowNPU] " + to_string(node) + ": " + message;
}

// Runs `body`, and adds the node's name to errors that it throws.
template <typename Body>
auto naming(const Node& node, const Body& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    fail("[FlowNPU] out of memory in ", to_string(node));
  } catch (const Unsupported& error) {
    throw Unsupported(named(node, error));
  } catch (const DeviceFailed& error) {
    throw DeviceFailed(named(node, error));
  } catch (const std::exception& error) {
    throw Error(named(node, error));
  }
}

}  // namespace flownpu

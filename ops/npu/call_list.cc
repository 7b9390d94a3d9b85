// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/call_list.h"

#include <utility>

namespace flownpu::npu {

void CallList::add(const CallRecord& record, std::string name, std::vector<View> arguments) {
  std::unique_ptr<PreparedCall>& call = calls_[&record];
  if (call == nullptr) call = std::make_unique<PreparedCall>(*designs_, record);
  call->require(arguments);
  steps_.push_back({std::move(name), call.get(), std::move(arguments)});
}

void CallList::run(std::int64_t position, const std::string& where, Buffer* buffer) {
  std::vector<View> arguments;
  for (const Step& step : steps_) {
    arguments = step.arguments;
    for (View& argument : arguments) {
      if (argument.buffer == nullptr) argument.buffer = buffer;
    }
    const Call call{.name = step.name + where,
                    .sequence = step.call->at(position),
                    .arguments = arguments,
                    .family = step.call->file(),
                    .position = position};
    designs_->dispatch(step.call->array(), {&call, 1});
  }
}

}  // namespace flownpu::npu

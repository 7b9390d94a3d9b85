// SPDX-License-Identifier: Apache-2.0
#include "ep/partition/plan_with_fallback.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "ops/error.h"

namespace flownpu {
namespace {

// Passes a run's inputs and outputs on, and notes some of the outputs.
class NotedIo final : public PlanIo {
 public:
  NotedIo(PlanIo& io, const std::vector<std::size_t>& noted)
      : io_(io), noted_(noted), tensors_(noted.size()) {}

  Tensor input(std::size_t index) override { return io_.input(index); }
  void* output(std::size_t index, const Shape& shape) override {
    void* data = io_.output(index, shape);
    const auto found = std::ranges::find(noted_, index);
    if (found != noted_.end()) {
      Tensor& tensor = tensors_[static_cast<std::size_t>(found - noted_.begin())];
      tensor.data = data;
      tensor.shape = shape;
    }
    return data;
  }

  std::vector<Tensor> take() { return std::move(tensors_); }

 private:
  PlanIo& io_;
  const std::vector<std::size_t>& noted_;
  std::vector<Tensor> tensors_;
};

}  // namespace

PlanWithFallback::PlanWithFallback(std::shared_ptr<const Device> device,
                                   std::unique_ptr<const ExecutionPlan> plan,
                                   std::unique_ptr<const ExecutionPlan> other)
    : device_(std::move(device)), plan_(std::move(plan)), other_(std::move(other)) {}

PlanWithFallback::PlanWithFallback(std::shared_ptr<const transformer::StagedDevice> device,
                                   std::unique_ptr<const ExecutionPlan> plan,
                                   std::unique_ptr<const ExecutionPlan> other,
                                   std::vector<std::size_t> presents, bool falls_back)
    : device_(device),
      staged_(std::move(device)),
      plan_(std::move(plan)),
      other_(std::move(other)),
      presents_(std::move(presents)),
      falls_back_(falls_back) {}

void PlanWithFallback::run(PlanIo& io, StepObserver* observer) const {
  std::unique_lock<std::mutex> lock;
  if (staged_ != nullptr) lock = std::unique_lock(one_run_);
  if (failed_ && other_ != nullptr) {
    run_other(io, observer);
    return;
  }
  try {
    plan_->run(io, observer);
  } catch (const transformer::OtherStage& stage) {
    run_stage(stage, io, observer);
  } catch (const Unsupported&) {
    if (other_ == nullptr || !falls_back_) throw;
    run_other(io, observer);
  } catch (const DeviceFailed& error) {
    failed_ = true;
    if (other_ == nullptr) {
      throw DeviceFailed(std::string(error.what()) +
                         ". The session takes no more runs: make a new one; with the option "
                         "on_unsupported=cpu its CPU would go on");
    }
    const std::string next = staged_ == nullptr || staged_->other_is_host()
                                 ? "its CPU"
                                 : "device " + std::string(staged_->other()->name());
    throw DeviceFailed(std::string(error.what()) + ". The session's next runs are on " + next);
  }
}

void PlanWithFallback::run_other(PlanIo& io, StepObserver* observer) const {
  if (staged_ == nullptr || staged_->other_is_host()) {
    std::vector<Tensor> inputs;
    for (const std::size_t index : plan_->fed()) inputs.push_back(io.input(index));
    device_->restore(inputs);
  }
  other_->run(io, observer);
}

void PlanWithFallback::run_stage(const transformer::OtherStage& stage, PlanIo& io,
                                 StepObserver* observer) const {
  NotedIo noted(io, presents_);
  try {
    other_->run(noted, observer);
  } catch (const DeviceFailed& error) {
    staged_->lose_other();
    throw DeviceFailed(std::string(error.what()) + ". The session's next runs are on device " +
                       std::string(staged_->own().name()));
  }
  if (staged_->other_is_host()) stage.finish(noted.take());
}

}  // namespace flownpu

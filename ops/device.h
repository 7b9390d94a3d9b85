// SPDX-License-Identifier: Apache-2.0
// Device: all the EP knows of the thing that computes. It says which nodes it takes, prepares each
// of them once as a Step, and runs the steps on views that the EP's program plans.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/nodes/contract.h"
#include "ops/nodes/node.h"
#include "ops/nodes/slicing.h"
#include "ops/nodes/tensor.h"

namespace flownpu {

// What a matrix product rounds its activations to before it multiplies them.
enum class Activations : std::uint8_t { kBFloat16, kInt8 };

// What a GPU's decoder kernels store as what they leave for one another. kAuto: float16 where the
// device computes in half precision and its driver was found to convert rightly, else float32.
enum class GpuDtype : std::uint8_t { kAuto, kFloat16, kFloat32 };

// What holds weights for a GPU's kernels that read them for one row: memory, or an image that is
// read through its texture units. kAuto: what was measured to be the fastest; memory where nothing
// is measured.
enum class GpuWeights : std::uint8_t { kAuto, kBuffer, kImage };

struct DeviceOptions {
  Activations activations = Activations::kInt8;
  // 0: one thread for each core this process may run on.
  int threads = 0;
  // "auto", or the instruction set to use: "amx", "avx512", "avx2", "generic". An unknown one, or
  // one this CPU lacks, is an Error that lists those it has.
  std::string cpu_isa = "auto";
  // Folder of the NPU's compiled designs; empty: `artifacts/` beside the model.
  std::string artifacts;
  // Multiply-adds of an operator by itself that are worth a dispatch on the NPU; none: what the
  // host computes in the time that a dispatch takes.
  std::optional<std::int64_t> npu_threshold = std::nullopt;
  // A part of the OpenCL device's name or platform; empty: the first GPU, else the first device.
  std::string opencl_device = "";
  GpuDtype gpu_dtype = GpuDtype::kAuto;
  GpuWeights gpu_weights = GpuWeights::kAuto;
};

// Finds the node that makes a value; null if none of those at hand does.
using Producer = std::function<const Node*(std::string_view value)>;

// A node of a whole graph, and why it is not taken; empty if it is.
struct Judged {
  Node node;
  std::string reason;
};

// What a device was asked to lower, beside the nodes.
struct Lowering {
  // Where the model file is; empty if it has none.
  std::string model_folder;
  // Names of the values that leave the partition.
  std::vector<std::string> outputs = {};
  // What Device::obstacle said of the graph of which the nodes are a part.
  std::string obstacle = {};
};

// The nodes of a partition as a device likes them best.
struct Lowered {
  std::vector<Node> nodes;
  // Operators that the device is for, but that its host computes: what they are called, and why.
  struct OnHost {
    std::string node;
    std::string op_type;
    std::string reason;
  };
  std::vector<OnHost> on_host;
  // For the placement line: "6 layers and the LM head in 1 dispatch a token". May be empty.
  std::string summary;
};

// One node, prepared: attributes parsed, constant inputs looked at, but not pointed to. Immutable
// after construction, so that several runs may use it at once; all that changes during a run lives
// in the arguments.
class Step {
 public:
  virtual ~Step() = default;

  // The shapes of the outputs for these inputs. May read the data of inputs that determine a shape.
  // Throws Error if the inputs do not fit the operator.
  virtual void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const = 0;

  // Bytes of working memory, 64-byte aligned, that run() needs for these inputs.
  virtual std::size_t scratch_bytes(std::span<const Tensor> /*inputs*/) const { return 0; }

  // Computes. `inputs` has an entry for each input the node declares (Tensor::present() is false
  // for an absent one), `outputs` has allocated data for each output that the node names. Allocates
  // nothing.
  virtual void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
                   std::span<std::byte> scratch) const = 0;

  // The input that an output is, as it is: if that is a constant, it may stay where it is, and
  // run() gets its memory as the output's. Asked after infer().
  virtual std::optional<std::size_t> same_as(std::size_t /*output*/,
                                             std::span<const Tensor> /*inputs*/) const {
    return std::nullopt;
  }

  // The input that it reads from end to end, where that takes most of its time: a weight that is
  // multiplied by few rows, a KV cache.
  virtual std::optional<std::size_t> streamed_input() const { return std::nullopt; }

  // How the step, which was made of `node`, may be run slice by slice; nothing if it needs all
  // tokens at once. A slice is an input whose Tensor::slice says so.
  virtual std::optional<Slicing> slicing(const Node& /*node*/) const { return std::nullopt; }

  // Multiply-adds for one row (token) of input: the weight of the node in the placement report.
  virtual std::int64_t multiply_adds() const { return 0; }
};

// Memory that the device can reach, 64-byte aligned; freed with the owner.
using Memory = std::unique_ptr<std::byte, void (*)(std::byte*)>;

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string_view name() const = 0;
  // For the placement report: "cpu (avx512, 2 threads, int8 activations)".
  virtual std::string description() const = 0;

  // What a user had better know, in one sentence: that it is slow, say. Empty if there is nothing.
  virtual std::string warning() const { return ""; }

  // Why this device does not take the node; empty if it does: then lower() and prepare() do.
  // `producer` finds the node that makes a value, or null: what makes a constant may count.
  virtual std::string unsupported(const Node& node, const Producer& producer) const = 0;
  // The same of a node of which no more is known than a model's file says (violation_in_file).
  virtual std::string unsupported_in_file(const Node& node, const Producer& producer) const = 0;
  // Why the device will not make one node of those that it otherwise would, in a graph of which
  // some nodes are not taken; empty if they are not in the way. `outputs`: names of the values that
  // leave the graph. Asked before lower(): partitions do not show what lies between them.
  // By value, for a device that looks takes the nodes apart.
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  virtual std::string obstacle(std::vector<Judged> /*graph*/,
                               const std::vector<std::string>& /*outputs*/) const {
    return "";
  }
  // Throws Error for a node that is not within its operator's contract, or whose constants do not
  // fit it.
  virtual std::unique_ptr<Step> prepare(const Node& node) const = 0;
  // What it takes of all operators, those that it lowers first included.
  virtual std::vector<Contract> contracts() const = 0;

  // The nodes of a partition, in topological order, as this device likes them best: several may
  // become one. Values that come in and go out of the partition keep their names. Nodes that were
  // lowered before stay as they are.
  virtual Lowered lower(std::vector<Node> nodes, const Lowering& /*lowering*/) const {
    return {.nodes = std::move(nodes), .on_host = {}, .summary = ""};
  }

  // What lowered nodes depend on beside the nodes they were made of. Those that were kept with
  // another text must be made anew.
  virtual std::string compatibility(const Lowering& /*lowering*/) const {
    return std::string(name());
  }

  // Puts what they stand for into tensors whose contents this device keeps elsewhere (a KV cache in
  // its own memory), so that another device can read them. Others it leaves alone.
  virtual void restore(std::span<const Tensor> /*tensors*/) const {}

  // Tokens of a long prompt, of each row of the batch, that are best computed at once; 0: all.
  virtual std::int64_t tokens_at_once(std::int64_t /*batch*/) const { return 0; }

  // What steps after the one that is run next stream, in their order: threads with nothing to do
  // may fetch it. A hint: it may have been freed by then.
  virtual void expect(std::span<const std::span<const std::byte>> /*streams*/) const {}

  virtual Memory allocate(std::size_t bytes) const = 0;
  // Returns when all steps that were run have finished.
  virtual void wait() const = 0;
};

// `cpu`: SIMD kernels on a pool of threads that the process shares.
std::unique_ptr<Device> make_cpu_device(const DeviceOptions& options);
// `npu`: XRT. `emulate`: the same path on the emulator. Where they were not built in, Error says so
// by name.
std::unique_ptr<Device> make_npu_device(const DeviceOptions& options);
std::unique_ptr<Device> make_emulate_device(const DeviceOptions& options);
// `gpu`: OpenCL, which is looked for now. Error if it or a device of it is missing.
std::unique_ptr<Device> make_gpu_device(const DeviceOptions& options);

}  // namespace flownpu

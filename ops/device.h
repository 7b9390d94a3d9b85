// SPDX-License-Identifier: Apache-2.0
// Device: the interface between the execution provider (EP) and whatever computes. A device says
// which nodes it takes, prepares each of them once as a Step, and runs the steps on tensor views
// that the EP's program plans.
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

// The type to which a matrix product rounds its activations before it multiplies them.
enum class Activations : std::uint8_t { kBFloat16, kInt8 };

// The type in which a GPU's decoder kernels store intermediate values. kAuto: float16 if the device
// computes in half precision and its driver converts correctly, else float32.
enum class GpuDtype : std::uint8_t { kAuto, kFloat16, kFloat32 };

// The interface to GPUs. kAuto: OpenCL.
enum class GpuApi : std::uint8_t { kAuto, kOpenCl, kVulkan };

// Where the GPU kernels that multiply a single row read their weights from: a buffer, or an image
// that is read through the texture units. kAuto: the storage that was measured to be faster on this
// device, or a buffer without a measurement.
enum class GpuWeights : std::uint8_t { kAuto, kBuffer, kImage };
// Whether prompts are multiplied by a GPU's matrix units. kAuto: where they are right, and were
// measured to be faster, or without a measurement on every GPU that has some. kOn: an Error where
// they are not right, or there are none.
enum class GpuMatrices : std::uint8_t { kAuto, kOn, kOff };
// Whether a GPU computes convolutions of 3 x 3 neighbouring pixels by Winograd's transforms. kAuto:
// those that were measured to be faster so. kOn: all, and an Error where the kernel is not right.
enum class GpuWinograd : std::uint8_t { kAuto, kOn, kOff };

struct DeviceOptions {
  Activations activations = Activations::kInt8;
  // 0: one thread for each core this process may run on.
  int threads = 0;
  // "auto", or the instruction set to use: "amx", "avx512", "avx2", "generic". An unknown name, or
  // a set that this CPU lacks, is an Error that lists the available ones.
  std::string cpu_isa = "auto";
  // Folder of the NPU's compiled designs; empty: `artifacts/` beside the model.
  std::string artifacts;
  // Single operators outside of a decoder's layers go to the NPU from this number of multiply-adds
  // on. nullopt: the number that the host computes in the time of a dispatch.
  std::optional<std::int64_t> npu_threshold = std::nullopt;
  // A part of the GPU's name or platform; empty: the first GPU, or the first device if
  // there is no GPU.
  std::string opencl_device = "";
  GpuDtype gpu_dtype = GpuDtype::kAuto;
  GpuWeights gpu_weights = GpuWeights::kAuto;
  GpuMatrices gpu_matrices = GpuMatrices::kAuto;
  GpuWinograd gpu_winograd = GpuWinograd::kAuto;
  GpuApi gpu_api = GpuApi::kAuto;
};

// Finds the node that makes a value; null if none of the known nodes does.
using Producer = std::function<const Node*(std::string_view value)>;

// A node of a whole graph, and the reason why it is not taken; the reason is empty if it is.
struct Judged {
  Node node;
  std::string reason;
};

// The arguments of Device::lower() besides the nodes.
struct Lowering {
  // The folder of the model's file; empty if the model is not from a file.
  std::string model_folder;
  // Names of the values that leave the partition.
  std::vector<std::string> outputs = {};
  // The result of Device::obstacle() for the whole graph, of which the nodes are a part.
  std::string obstacle = {};
};

// The result of Device::lower(): a partition's nodes in the device's best form.
struct Lowered {
  std::vector<Node> nodes;
  // Operators that this device could compute but leaves to its host: names and reasons.
  struct OnHost {
    std::string node;
    std::string op_type;
    std::string reason;
  };
  std::vector<OnHost> on_host;
  // For the one-line placement summary: "6 layers and the LM head in 1 dispatch a token". May be
  // empty.
  std::string summary;
};

// One node, prepared: attributes parsed and constant inputs inspected, but no pointers to them
// kept. It does not change after construction, so that several runs may use it at once. All state
// of a run is in the arguments.
class Step {
 public:
  virtual ~Step() = default;

  // The shapes of the outputs for these inputs. May read the data of inputs that determine a shape.
  // Throws Error if the inputs do not fit the operator.
  virtual void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const = 0;

  // Bytes of working memory, 64-byte aligned, that run() needs for these inputs.
  virtual std::size_t scratch_bytes(std::span<const Tensor> /*inputs*/) const { return 0; }

  // Computes the outputs. `inputs` has an entry for each input the node declares (Tensor::present()
  // is false for an absent one), `outputs` has allocated data for each output that the node names.
  // `scratch` has at least scratch_bytes(). Allocates nothing.
  virtual void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
                   std::span<std::byte> scratch) const = 0;

  // The position of the input that this output repeats unchanged, if there is one (the branch that
  // an If takes). The program need not copy such an input if it is a constant: run() then gets the
  // constant's memory as the output's. Called after infer().
  virtual std::optional<std::size_t> same_as(std::size_t /*output*/,
                                             std::span<const Tensor> /*inputs*/) const {
    return std::nullopt;
  }
  // The position of the input that the first output always repeats, under whatever shape. run() may
  // get the input's memory as the output's.
  virtual std::optional<std::size_t> repeated_input() const { return std::nullopt; }

  // The position of the input that the step reads from end to end, if this reading takes most of
  // its time. Such an input is a weight that is multiplied by few rows, or a KV cache.
  virtual std::optional<std::size_t> streamed_input() const { return std::nullopt; }

  // How the step of `node` may run slice by slice; nullopt if it needs all tokens at once. run()
  // recognises a sliced input by its Tensor::slice.
  virtual std::optional<Slicing> slicing(const Node& /*node*/) const { return std::nullopt; }

  // Multiply-adds for one row (token) of input: the node's weight in the placement report.
  virtual std::int64_t multiply_adds() const { return 0; }
};

// Memory that the device can access, 64-byte aligned; freed with its owner.
using Memory = std::unique_ptr<std::byte, std::function<void(std::byte*)>>;

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string_view name() const = 0;
  // For the placement report: "cpu (avx512, 2 threads, int8 activations)".
  virtual std::string description() const = 0;

  // One sentence of warning for the user, for instance that this device is slow; empty if there is
  // none.
  virtual std::string warning() const { return ""; }

  // Why the machine lacks this device; empty if it has it, or if only a model's preparation shows.
  virtual std::string absent() const { return ""; }

  // Why this device does not take the node; empty if it does, in which case lower() and prepare()
  // accept it. `producer` finds the node that makes an input's value (it may be empty): some nodes
  // are taken only if another node makes their weight from a constant.
  virtual std::string unsupported(const Node& node, const Producer& producer) const = 0;
  // The same for a node of which only the contents of a model's file are known (see
  // violation_in_file).
  virtual std::string unsupported_in_file(const Node& node, const Producer& producer) const = 0;
  // For a graph in which some nodes are not taken: the reason why these nodes prevent a fusion on
  // the device; empty if they do not. `outputs`: names of the values that leave the graph. Called
  // before lower(), with the whole graph, because a partition does not show the nodes between it
  // and the next. `graph` is passed by value because implementations take the nodes apart.
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  virtual std::string obstacle(std::vector<Judged> /*graph*/,
                               const std::vector<std::string>& /*outputs*/) const {
    return "";
  }
  // Throws Error if a node violates its operator's contract, or if its constants do not fit it.
  virtual std::unique_ptr<Step> prepare(const Node& node) const = 0;
  // The contracts of all operators that the device takes, including those that lower() replaces.
  virtual std::vector<Contract> contracts() const = 0;

  // Rewrites the nodes of a partition, in topological order, into the device's best form. Several
  // nodes may become one. Values that enter and leave the partition keep their names. Nodes that
  // were already lowered (read from a compiled model) stay as they are.
  virtual Lowered lower(std::vector<Node> nodes, const Lowering& /*lowering*/) const {
    return {.nodes = std::move(nodes), .on_host = {}, .summary = ""};
  }

  // A text that identifies everything else that lowered nodes depend on. Saved lowered nodes must
  // not be used if their text differs.
  virtual std::string compatibility(const Lowering& /*lowering*/) const {
    return std::string(name());
  }

  // Writes the contents that this device keeps in its own memory, such as a KV cache, into the
  // tensors, so that another device can read them. Leaves all other tensors alone. Throws Error if
  // the contents are gone.
  virtual void restore(std::span<const Tensor> /*tensors*/) const {}

  // The number of tokens of a long prompt, in each row of the batch, that are best computed at
  // once; 0: all.
  virtual std::int64_t tokens_at_once(std::int64_t /*batch*/) const { return 0; }

  // Announces the memory that the steps after the next one will stream, in order
  // (Step::streamed_input). Idle threads may prefetch it. Only a hint: it may have been freed by
  // the time it is used.
  virtual void expect(std::span<const std::span<const std::byte>> /*streams*/) const {}

  // Whether it computes with a copy of the weights in its own memory.
  virtual bool copies_weights() const { return false; }

  virtual Memory allocate(std::size_t bytes) const = 0;
  // Returns when all steps that were run have finished.
  virtual void wait() const = 0;
};

// `cpu`: SIMD kernels on a pool of threads that the process shares.
std::unique_ptr<Device> make_cpu_device(const DeviceOptions& options);
// `npu`: an NPU, driven by XRT. `emulate`: the same code on the emulator. Throw an Error that names
// the device if it was not built in.
std::unique_ptr<Device> make_npu_device(const DeviceOptions& options);
std::unique_ptr<Device> make_emulate_device(const DeviceOptions& options);
// `gpu`: OpenCL, whose library is loaded by this call. Throws Error if it, or an OpenCL device, is
// missing.
std::unique_ptr<Device> make_gpu_device(const DeviceOptions& options);

}  // namespace flownpu

// SPDX-License-Identifier: Apache-2.0
// Binds the nodes and values of graphs that Python has read, and the rewriting of such graphs by
// the lowering rules.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ops/device.h"
#include "ops/lowering/lowering.h"
#include "python/native/arrays.h"
#include "python/native/bindings.h"

namespace nb = nanobind;

namespace flownpu::native {
namespace {

using lowering::Graph;
using lowering::Q4NXConstant;
using lowering::RepackedWeights;
using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;
// Also accepts read-only arrays, such as those of a mapped file.
using GivenBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The address of constants without elements, because null would mean that the value is not a
// constant.
constexpr std::byte kNothing{};

// `constant`: the constant's bytes, which the value keeps alive.
Value make_value(const std::string& name, const std::string& type,
                 const std::optional<std::vector<std::int64_t>>& shape,
                 const std::optional<GivenBytes>& constant) {
  Value value;
  value.name = name;
  value.type = type_of(type);
  if (shape && shape->size() <= static_cast<std::size_t>(Shape::kMaxRank))
    value.shape = Shape(shape->data(), shape->size());
  if (!constant) return value;
  const std::size_t bytes = constant->nbytes();
  const Tensor tensor{nullptr, value.type, value.shape.value_or(Shape{})};
  if (!value.shape || tensor.bytes() != bytes)
    fail("expected the ", tensor.bytes(), " bytes of constant ", name, ", got ", bytes);
  value.constant =
      bytes == 0 ? static_cast<const void*>(&kNothing) : static_cast<const void*>(constant->data());
  // The array's reference count may only be changed with the interpreter's lock.
  value.owner = {value.constant, [kept = *constant](const void* /*data*/) mutable {
                   const nb::gil_scoped_acquire held;
                   kept = GivenBytes();
                 }};
  return value;
}

// Whether no rule has changed the node: `a` before, `b` after.
bool is_same(const Node& a, const Node& b) {
  const auto names = [](const std::vector<Value>& values) {
    std::vector<std::string_view> all;
    all.reserve(values.size());
    for (const Value& value : values) all.push_back(value.name);
    return all;
  };
  return a.op_type == b.op_type && a.domain == b.domain && a.attributes == b.attributes &&
         names(a.inputs) == names(b.inputs) && names(a.outputs) == names(b.outputs);
}

// A graph rewritten by rules. Blocks of constants are made on demand, one constant at a time.
class Rewriting {
 public:
  Rewriting(const std::vector<Node>& nodes, const std::vector<std::string>& outputs,
            const std::vector<std::string>& names, const std::vector<std::string>& rules,
            const lowering::Promised& weights)
      : graph_(nodes, outputs, names), weights_(graph_) {
    const nb::gil_scoped_release released;
    for (const auto& [name, constant] : weights) weights_.take(name, *constant);
    graph_.leave_unknown(lowering::of_rules(make_cpu_device({})->contracts()));
    lowering::rewrite(graph_, weights_, rules);
    std::unordered_map<std::string_view, const Node*> before;
    for (const Node& node : nodes) {
      if (!node.outputs.empty()) before.emplace(node.outputs[0].name, &node);
    }
    for (Node& node : graph_.take()) {
      const auto found = before.find(node.outputs[0].name);
      if (found == before.end() || !is_same(*found->second, node))
        changed_.push_back(std::move(node));
    }
  }

  const std::vector<Node>& changed() const { return changed_; }
  const lowering::Report& report() const { return graph_.report(); }
  const Q4NXConstant* weight(const Value& value) const { return weights_.find(value); }

 private:
  Graph graph_;
  RepackedWeights weights_;
  std::vector<Node> changed_;
};

// A copy of the bytes of a constant that is not made of blocks, such as a joined bias.
Bytes bytes_of(const Value& value) {
  if (value.constant == nullptr) fail("expected a constant, got ", value.name);
  const Tensor tensor{nullptr, value.type, value.shape.value_or(Shape{})};
  auto memory = std::make_unique<std::uint8_t[]>(tensor.bytes());
  std::memcpy(memory.get(), value.constant, tensor.bytes());
  auto* data = memory.release();
  const nb::capsule owner(data,
                          [](void* bytes) noexcept { delete[] static_cast<std::uint8_t*>(bytes); });
  return {data, {tensor.bytes()}, owner};
}

using Blocks = nb::ndarray<std::uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

std::pair<double, double> pack(const Q4NXConstant& constant, const Blocks& out) {
  const Tensor tensor{nullptr, DataType::kUInt8, constant.shape()};
  if (out.nbytes() != tensor.bytes())
    fail("expected memory of ", tensor.bytes(), " bytes for the blocks, got ", out.nbytes());
  const nb::gil_scoped_release released;
  lowering::Difference all;
  for (const lowering::Difference& difference :
       run(constant.pieces(reinterpret_cast<std::byte*>(out.data()), true)))
    all += difference;
  return {all.squared_error, all.squares};
}

// Python functions, whose reference counts may only be changed with the interpreter's lock.
struct Reader {
  nb::callable read;
  nb::callable release;
};

// `read` returns float32 [rows, columns], or with `transposed` [columns, rows]; `release` is called
// when the blocks have been made.
Q4NXConstant of_floats(nb::typed<nb::callable, nb::object()> read,
                       nb::typed<nb::callable, void()> release, std::int64_t rows,
                       std::int64_t columns, bool transposed) {
  using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
  const std::shared_ptr<Reader> reader(new Reader{std::move(read), std::move(release)},
                                       [](const Reader* kept) {
                                         const nb::gil_scoped_acquire held;
                                         delete kept;
                                       });
  const std::int64_t down = transposed ? columns : rows;
  const std::int64_t along = transposed ? rows : columns;
  const auto floats = [reader, down, along]() -> std::shared_ptr<const float> {
    const nb::gil_scoped_acquire held;
    auto array = nb::cast<Floats>(reader->read());
    if (static_cast<std::int64_t>(array.shape(0)) != down ||
        static_cast<std::int64_t>(array.shape(1)) != along) {
      fail("expected floats [", down, ", ", along, "], got [", array.shape(0), ", ", array.shape(1),
           "]");
    }
    return {array.data(), [array, reader](const float* /*data*/) mutable {
              const nb::gil_scoped_acquire held;
              array = Floats();
              reader->release();
            }};
  };
  return Q4NXConstant(
      {{lowering::FloatWeight{floats, rows, columns, transposed}, rows, columns, q4nx::kNarrow}});
}

Q4NXConstant of_parts(const std::vector<Q4NXConstant>& parts) {
  std::vector<Q4NXConstant::StackedWeight> all;
  for (const Q4NXConstant& constant : parts)
    all.insert(all.end(), constant.parts().begin(), constant.parts().end());
  return Q4NXConstant(std::move(all));
}

std::vector<std::int64_t> list_of(const Shape& shape) { return {shape.begin(), shape.end()}; }

}  // namespace

void bind_graph(nb::module_& module) {
  nb::class_<Value>(module, "Value",
                    "A value of a graph: its name, type, shape and, if it is one, constant.")
      .def(
          "__init__",
          [](Value* value, const std::string& name, const std::string& type,
             const std::optional<std::vector<std::int64_t>>& shape,
             const std::optional<GivenBytes>& constant) {
            new (value) Value(make_value(name, type, shape, constant));
          },
          nb::arg("name"), nb::arg("type") = "float", nb::arg("shape") = nb::none(),
          nb::arg("constant") = nb::none(),
          "Shape: -1 for what is not known; None if the rank is not. Constant: its bytes.")
      .def_ro("name", &Value::name)
      .def_prop_ro("type", [](const Value& value) { return std::string(name_of(value.type)); })
      .def_prop_ro("shape",
                   [](const Value& value) -> std::optional<std::vector<std::int64_t>> {
                     if (!value.shape) return std::nullopt;
                     return list_of(*value.shape);
                   })
      .def("bytes", bytes_of, "A copy of the constant's bytes.");
  nb::class_<Node>(module, "Node", "A node of a graph.")
      .def(
          "__init__",
          [](Node* node, const std::string& name, const std::string& op_type,
             const std::string& domain, int version,
             const std::map<std::string, Attribute>& attributes, const std::vector<Value>& inputs,
             const std::vector<Value>& outputs) {
            new (node) Node{.name = name,
                            .op_type = op_type,
                            .domain = domain,
                            .since_version = version,
                            .attributes = {attributes.begin(), attributes.end()},
                            .inputs = inputs,
                            .outputs = outputs};
          },
          nb::arg("name"), nb::arg("op_type"), nb::arg("domain"), nb::arg("version"),
          nb::arg("attributes"), nb::arg("inputs"), nb::arg("outputs"),
          "Absent inputs and outputs have no name.")
      .def_ro("name", &Node::name)
      .def_ro("op_type", &Node::op_type)
      .def_ro("domain", &Node::domain)
      .def_ro("version", &Node::since_version)
      .def_prop_ro("attributes",
                   [](const Node& node) {
                     return std::map<std::string, Attribute>(node.attributes.begin(),
                                                             node.attributes.end());
                   })
      .def_ro("inputs", &Node::inputs)
      .def_ro("outputs", &Node::outputs);
  nb::class_<lowering::Miss>(module, "Miss", "A place where a rule nearly applied.")
      .def_ro("rule", &lowering::Miss::rule)
      .def_ro("node", &lowering::Miss::node)
      .def_ro("reason", &lowering::Miss::reason);
  nb::class_<Q4NXConstant>(module, "Q4NXConstant", "Blocks that are made when they are asked for.")
      .def_prop_ro("shape", [](const Q4NXConstant& constant) { return list_of(constant.shape()); })
      .def_prop_ro("keeps_codes", &Q4NXConstant::keeps_codes)
      .def_static("of_floats", of_floats, nb::arg("read"), nb::arg("release"), nb::arg("rows"),
                  nb::arg("columns"), nb::arg("transposed"),
                  "Makes the blocks of float32 [rows, columns], or of the transpose, which `read` "
                  "returns when the blocks are packed.")
      .def_static(
          "of_parts", of_parts, nb::arg("parts"),
          "Other constants with the same columns, one below the other; no block has rows of "
          "two.")
      .def("pack", pack, nb::arg("out"),
           "Writes the blocks into `out` on all cores; returns the sums of the weights' squared "
           "errors and of their squares.");
  nb::class_<Rewriting>(module, "Rewriting", "What rules made of a graph.")
      .def(nb::init<const std::vector<Node>&, const std::vector<std::string>&,
                    const std::vector<std::string>&, const std::vector<std::string>&,
                    const lowering::Promised&>(),
           nb::arg("nodes"), nb::arg("outputs"), nb::arg("names"), nb::arg("rules"),
           nb::arg("weights"),
           "Applies rules to nodes in order. outputs: values that are read outside; names: those "
           "that no new value may have, beside those of the nodes' values; weights: constants that "
           "are still to be made, by name. Raises ValueError if there is no such rule.")
      .def_prop_ro("changed", &Rewriting::changed)
      .def_prop_ro("applied",
                   [](const Rewriting& rewriting) {
                     return std::map<std::string, int>(rewriting.report().applied.begin(),
                                                       rewriting.report().applied.end());
                   })
      .def_prop_ro("misses", [](const Rewriting& rewriting) { return rewriting.report().misses; })
      .def_prop_ro("damage", [](const Rewriting& rewriting) { return rewriting.report().damage; })
      .def("weight", &Rewriting::weight,
           nb::sig("def weight(self, value: Value) -> Q4NXConstant | None"), nb::arg("value"),
           nb::rv_policy::reference_internal,
           "The constant that packs the value's blocks; None if no rule made the value as a "
           "weight.");
  module.attr("CONVERSION_RULES") = nb::cast(lowering::conversion_rules());
  module.attr("SMALL_BLOCK") = lowering::kSmallBlock;
}

}  // namespace flownpu::native

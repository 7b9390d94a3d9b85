// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/language/generate.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <utility>

#include "ops/error.h"
#include "ops/gpu/language/place.h"
#include "ops/gpu/language/text.h"

namespace flownpu::gpu {
namespace {

constexpr std::string_view kArguments = "args.";

bool is_of_name(char letter) {
  return std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '_';
}

std::string_view name_at(std::string_view text, std::size_t at) {
  std::size_t end = at;
  while (end < text.size() && is_of_name(text[end])) ++end;
  return text.substr(at, end - at);
}

std::string trimmed(std::string_view text) {
  const auto is_space = [](char letter) {
    return std::isspace(static_cast<unsigned char>(letter));
  };
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return std::string(text);
}

std::string joined(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) all += (all.empty() ? "" : ", ") + part;
  return all;
}

class Generator {
 public:
  Generator(const KernelDescription& kernel, const Dialect& dialect)
      : kernel_(kernel), dialect_(dialect), tensors_(kernel.arguments()) {
    for (const auto& [name, unused] : kernel.links) tensor(name);
    for (const TensorDescription& one : tensors_) {
      const bool may_be_image = one.element == Element::kQ4NX && one.access == Access::kRead;
      if (one.storage == Storage::kImage && !may_be_image)
        refuse("'", one.name, "' in memory: a Q4NX weight that is read may be in an image");
    }
  }

  std::string source() const {
    return dialect_.prelude() + dialect_.kernel(kernel_, rewrite(kernel_.body));
  }

 private:
  template <typename... Pieces>
  [[noreturn]] void refuse(const Pieces&... pieces) const {
    fail("[kernel ", kernel_.name, "] expected ", pieces...);
  }

  const TensorDescription& tensor(std::string_view name) const {
    const auto found = std::ranges::find_if(
        tensors_, [&](const TensorDescription& one) { return one.name == name; });
    if (found == tensors_.end()) refuse("a tensor '", name, "' among those of its description");
    return *found;
  }

  // `text` in which every word that begins with `args.` is replaced by the argument that it names.
  std::string rewrite(std::string_view text) const {
    std::string made;
    std::size_t done = 0;
    for (std::size_t at = text.find(kArguments); at != std::string_view::npos;
         at = text.find(kArguments, done)) {
      if (at > 0 && (is_of_name(text[at - 1]) || text[at - 1] == '.')) {
        made += text.substr(done, at + kArguments.size() - done);
        done = at + kArguments.size();
        continue;
      }
      made += text.substr(done, at - done);
      const std::string_view name = name_at(text, at + kArguments.size());
      done = at + kArguments.size() + name.size();
      if (done < text.size() && text[done] == '.') {
        const std::string_view word = name_at(text, done + 1);
        done += 1 + word.size();
        std::vector<std::string> given = parameters(text, done, name, word);
        made += access(tensor(name), word, std::move(given));
      } else {
        made += constant(name);
      }
    }
    made += text.substr(done);
    return made;
  }

  // The parameters between the parentheses that open at `at`, each rewritten and put into
  // parentheses of its own; moves `at` behind the closing one. `name`, `word`: for messages.
  std::vector<std::string> parameters(std::string_view text, std::size_t& at, std::string_view name,
                                      std::string_view word) const {
    if (at >= text.size() || text[at] != '(') refuse("'(' after args.", name, ".", word);
    std::vector<std::string> found;
    int depth = 0;
    std::size_t begin = at + 1;
    for (; at < text.size(); ++at) {
      const char letter = text[at];
      if (letter == '(' || letter == '[') ++depth;
      if (letter == ')' || letter == ']') --depth;
      if (depth != 0 && !(depth == 1 && letter == ',')) continue;
      found.push_back(text_of("(", rewrite(trimmed(text.substr(begin, at - begin))), ")"));
      begin = at + 1;
      if (depth == 0) {
        ++at;
        return found;
      }
    }
    refuse("')' after args.", name, ".", word);
  }

  std::string constant(std::string_view name) const {
    if (name == "lanes") return std::to_string(kernel_.lanes);
    if (const auto found = kernel_.constants.find(std::string(name));
        found != kernel_.constants.end()) {
      if (const auto* number = std::get_if<float>(&found->second)) return dialect_.number(*number);
      return std::to_string(std::get<std::int64_t>(found->second));
    }
    if (std::ranges::find(kernel_.parameters, name) != kernel_.parameters.end())
      return std::string(name);
    refuse("a constant or a parameter '", name, "' among those of its description");
  }

  std::string access(const TensorDescription& tensor, std::string_view word,
                     std::vector<std::string> given) const {
    const bool writes = word.starts_with("Write");
    if (writes != (tensor.access == Access::kWrite))
      refuse("no ", word, " of '", tensor.name, "', which is ",
             tensor.access == Access::kWrite ? "written" : "read");
    if (writes) {
      if (given.empty()) refuse("a value for args.", tensor.name, ".", word);
      const std::string value = given.front();
      given.erase(given.begin());
      if (word == "WriteScale") return write_scale(tensor, value, given);
      if (word != "Write") refuse("no ", word, " of '", tensor.name, "'");
      return write(tensor, value, given);
    }
    check_coordinates(tensor, word, given);
    if (tensor.element == Element::kQ4NX) return read_weight(tensor, word, given);
    if (word == "Read" && tensor.element == Element::kInt8Rows) return read_row(tensor, given);
    if (word == "Read") return dialect_.read(tensor, index_of(tensor, given));
    if (word == "ReadFloats" && tensor.element != Element::kInt32)
      return read_floats(tensor, given);
    if (word == "Read4" && tensor.element == Element::kInt8)
      return dialect_.read4(tensor, index_of(tensor, given));
    refuse("no ", word, " of '", tensor.name, "'");
  }

  void check_coordinates(const TensorDescription& tensor, std::string_view word,
                         const std::vector<std::string>& given) const {
    if (given.size() != tensor.sizes.size())
      refuse(tensor.sizes.size(), " coordinates in args.", tensor.name, ".", word, ", got ",
             given.size());
  }

  std::string read_weight(const TensorDescription& weight, std::string_view word,
                          const std::vector<std::string>& given) const {
    const WeightPlaces places(weight, given[0], given[1]);
    const bool symmetric = !weight.layout.has_minima;
    const auto minimum = [&](const std::string& of_scale) {
      return text_of("(", dialect_.number(weight.layout.minimum_of_symmetric()), " * ", of_scale,
                     ")");
    };
    if (word == "Scale") return dialect_.bfloat16(weight, places.scale());
    if (word == "Scales") return dialect_.bfloat16s(weight, places.scale());
    if (word == "Minimum")
      return symmetric ? minimum(dialect_.bfloat16(weight, places.scale()))
                       : dialect_.bfloat16(weight, places.minimum());
    if (word == "Minima")
      return symmetric ? minimum(dialect_.bfloat16s(weight, places.scale()))
                       : dialect_.bfloat16s(weight, places.minimum());
    if (word == "CodePairs") return dialect_.four_words(weight, places.codes());
    if (word == "EvenCodes") return code_words(weight, given, 0);
    if (word == "OddCodes") return code_words(weight, given, 1);
    if (word != "Read") refuse("no ", word, " of '", weight.name, "', a Q4NX weight");
    const std::vector<std::string> group{given[0],
                                         text_of("(", given[1], " / ", q4nx::kGroup, ")")};
    return text_of("(", read_weight(weight, "Minimum", group), " + ",
                   read_weight(weight, "Scale", group), " * ", "(float)",
                   code(weight, places, given[0]), ")");
  }

  // The value of one code.
  std::string code(const TensorDescription& weight, const WeightPlaces& places,
                   const std::string& row) const {
    if (weight.layout.code_bits == 8) return dialect_.signed_byte(weight, places.byte_code());
    std::string place = dialect_.code(weight, places.codes(), row);
    if (!weight.layout.has_table) return place;
    return dialect_.signed_byte(weight, text_of(places.table(), " + ", place));
  }

  // EvenCodes, and with `odd` = 1 OddCodes.
  std::string code_words(const TensorDescription& weight, const std::vector<std::string>& given,
                         int odd) const {
    const WeightPlaces places(weight, given[0], given[1]);
    if (weight.layout.code_bits == 8) {
      const std::string first = text_of(places.byte_code(), " + ", odd * q4nx::kByteQuadBytes / 2);
      return text_of("(uint8)(", dialect_.four_words(weight, first), ", ",
                     dialect_.four_words(weight, first + " + 16"), ")");
    }
    const WeightPlaces right(weight, given[0], text_of("(", given[1], " + 2)"));
    std::string codes = text_of("nibbles(", dialect_.four_words(weight, places.codes()), ", ",
                                dialect_.four_words(weight, right.codes()), ", ", 4 * odd, "u)");
    if (!weight.layout.has_table) return codes;
    return text_of("looked_up(", dialect_.four_words(weight, places.table()), ", ", codes, ")");
  }

  // An element of int8 rows: a scale of 8 bits times a code of 7 bits, a product that float holds
  // exactly.
  std::string read_row(const TensorDescription& rows, const std::vector<std::string>& given) const {
    const std::string scale = scale_of_row(rows, {given.begin(), given.end() - 1});
    return text_of("(", dialect_.bfloat16(rows, scale), " * (float)",
                   dialect_.read(rows, index_of(rows, given)), ")");
  }

  std::string read_floats(const TensorDescription& tensor,
                          const std::vector<std::string>& given) const {
    const auto* size = std::get_if<std::int64_t>(&tensor.sizes.back());
    if (size == nullptr || *size % 4 != 0)
      refuse("a multiple of 4 as the last size of '", tensor.name, "' for args.", tensor.name,
             ".ReadFloats");
    std::string four = dialect_.read_floats(tensor, index_of(tensor, given));
    if (tensor.element != Element::kInt8Rows) return four;
    const std::string scale = scale_of_row(tensor, {given.begin(), given.end() - 1});
    return text_of("(", dialect_.bfloat16(tensor, scale), " * ", four, ")");
  }

  std::string write_scale(const TensorDescription& rows, const std::string& value,
                          const std::vector<std::string>& row) const {
    if (rows.element != Element::kInt8Rows || row.size() + 1 != rows.sizes.size())
      refuse("int8 rows and the ", rows.sizes.size() - 1, " coordinates of one in args.", rows.name,
             ".WriteScale");
    return text_of("{ const float value = ", value, "; ",
                   dialect_.write_scale(rows, scale_of_row(rows, row)), " }");
  }

  // A block: the coordinates, computed once, the value, the linked steps, and the write.
  std::string write(const TensorDescription& tensor, const std::string& value,
                    const std::vector<std::string>& given) const {
    check_coordinates(tensor, "Write", given);
    std::string made = "{ ";
    std::vector<std::string> at;
    for (const std::string& coordinate : given) {
      at.push_back(text_of("at", at.size()));
      made += text_of("const int ", at.back(), " = ", coordinate, "; ");
    }
    made += dialect_.declare_value(tensor, value) + "; ";
    if (const auto linked = kernel_.links.find(tensor.name); linked != kernel_.links.end()) {
      for (const Link& link : linked->second)
        made += rewrite(with_coordinates(link.code, joined(at))) + " ";
    }
    return made + dialect_.write(tensor, index_of(tensor, at)) + " }";
  }

  // `code` with the word `at` replaced by all coordinates.
  static std::string with_coordinates(std::string_view code, const std::string& at) {
    std::string made;
    for (std::size_t i = 0; i < code.size();) {
      const std::string_view name = name_at(code, i);
      made += name == "at" ? at : std::string(name.empty() ? code.substr(i, 1) : name);
      i += std::max<std::size_t>(name.size(), 1);
    }
    return made;
  }

  const KernelDescription& kernel_;
  const Dialect& dialect_;
  std::vector<TensorDescription> tensors_;
};

}  // namespace

std::string generate(const KernelDescription& kernel, const Dialect& dialect, Element activation) {
  KernelDescription stored = kernel;
  for (TensorDescription& tensor : stored.tensors) {
    if (tensor.element == Element::kActivation) tensor.element = activation;
  }
  return Generator(stored, dialect).source();
}

}  // namespace flownpu::gpu

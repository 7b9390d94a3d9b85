// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/language/spirv/tokens.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "ops/error.h"

namespace flownpu::gpu::spirv {
namespace {

bool is_letter(char one) {
  return std::isalpha(static_cast<unsigned char>(one)) != 0 || one == '_';
}
bool is_digit(char one) { return std::isdigit(static_cast<unsigned char>(one)) != 0; }

// Longer signs first.
constexpr std::string_view kSigns[] = {
    "<<=", ">>=", "++", "--", "<<", ">>", "<=", ">=", "==", "!=", "&&", "||", "+=", "-=",
    "*=",  "/=",  "&=", "|=", "(",  ")",  "[",  "]",  "{",  "}",  ",",  ";",  "?",  ":",
    "=",   "<",   ">",  "+",  "-",  "*",  "/",  "%",  "&",  "|",  "^",  "~",  "!",  "."};

// A number, of which the text at `begin` begins with a digit. Hexadecimal floats have a p.
Token number_at(std::string_view text, std::size_t begin, std::size_t& end) {
  const bool is_hexadecimal = text.substr(begin, 2) == "0x";
  end = begin;
  bool is_float = false;
  while (end < text.size() && (std::isalnum(static_cast<unsigned char>(text[end])) != 0 ||
                               text[end] == '.' || text[end] == '+' || text[end] == '-')) {
    const char one = text[end];
    const char exponent = is_hexadecimal ? 'p' : 'e';
    if ((one == '+' || one == '-') && text[end - 1] != exponent) break;
    is_float = is_float || one == '.' || one == exponent || (one == 'f' && !is_hexadecimal);
    ++end;
  }
  Token token{.kind = Token::Kind::kInteger, .text = std::string(text.substr(begin, end - begin))};
  if (is_float) {
    token.kind = Token::Kind::kFloat;
    token.number = std::strtof(token.text.c_str(), nullptr);
  } else {
    if (token.text.back() == 'u') token.kind = Token::Kind::kUnsigned;
    token.integer = std::strtoll(token.text.c_str(), nullptr, 0);
  }
  return token;
}

}  // namespace

std::vector<Token> tokens_of(std::string_view text) {
  std::vector<Token> found;
  std::size_t at = 0;
  while (at < text.size()) {
    const char one = text[at];
    if (std::isspace(static_cast<unsigned char>(one)) != 0) {
      ++at;
    } else if (text.substr(at, 2) == "//") {
      at = std::min(text.find('\n', at), text.size());
    } else if (is_digit(one)) {
      std::size_t end = 0;
      found.push_back(number_at(text, at, end));
      at = end;
    } else if (is_letter(one)) {
      std::size_t end = at;
      while (end < text.size() && (is_letter(text[end]) || is_digit(text[end]))) ++end;
      found.push_back({Token::Kind::kName, std::string(text.substr(at, end - at))});
      at = end;
    } else {
      const auto* sign = std::ranges::find_if(
          kSigns, [&](std::string_view each) { return text.substr(at).starts_with(each); });
      if (sign == std::end(kSigns))
        fail("expected a word, a number or a sign of the kernel language, got '", one, "'");
      found.push_back({Token::Kind::kSign, std::string(*sign)});
      at += sign->size();
    }
  }
  found.emplace_back();
  return found;
}

}  // namespace flownpu::gpu::spirv

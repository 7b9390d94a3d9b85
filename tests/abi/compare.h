// SPDX-License-Identifier: Apache-2.0
// Compares declarations of ep/abi.h with ONNX Runtime's own. Included after both; test_abi.py
// writes the main() that calls it for each declaration. Each line of output is "same", "different"
// or "newer" (the official header is too old to have it), followed by the declaration's name.
#pragma once

#include <cstddef>
#include <cstdio>
#include <type_traits>

namespace compare {

// Translates a type of ours to the official header's: our structs and enums become theirs (by
// specializations that test_abi.py writes), and noexcept, which is no part of the ABI, is dropped.
template <typename T>
struct Official {
  using type = T;
};
template <typename T>
struct Official<T*> {
  using type = typename Official<T>::type*;
};
template <typename T>
struct Official<const T> {
  using type = const typename Official<T>::type;
};
template <typename Result, typename... Parameters>
struct Official<Result(Parameters...)> {
  using type = typename Official<Result>::type(typename Official<Parameters>::type...);
};
template <typename Result, typename... Parameters>
struct Official<Result(Parameters...) noexcept> : Official<Result(Parameters...)> {};

template <typename Ours, typename Theirs>
constexpr bool same_type =
    std::is_same_v<typename Official<Ours>::type, typename Official<Theirs>::type>;

inline void report(const char* name, bool same, std::size_t ours, std::size_t theirs) {
  std::printf("%s %s (place %zu, official %zu)\n", same ? "same" : "different", name, ours, theirs);
}

template <typename Signature, typename Table>
Signature* signature_of(flownpu::ort::Function<Table, Signature>);

}  // namespace compare

// A function of a table: its ordinal and its signature.
#define COMPARE_FUNCTION(Table, name)                                                      \
  [&]<typename T>(T*) {                                                                    \
    constexpr std::size_t ours = flownpu::ort::name.ordinal * sizeof(void*);               \
    if constexpr (requires(T table) { table.name; }) {                                     \
      using Signature = decltype(compare::signature_of(flownpu::ort::name));               \
      constexpr bool same =                                                                \
          ours == offsetof(T, name) && compare::same_type<Signature, decltype(T::name)>;   \
      compare::report(#Table "." #name, same, ours, offsetof(T, name));                    \
    } else {                                                                               \
      /* Only a table that ends before this ordinal may lack the function. */              \
      std::printf("%s %s\n", ours >= sizeof(T) ? "newer" : "different", #Table "." #name); \
    }                                                                                      \
  }(static_cast<::Table*>(nullptr))

// A member of a struct: its place, its size, and its type unless we leave the slot empty.
#define COMPARE_MEMBER(Struct, name)                                                            \
  [&]<typename T>(T*) {                                                                         \
    using Ours = flownpu::ort::Struct;                                                          \
    if constexpr (requires(T object) { object.name; }) {                                        \
      constexpr bool unused = std::is_same_v<decltype(Ours::name), void*>;                      \
      constexpr bool same =                                                                     \
          offsetof(Ours, name) == offsetof(T, name) && sizeof(Ours::name) == sizeof(T::name) && \
          (unused || compare::same_type<decltype(Ours::name), decltype(T::name)>);              \
      compare::report(#Struct "." #name, same, offsetof(Ours, name), offsetof(T, name));        \
    } else if constexpr (requires { sizeof(T); }) {                                             \
      std::printf("%s %s\n", offsetof(Ours, name) >= sizeof(T) ? "newer" : "different",         \
                  #Struct "." #name);                                                           \
    } else {                                                                                    \
      std::printf("newer %s\n", #Struct "." #name);                                             \
    }                                                                                           \
  }(static_cast<::Struct*>(nullptr))

#define COMPARE_ENUMERATOR(name)                                                                \
  compare::report(#name,                                                                        \
                  static_cast<long long>(flownpu::ort::name) == static_cast<long long>(::name), \
                  static_cast<std::size_t>(flownpu::ort::name), static_cast<std::size_t>(::name))

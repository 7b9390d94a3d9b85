// SPDX-License-Identifier: Apache-2.0
// A tile's memory as a kernel sees it: the buffers of its arguments, and nothing else. Every vector
// access is checked for its range and its alignment. The array would silently access memory beside
// a buffer, and truncate a misaligned address.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "types.hpp"

namespace aie {
inline namespace FLOWNPU_AIE_ARCHITECTURE {
namespace host {

// An access that the array would not make as the kernel asks for it.
struct Trap : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A buffer that the running kernel may access.
struct Range {
  std::uintptr_t begin;
  std::size_t bytes;
  bool writable;
  std::string name;
};
inline thread_local std::vector<Range> ranges;

// The alignment, in bytes, of a vector load or store of so many bytes (detail/ld_st.hpp,
// `vector_ldst_align`).
constexpr std::size_t alignment_of_access(std::size_t bytes) {
  if (bytes == 16) return 16;
  return __AIE_ARCH__ == 20 || bytes == 32 ? 32 : 64;
}

inline std::string names_of_ranges() {
  std::ostringstream text;
  for (const Range& range : ranges) {
    text << (text.tellp() > 0 ? ", " : "") << range.name << " of " << range.bytes << " bytes";
  }
  return ranges.empty() ? "none" : text.str();
}

// The distance of the address from a range, in bytes; 0 also at its end, where most accesses that
// leave a range begin.
inline std::uintptr_t distance(const Range& range, std::uintptr_t address) {
  const std::uintptr_t end = range.begin + range.bytes;
  return address < range.begin ? range.begin - address : address > end ? address - end : 0;
}

[[noreturn]] inline void trap(const void* pointer, std::size_t bytes, bool write) {
  const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
  const Range* nearest = nullptr;
  for (const Range& range : ranges) {
    if (nearest == nullptr || distance(range, begin) < distance(*nearest, begin)) nearest = &range;
  }
  std::ostringstream text;
  text << (write ? "store" : "load") << " of " << bytes << " bytes ";
  // If it is farther than a page away, it is no better guess than the others.
  if (nearest == nullptr || distance(*nearest, begin) > 4096) {
    text << "outside of all buffers (" << names_of_ranges() << ")";
    throw Trap(text.str());
  }
  text << "at byte " << static_cast<std::intptr_t>(begin - nearest->begin) << " of "
       << nearest->name;
  const bool inside = begin >= nearest->begin && begin + bytes <= nearest->begin + nearest->bytes;
  if (inside) {
    text << ", which is read-only";
  } else {
    text << ", which has " << nearest->bytes;
  }
  throw Trap(text.str());
}

// Throws Trap unless the kernel may read (or write) these bytes, and they are aligned.
inline void check_access(const void* pointer, std::size_t bytes, bool write,
                         std::size_t alignment) {
  const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
  if (begin % alignment != 0) {
    std::ostringstream text;
    text << "misaligned " << (write ? "store" : "load") << " of " << bytes
         << " bytes: the address is " << begin % alignment << " past a multiple of " << alignment;
    throw Trap(text.str());
  }
  for (const Range& range : ranges) {
    if (begin >= range.begin && begin + bytes <= range.begin + range.bytes &&
        (range.writable || !write)) {
      return;
    }
  }
  trap(pointer, bytes, write);
}

}  // namespace host

// The alignment, in bytes, of a buffer from which any vector can be loaded (aie.hpp,
// `vector_decl_align`; 64 bytes is the widest load of XDNA2).
inline constexpr unsigned vector_decl_align = __AIE_ARCH__ == 20 ? 32 : 64;

}  // namespace FLOWNPU_AIE_ARCHITECTURE
}  // namespace aie

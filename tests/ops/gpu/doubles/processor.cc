// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/gpu/doubles/processor.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

namespace opencl_double {

#if defined(__x86_64__)
namespace {

// The newest processor that every LLVM has under these names and whose instructions this one has.
char* older_processor() {
  const char* name = __builtin_cpu_supports("avx512bw") ? "skylake-avx512"
                     : __builtin_cpu_supports("avx2")   ? "haswell"
                                                        : "x86-64";
  return strdup(name);  // PoCL frees it
}

// Writes a jump to another function over the beginning of one.
void redirect(void* function, void* other) {
  unsigned char jump[] = {0x48, 0xb8, 0, 0, 0,    0,
                          0,    0,    0, 0, 0xff, 0xe0};  // mov rax, other; jmp rax
  std::memcpy(jump + 2, static_cast<const void*>(&other), sizeof other);
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto at = reinterpret_cast<std::uintptr_t>(function), first = at & ~(page - 1);
  // NOLINTNEXTLINE(performance-no-int-to-ptr): mprotect takes the page of the function
  void* const begin = reinterpret_cast<void*>(first);
  const std::size_t bytes = at + sizeof jump - first;
  if (mprotect(begin, bytes, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) return;
  std::memcpy(function, jump, sizeof jump);
  mprotect(begin, bytes, PROT_READ | PROT_EXEC);
}

}  // namespace

void name_unknown_processor() {
  const char* const file = std::getenv("OCL_ICD_VENDORS");
  void* const pocl = file == nullptr ? nullptr : dlopen(file, RTLD_NOW | RTLD_LOCAL);
  void* const function = pocl == nullptr ? nullptr : dlsym(pocl, "pocl_get_llvm_cpu_name");
  if (function == nullptr) return;
  char* const name = reinterpret_cast<char* (*)()>(function)();
  if (std::string(name) == "generic") {
    redirect(function, reinterpret_cast<void*>(&older_processor));
  }
  std::free(name);
}
#else
void name_unknown_processor() {}
#endif

}  // namespace opencl_double

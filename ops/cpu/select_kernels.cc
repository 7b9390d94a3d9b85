// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/kernels.h"
#include "ops/error.h"
#include "ops/system/processor_features.h"

namespace flownpu::cpu {

// Defined by kernels/tables.cc, compiled once for each instruction set, and by
// kernels/amx/select.cc.
namespace generic {
const Kernels& kernels();
}
#if defined(__x86_64__)
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
namespace amx {
const Kernels& kernels();
}
#elif defined(__aarch64__)
namespace dotprod {
const Kernels& kernels();
}
namespace i8mm {
const Kernels& kernels();
}
#endif

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> tables;
#if defined(__x86_64__)
  if (has_avx512() && may_use_tiles()) tables.push_back(&amx::kernels());
  if (has_avx512()) tables.push_back(&avx512::kernels());
  if (has_avx2()) tables.push_back(&avx2::kernels());
#elif defined(__aarch64__)
  if (has_int8_matrices()) tables.push_back(&i8mm::kernels());
  if (has_dot_products()) tables.push_back(&dotprod::kernels());
#endif
  tables.push_back(&generic::kernels());
  return tables;
}

const Kernels& select_kernels(std::string_view isa) {
  const std::vector<const Kernels*> tables = available_kernels();
  if (isa == "auto") return *tables.front();
  std::string names = "auto";
  for (const Kernels* table : tables) {
    if (isa == table->isa) return *table;
    names += std::string(", ") + table->isa;
  }
  fail("[cpu] expected cpu_isa to be one that this processor has (", names, "), got '", isa, "'");
}

}  // namespace flownpu::cpu

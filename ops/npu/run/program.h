// SPDX-License-Identifier: Apache-2.0
// Program: runs what a program of the artifacts says (artifacts/program_record.h). It knows no
// model, no design and no order of calls: `flownpu build` wrote all that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/npu/artifacts/compiled_designs.h"
#include "ops/npu/artifacts/program_record.h"
#include "ops/npu/run/host_operators.h"

namespace flownpu::npu {

// The buffers of a model's programs, which share those of a name.
class ProgramBuffers {
 public:
  // Makes a buffer of so many bytes, or finds one that others use, too.
  using Maker = std::function<std::shared_ptr<Buffer>(std::size_t)>;
  using Makers = std::map<std::string, Maker, std::less<>>;

  // Makes the buffers of all `programs`, each as large as its largest use; caches are made by
  // whoever keeps them (ops/layers/kv_caches.h), and constants are packed with the node, but for
  // those that have `makers`. Throws DeviceError (kMemory) before anything is allocated if the
  // machine has not as much memory; Error if the node has not packed a constant, or another size of
  // it.
  ProgramBuffers(Runtime& runtime, std::span<const ProgramRecord* const> programs, const Node& node,
                 const Makers& makers = {});

  // Null for a cache.
  Buffer* find(const std::string& name) const;
  // Size of the cache that the programs need; 0: none.
  std::size_t cache_bytes() const { return cache_bytes_; }

 private:
  std::size_t cache_bytes_ = 0;
  std::map<std::string, std::shared_ptr<Buffer>, std::less<>> buffers_;
};

class Program {
 public:
  // Loads what its calls need. `host`: for its own steps. `record` and `buffers` must outlive it.
  // Throws DeviceError; Error if the host has no such operator.
  Program(std::shared_ptr<CompiledDesigns> designs, const ProgramRecord& record,
          const ProgramBuffers& buffers, const HostCompute& host);

  const ProgramRecord& record() const { return *record_; }

  // Rows for the next run, rounded to bf16: as many of record().given's as there are values for,
  // zeros in the others. The host's steps compute as many: what an array makes of the others
  // nobody reads. Throws Error if there are more.
  void write(std::span<const float> values);
  // Makes the calls for a first token at `position`; `where`: for messages, after the steps'
  // labels; `cache`: the conversation's, of ProgramBuffers' cache_bytes(). Throws DeviceFailed.
  void run(std::int64_t position, const std::string& where, Buffer* cache = nullptr);
  // What the last run made: as many values of record().made. Throws Error if it has fewer.
  void read(std::span<float> values) const;

 private:
  // A step of an array, or of the host. A view without a buffer is of the cache.
  struct Step {
    PreparedCall* call = nullptr;
    std::size_t slot = 0;  // of the call's words: this step's, of those of its dispatch
    HostOperator* host = nullptr;
    std::int64_t offset = 0;
    std::vector<View> arguments;
    const std::string* label = nullptr;
  };

  std::shared_ptr<CompiledDesigns> designs_;
  const ProgramRecord* record_;
  Buffer* given_;
  Buffer* made_;
  bool given_has_ones_;
  std::size_t given_rows_ = 0;  // by the last write
  HostCompute host_;
  std::map<std::size_t, std::unique_ptr<PreparedCall>> calls_;
  std::map<std::size_t, std::unique_ptr<HostOperator>> host_calls_;
  std::vector<std::vector<Step>> dispatches_;
};

}  // namespace flownpu::npu

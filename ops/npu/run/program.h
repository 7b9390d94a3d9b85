// SPDX-License-Identifier: Apache-2.0
// Program: runs a program of the artifacts (artifacts/program_record.h). It knows no model, no
// design and no order of calls, all of which `flownpu build` wrote.
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

// The buffers of a model's programs; programs share the buffers that have the same name.
class ProgramBuffers {
 public:
  // Makes a buffer of so many bytes, or returns one that others use, too.
  using Maker = std::function<std::shared_ptr<Buffer>(std::size_t)>;
  using Makers = std::map<std::string, Maker, std::less<>>;

  // Makes the buffers of all `programs`, each as large as its largest use. Caches are made by their
  // owner (ops/transformer/cache/kv_caches.h). Constants come from the node, which has them packed;
  // buffers with a name in `makers` come from there. Throws DeviceError (kMemory) before anything
  // is allocated if the machine has too little memory; Error if the node lacks a packed constant,
  // or has it in another size.
  ProgramBuffers(Runtime& runtime, std::span<const ProgramRecord* const> programs, const Node& node,
                 const Makers& makers = {});

  // The buffer of this name; null for a cache.
  Buffer* find(const std::string& name) const;
  // Bytes of the cache that the programs need; 0: none.
  std::size_t cache_bytes() const { return cache_bytes_; }

 private:
  std::size_t cache_bytes_ = 0;
  std::map<std::string, std::shared_ptr<Buffer>, std::less<>> buffers_;
};

class Program {
 public:
  // Loads what its calls need. `host`: what computes the host's steps. `record` and `buffers` must
  // outlive it. Throws DeviceError; Error if the host lacks an operator.
  Program(std::shared_ptr<CompiledDesigns> designs, const ProgramRecord& record,
          const ProgramBuffers& buffers, const HostCompute& host);

  const ProgramRecord& record() const { return *record_; }

  // Writes the rows of the next run, rounded to bf16, and zeros in the remaining rows of
  // record().given. The host's steps compute only the written rows; nobody reads an array's results
  // for the others. Throws Error if there are more values than rows for them.
  void write(std::span<const float> values);
  // Runs the steps, for a first token at `position`. `where`: for messages, appended to the steps'
  // labels. `cache`: the conversation's, of ProgramBuffers::cache_bytes() bytes. Throws
  // DeviceFailed.
  void run(std::int64_t position, const std::string& where, Buffer* cache = nullptr);
  // Reads the results of the last run: the first values of record().made. Throws Error if it has
  // fewer.
  void read(std::span<float> values) const;

 private:
  // A call of an array, or a step of the host. A view without a buffer is one of the cache.
  struct Step {
    PreparedCall* call = nullptr;
    std::size_t slot = 0;  // of the call's words, among those of its dispatch
    HostOperator* host = nullptr;
    std::int64_t offset = 0;
    Buffer* choices = nullptr;  // that the call's words follow; null: they follow none
    std::vector<View> arguments;
    const std::string* label = nullptr;
  };

  static std::vector<std::int64_t> choices_of(const Step& step);

  std::shared_ptr<CompiledDesigns> designs_;
  const ProgramRecord* record_;
  Buffer* given_;
  Buffer* made_;
  bool given_has_ones_;
  std::size_t given_rows_ = 0;  // of the last write
  HostCompute host_;
  std::map<std::size_t, std::unique_ptr<PreparedCall>> calls_;
  std::map<std::size_t, std::unique_ptr<HostOperator>> host_calls_;
  std::vector<std::vector<Step>> dispatches_;
};

}  // namespace flownpu::npu

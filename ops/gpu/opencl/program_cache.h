// SPDX-License-Identifier: Apache-2.0
// Compiled kernels on disk, so that a driver's compiler is waited for once for each kernel, device,
// driver and source. A file that is damaged, or another key's, is as good as none.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace flownpu::gpu {

// The folder, in the environment; empty there: nothing is kept.
inline constexpr const char* kCacheVariable = "FLOWNPU_GPU_CACHE";

// That folder, else flownpu/opencl in the user's folder of caches (XDG_CACHE_HOME, ~/.cache); empty
// where there is none of these.
std::filesystem::path default_cache_folder();

class ProgramCache {
 public:
  // Empty: nothing is kept.
  explicit ProgramCache(std::filesystem::path folder) : folder_(std::move(folder)) {}

  // `key`: all that the binary depends on, its source included.
  std::optional<std::vector<unsigned char>> find(const std::string& key) const;
  // Written beside and renamed, so that no process reads half of it.
  void keep(const std::string& key, const std::vector<unsigned char>& binary);
  std::filesystem::path file_of(const std::string& key) const;
  // Why the last binary was not kept; empty if it was. No reason to stop: it is compiled anew next
  // time.
  const std::string& problem() const { return problem_; }

 private:
  std::filesystem::path folder_;
  std::string problem_;
};

}  // namespace flownpu::gpu

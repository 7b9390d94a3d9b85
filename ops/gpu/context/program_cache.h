// SPDX-License-Identifier: Apache-2.0
// Compiled kernels on disk, so that a driver compiles a kernel once for each device, driver and
// source. A file that is damaged, or has another key, is taken for none.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace flownpu::gpu {

// Environment variable: the folder; empty: nothing is kept.
inline constexpr const char* kCacheVariable = "FLOWNPU_GPU_CACHE";

// The folder that the variable names, else flownpu/opencl in the user's folder of caches
// (XDG_CACHE_HOME, ~/.cache); an empty path where none of these is known.
std::filesystem::path default_cache_folder();

class ProgramCache {
 public:
  // Empty: nothing is kept.
  explicit ProgramCache(std::filesystem::path folder) : folder_(std::move(folder)) {}

  // The binary that was kept with this key, if any. `key`: all that it depends on, its source
  // included.
  std::optional<std::vector<unsigned char>> find(const std::string& key) const;
  // Writes to a file beside the final one, then renames it, so that no process reads half of it.
  void keep(const std::string& key, const std::vector<unsigned char>& binary);
  std::filesystem::path file_of(const std::string& key) const;
  // The reason why the last binary was not kept; empty if it was. Callers may continue without it:
  // the kernel is compiled again next time.
  const std::string& problem() const { return problem_; }

 private:
  std::filesystem::path folder_;
  std::string problem_;
};

}  // namespace flownpu::gpu

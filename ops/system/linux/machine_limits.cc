// SPDX-License-Identifier: Apache-2.0
#include "ops/system/machine_limits.h"

#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace flownpu {
namespace {

namespace fs = std::filesystem;

// The folders of a cgroup controller: the process's own group, and the mount point, which is the
// outermost group that it can see.
struct Groups {
  fs::path mount;
  fs::path own;
  bool is_version_2 = false;
};

bool has_word(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const std::size_t comma = list.find(',');
    if (list.substr(0, comma) == word) return true;
    if (comma == std::string_view::npos) break;
    list.remove_prefix(comma + 1);
  }
  return false;
}

// The path of the process's group in the hierarchy of a controller such as "cpu", or in that of
// cgroup version 2 (""). A line of /proc/self/cgroup is number:controllers:path.
std::optional<std::string> own_group(const fs::path& root, std::string_view controller) {
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string_view controllers =
        std::string_view(line).substr(first + 1, second - first - 1);
    if (controller.empty() ? controllers.empty() : has_word(controllers, controller))
      return line.substr(second + 1);
  }
  return std::nullopt;
}

// The folder of `group` below a mount whose root is the group `shown`. In a container the mount
// often shows only the container's own group, while `group` is its name outside of the container.
fs::path below(const fs::path& mount, const std::string& shown, const std::string& group) {
  const std::string prefix = shown == "/" ? shown : shown + "/";
  if (!group.starts_with(prefix) || group.find("/..") != std::string::npos) return mount;
  return mount / group.substr(prefix.size());
}

// The controller's groups in all mounted hierarchies. A line of /proc/self/mountinfo has: 3
// numbers, the root of the mount within its file system, the mount point, options, optional fields,
// "-", the type, the source, and the file system's own options.
std::vector<Groups> groups_of(const fs::path& root, std::string_view controller) {
  std::vector<Groups> found;
  std::ifstream file(root / "proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    std::string shown;
    std::string mount;
    std::string type;
    std::string source;
    std::string options;
    words >> word >> word >> word >> shown >> mount;
    while (words >> word && word != "-") {
    }
    words >> type >> source >> options;
    const bool is_version_2 = type == "cgroup2";
    if (!is_version_2 && (type != "cgroup" || !has_word(options, controller))) continue;
    const std::optional<std::string> group = own_group(root, is_version_2 ? "" : controller);
    if (!group) continue;
    const fs::path place = root / fs::path(mount).relative_path();
    found.push_back({place, below(place, shown, *group), is_version_2});
  }
  return found;
}

// The lowest limit that `read(folder, is_version_2)` finds in the process's groups and their
// parents.
template <typename Value, typename Read>
std::optional<GroupLimit<Value>> least(const fs::path& root, std::string_view controller,
                                       const Read& read) {
  std::optional<GroupLimit<Value>> found;
  for (const Groups& groups : groups_of(root, controller)) {
    for (fs::path folder = groups.own;; folder = folder.parent_path()) {
      std::optional<GroupLimit<Value>> limit = read(folder, groups.is_version_2);
      if (limit && (!found || limit->value < found->value)) found = std::move(limit);
      if (folder == groups.mount || folder == folder.parent_path()) break;
    }
  }
  return found;
}

// The first number in a file; nullopt if there is no file, or it says "max".
template <typename Number>
std::optional<Number> number_in(const fs::path& path) {
  Number number{};
  if (std::ifstream file(path); file >> number) return number;
  return std::nullopt;
}

// The CPU quota of a group in processors: `quota` microseconds in every `period`. Version 1 says -1
// if there is no quota.
std::optional<GroupLimit<double>> quota_of(const fs::path& folder, bool is_version_2) {
  const fs::path file = folder / (is_version_2 ? "cpu.max" : "cpu.cfs_quota_us");
  double quota = 0;
  double period = 0;
  std::ifstream stream(file);
  if (!(stream >> quota) || quota <= 0) return std::nullopt;
  if (is_version_2) {
    stream >> period;
  } else {
    period = number_in<double>(folder / "cpu.cfs_period_us").value_or(0);
  }
  if (period <= 0) return std::nullopt;
  return GroupLimit<double>{quota / period, file};
}

// cgroup version 1 says the largest multiple of the page size if there is no limit.
constexpr std::int64_t kUnlimited = std::int64_t{1} << 62;

std::optional<GroupLimit<std::int64_t>> memory_of(const fs::path& folder, bool is_version_2) {
  const fs::path file = folder / (is_version_2 ? "memory.max" : "memory.limit_in_bytes");
  const auto bytes = number_in<std::int64_t>(file);
  if (!bytes || *bytes >= kUnlimited) return std::nullopt;
  return GroupLimit<std::int64_t>{*bytes, file};
}

}  // namespace

std::optional<GroupLimit<double>> processor_quota(const fs::path& root) {
  return least<double>(root, "cpu", quota_of);
}

std::optional<GroupLimit<std::int64_t>> memory_limit(const fs::path& root) {
  return least<std::int64_t>(root, "memory", memory_of);
}

std::size_t machine_memory() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace flownpu

// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/xrt/status.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>

namespace flownpu::npu::xrt_abi {
namespace {

Status failure_at(Stage stage) {
  // In the order of Stage.
  constexpr Status kFailures[] = {Status::kNoDevice, Status::kDesign, Status::kMemory,
                                  Status::kSubmit,   Status::kSubmit, Status::kCommand};
  return kFailures[static_cast<std::size_t>(stage)];
}

// XRT's messages may have several lines, and a line break at the end; ours are one sentence.
std::string in_a_line(std::string_view content) {
  std::string line;
  std::size_t begin = 0;
  while (begin < content.size()) {
    const std::size_t end = std::min(content.find('\n', begin), content.size());
    const std::string_view part = content.substr(begin, end - begin);
    if (part.find_first_not_of(" \t\r") != std::string_view::npos) {
      if (!line.empty()) line += "; ";
      line += part;
    }
    begin = end + 1;
  }
  return line;
}

}  // namespace

// The numbers are those that the driver (amdxdna) and XRT's part for NPUs return: EACCES for the
// device file; EAGAIN if the memory to be locked (64 MB at opening, later that of each buffer and
// command) is over the limit; ENOTTY and ENOTSUP for requests that the driver does not know yet.
Status status_of(int number, Stage stage) {
  switch (number) {
    case EACCES:
    case EPERM:
      return Status::kPermission;
    case ENODEV:
    case ENXIO:
      return Status::kNoDevice;
    case ENOTTY:
    case ENOSYS:
    case ENOTSUP:
      return Status::kTooOld;
    case EAGAIN:
      if (stage != Stage::kLoad && stage != Stage::kWait) return Status::kLockedMemory;
      break;
    default:
      break;
  }
  const bool is_full = number == EAGAIN || number == EBUSY || number == ENOSPC || number == ENOMEM;
  if (stage == Stage::kLoad && is_full) return Status::kContexts;
  if (number != ENOMEM) return failure_at(stage);
  return stage == Stage::kOpen ? Status::kLockedMemory : Status::kMemory;
}

void write(Text text, std::string_view content) noexcept {
  if (text.data == nullptr || text.capacity == 0) return;
  const std::string line = in_a_line(content);
  const std::size_t length = std::min(line.size(), text.capacity - 1);
  std::memcpy(text.data, line.data(), length);
  text.data[length] = '\0';
}

Status report(Stage stage, Text error) noexcept {
  try {
    throw;
  } catch (const StatusError& failure) {
    write(error, failure.what());
    return failure.status();
  } catch (const std::system_error& failure) {
    write(error, failure.what());
    return status_of(std::abs(failure.code().value()), stage);
  } catch (const std::bad_alloc&) {
    write(error, "this process has no memory left");
    return Status::kMemory;
  } catch (const std::exception& failure) {
    write(error, failure.what());
    return failure_at(stage);
  } catch (...) {
    write(error, "an error without a text");
    return failure_at(stage);
  }
}

}  // namespace flownpu::npu::xrt_abi

// SPDX-License-Identifier: Apache-2.0
#include "ops/system/file_mapping.h"

#include <windows.h>

#include <system_error>

#include "ops/error.h"
#include "ops/system/paths.h"

namespace flownpu {
namespace {

HANDLE of(std::intptr_t handle) { return reinterpret_cast<HANDLE>(handle); }

std::int64_t joined(DWORD high, DWORD low) { return std::int64_t{high} << 32 | low; }

std::string reason(DWORD error) {
  return std::system_category().message(static_cast<int>(error)) + " (error " +
         std::to_string(error) + ")";
}

}  // namespace

// Other processes may write, rename and remove the open file, as on Linux; but while it is mapped,
// Windows refuses to truncate or replace it.
OpenFile::OpenFile(const std::string& path) : path_(path) {
  HANDLE const file = CreateFileW(path_of(path).c_str(), GENERIC_READ,
                                  FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, nullptr,
                                  OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, nullptr);
  if (file == INVALID_HANDLE_VALUE)
    fail("[FlowNPU] cannot open '", path, "': ", reason(GetLastError()));
  handle_ = reinterpret_cast<std::intptr_t>(file);
  BY_HANDLE_FILE_INFORMATION status{};
  if (GetFileInformationByHandle(file, &status) == 0) return;
  const std::int64_t bytes = joined(status.nFileSizeHigh, status.nFileSizeLow);
  bytes_ = static_cast<std::size_t>(bytes);
  identity_ = {
      status.dwVolumeSerialNumber, joined(status.nFileIndexHigh, status.nFileIndexLow), bytes,
      joined(status.ftLastWriteTime.dwHighDateTime, status.ftLastWriteTime.dwLowDateTime), 0};
}

OpenFile::~OpenFile() { CloseHandle(of(handle_)); }

// The pages have 4 KB: Windows has large ones only for memory that is not a file's.
std::span<const std::byte> OpenFile::map() const {
  HANDLE const mapping = CreateFileMappingW(of(handle_), nullptr, PAGE_READONLY, 0, 0, nullptr);
  const void* data = nullptr;
  if (mapping != nullptr) data = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, bytes_);
  const DWORD error = GetLastError();
  if (mapping != nullptr) CloseHandle(mapping);  // the view keeps the mapping
  if (data == nullptr)
    fail("[FlowNPU] cannot map the ", bytes_, " bytes of '", path_, "': ", reason(error));
  return {static_cast<const std::byte*>(data), bytes_};
}

void unmap(std::span<const std::byte> mapped) { UnmapViewOfFile(mapped.data()); }

}  // namespace flownpu

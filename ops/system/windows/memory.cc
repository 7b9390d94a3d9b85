// SPDX-License-Identifier: Apache-2.0
#include "ops/system/memory.h"

#include <windows.h>

#include <cstdint>
#include <new>

namespace flownpu {
namespace {

constexpr std::size_t kPage = 4096;

// Enables the user's right to lock pages, which a process must request.
void use_right_to_lock_pages() {
  HANDLE token = nullptr;
  if (OpenProcessToken(GetCurrentProcess(), TOKEN_ADJUST_PRIVILEGES, &token) == 0) return;
  TOKEN_PRIVILEGES wanted{};
  wanted.PrivilegeCount = 1;
  wanted.Privileges[0].Attributes = SE_PRIVILEGE_ENABLED;
  if (LookupPrivilegeValueW(nullptr, L"SeLockMemoryPrivilege", &wanted.Privileges[0].Luid) != 0)
    AdjustTokenPrivileges(token, FALSE, &wanted, 0, nullptr, nullptr);
  CloseHandle(token);
}

// Returns null without that right, or if no large pages are free.
void* large_pages(std::size_t bytes) {
  static const std::size_t page = [] {
    use_right_to_lock_pages();
    return GetLargePageMinimum();
  }();
  if (page == 0 || bytes > SIZE_MAX - page) return nullptr;
  return VirtualAlloc(nullptr, (bytes + page - 1) / page * page,
                      MEM_RESERVE | MEM_COMMIT | MEM_LARGE_PAGES, PAGE_READWRITE);
}

}  // namespace

std::shared_ptr<std::byte> allocate_large_pages(std::size_t bytes) {
  void* memory = large_pages(bytes);
  if (memory == nullptr)
    memory = VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
  if (memory == nullptr) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory),
          [](std::byte* pages) { VirtualFree(pages, 0, MEM_RELEASE); }};
}

void ask_for_large_pages(std::span<const std::byte> /*memory*/) {}

GuardedPages::GuardedPages(std::size_t bytes) {
  if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
  mapped_ = (bytes + kPage - 1) / kPage * kPage + kPage;
  data_ = static_cast<std::byte*>(
      VirtualAlloc(nullptr, mapped_, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE));
  if (data_ == nullptr) throw std::bad_alloc();
  DWORD before = 0;
  VirtualProtect(data_ + mapped_ - kPage, kPage, PAGE_NOACCESS, &before);
}

GuardedPages::~GuardedPages() { VirtualFree(data_, 0, MEM_RELEASE); }

}  // namespace flownpu

// SPDX-License-Identifier: Apache-2.0
// flownpu_watch: counts how often one library of a process allocates memory and asks the system for
// something. Preloaded (LD_PRELOAD), it takes the place of libc's functions of these names; a call
// counts if it comes from the library's own code. No tool is needed, and no privilege.
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#ifndef __GLIBC__
#error "written for glibc; build it nowhere else"
#endif

#define WATCH_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
// NOLINTBEGIN(bugprone-reserved-identifier): glibc's own names of the functions that are replaced
// below.
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* memory, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);
// NOLINTEND(bugprone-reserved-identifier)
}

namespace {

// Addresses of the watched library's code. Set before `watching`.
std::uintptr_t code_begin = 0;
std::uintptr_t code_end = 0;
std::atomic<bool> watching{false};

struct Count {
  const char* name;
  std::atomic<std::int64_t> calls{0};
};

std::array<Count, 11> counts{{{"malloc"},
                              {"mmap"},
                              {"munmap"},
                              {"mprotect"},
                              {"madvise"},
                              {"open"},
                              {"read"},
                              {"write"},
                              {"ioctl"},
                              {"nanosleep"},
                              {"sched_yield"}}};

void note(const char* name, const void* caller) {
  const auto at = reinterpret_cast<std::uintptr_t>(caller);
  if (!watching.load(std::memory_order_relaxed) || at < code_begin || code_end <= at) return;
  for (Count& count : counts)
    if (strcmp(count.name, name) == 0) ++count.calls;
}

// Sets the addresses of the library whose path contains `library`; 1 if it is this one.
int find(dl_phdr_info* info, std::size_t /*size*/, void* library) {
  if (strstr(info->dlpi_name, static_cast<const char*>(library)) == nullptr) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD || (segment.p_flags & PF_X) == 0) continue;
    code_begin = info->dlpi_addr + segment.p_vaddr;
    code_end = code_begin + segment.p_memsz;
  }
  return 1;
}

// Counts the call of a function of libc, and makes it.
template <typename Result, typename... Arguments>
Result forward(const char* name, const void* caller, Arguments... arguments) {
  note(name, caller);
  return reinterpret_cast<Result (*)(Arguments...)>(dlsym(RTLD_NEXT, name))(arguments...);
}

}  // namespace

WATCH_EXPORT void* malloc(std::size_t bytes) {
  note("malloc", __builtin_return_address(0));
  return __libc_malloc(bytes);
}
WATCH_EXPORT void* calloc(std::size_t count, std::size_t bytes) {
  note("malloc", __builtin_return_address(0));
  return __libc_calloc(count, bytes);
}
WATCH_EXPORT void* realloc(void* memory, std::size_t bytes) {
  note("malloc", __builtin_return_address(0));
  return __libc_realloc(memory, bytes);
}
WATCH_EXPORT void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  note("malloc", __builtin_return_address(0));
  return __libc_memalign(alignment, bytes);
}
WATCH_EXPORT int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
  note("malloc", __builtin_return_address(0));
  *memory = __libc_memalign(alignment, bytes);
  return *memory == nullptr ? ENOMEM : 0;
}

// The types of the arguments are those with which libc's functions are called: what they point to
// does not matter here.
#define WATCH(Result, name, parameters, ...)                                               \
  WATCH_EXPORT Result name parameters {                                                    \
    return forward<Result>(#name, __builtin_return_address(0) __VA_OPT__(, ) __VA_ARGS__); \
  }
WATCH(void*, mmap, (void* at, std::size_t size, int access, int flags, int file, off_t offset), at,
      size, access, flags, file, offset)
WATCH(int, munmap, (void* at, std::size_t size), at, size)
WATCH(int, mprotect, (void* at, std::size_t size, int access), at, size, access)
WATCH(int, madvise, (void* at, std::size_t size, int advice), at, size, advice)
WATCH(int, open, (const char* path, int flags, mode_t mode), path, flags, mode)
WATCH(ssize_t, read, (int file, void* into, std::size_t size), file, into, size)
WATCH(ssize_t, write, (int file, const void* from, std::size_t size), file, from, size)
WATCH(int, ioctl, (int file, unsigned long request, void* argument), file, request, argument)
WATCH(int, nanosleep, (const timespec* time, timespec* left), time, left)
WATCH(int, sched_yield, ())

// Watches the library whose path contains `library` until watch_stop(); false if none is loaded.
WATCH_EXPORT bool watch_start(const char* library) {
  for (Count& count : counts) count.calls = 0;
  watching = dl_iterate_phdr(find, const_cast<char*>(library)) != 0;
  return watching;
}
WATCH_EXPORT void watch_stop() { watching = false; }
// The functions that are counted, from 0 on; null after the last. All that allocate are "malloc".
WATCH_EXPORT const char* watch_name(std::size_t number) {
  return number < counts.size() ? counts.at(number).name : nullptr;
}
WATCH_EXPORT std::int64_t watch_calls(std::size_t number) { return counts.at(number).calls; }

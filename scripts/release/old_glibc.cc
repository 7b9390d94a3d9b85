// SPDX-License-Identifier: Apache-2.0
// Functions that the C++ run-time library of GCC 12, linked into each library of a wheel, calls of
// glibc 2.30 to 2.36, for systems whose glibc is older. Linked into the libraries of wheels only
// (wheels.py), and seen by nothing outside of them.
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sys/random.h>
#include <time.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#define HIDDEN __attribute__((visibility("hidden")))

extern "C" {

// glibc 2.30: waits until a clock of choice says `deadline`, for std::condition_variable::wait_for.
// Here that clock is the system's time, as in older versions of libstdc++. If the clock is set back
// meanwhile, the wait becomes longer by the same time.
HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                  clockid_t clock, const timespec* deadline) {
  constexpr long kSecond = 1'000'000'000;
  timespec now{}, until{};
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += deadline->tv_sec - now.tv_sec;
  until.tv_nsec += deadline->tv_nsec - now.tv_nsec;  // more than -1 s, less than 2 s
  if (until.tv_nsec < 0 || until.tv_nsec >= kSecond) {
    const long carried = until.tv_nsec < 0 ? -1 : 1;
    until.tv_sec += carried;
    until.tv_nsec -= carried * kSecond;
  }
  return pthread_cond_timedwait(condition, mutex, &until);
}

// glibc 2.32: whether no second thread has been started. It is always false here, so that
// shared_ptr always counts with atomic operations.
HIDDEN extern char __libc_single_threaded;
char __libc_single_threaded = 0;

// glibc 2.36: 32 random bits, for std::random_device.
HIDDEN std::uint32_t arc4random() {
  std::uint32_t bits = 0;
  // Up to 256 bytes come at once when the kernel has gathered enough entropy; before that a signal
  // may interrupt the call.
  while (getrandom(&bits, sizeof(bits), 0) != static_cast<ssize_t>(sizeof(bits)))
    if (errno != EINTR) std::abort();  // every kernel that glibc 2.28 runs on has it
  return bits;
}

// glibc 2.35, dl_find_object of <dlfcn.h>: finds the unwinder's table (PT_GNU_EH_FRAME) for the
// code at an address. The unwinder reads only eh_frame. On x86-64, 7 reserved words follow.
struct FoundObject {
  unsigned long long flags;
  void* map_start;
  void* map_end;
  struct link_map* link_map;
  void* eh_frame;
  unsigned long long reserved[7];
};

// 0 if it was found, otherwise -1.
HIDDEN int find_object(void* address, FoundObject* result) __asm__("_dl_find_object");
int find_object(void* address, FoundObject* result) {
  struct Search {
    std::uintptr_t address;
    FoundObject* result;
  } search{reinterpret_cast<std::uintptr_t>(address), result};
  const auto look = [](dl_phdr_info* object, std::size_t, void* context) -> int {
    const auto& [wanted, result] = *static_cast<Search*>(context);
    bool is_here = false;
    const ElfW(Phdr)* table = nullptr;
    for (const ElfW(Phdr)* header = object->dlpi_phdr;
         header != object->dlpi_phdr + object->dlpi_phnum; ++header) {
      const std::uintptr_t begin = object->dlpi_addr + header->p_vaddr;
      if (header->p_type == PT_GNU_EH_FRAME) table = header;
      if (header->p_type != PT_LOAD || wanted - begin >= header->p_memsz) continue;
      is_here = true;
      result->map_start = reinterpret_cast<void*>(begin);
      result->map_end = reinterpret_cast<void*>(begin + header->p_memsz);
    }
    if (!is_here) return 0;
    if (table == nullptr) return -1;
    result->flags = 0;
    result->link_map = nullptr;
    result->eh_frame = reinterpret_cast<void*>(object->dlpi_addr + table->p_vaddr);
    return 1;
  };
  return dl_iterate_phdr(look, &search) == 1 ? 0 : -1;
}

}  // extern "C"

// SPDX-License-Identifier: Apache-2.0
// flownpu_watch: counts what one library of a process allocates and which system calls it makes.
// Preloaded (LD_PRELOAD), it takes the place of malloc; from watch_start() on, seccomp hands it
// every system call of every thread as SIGSYS, and it makes the call itself. A call belongs to the
// first library above libc on the stack. No tool is needed, and no privilege.
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <link.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#if !defined(__x86_64__) || !defined(__GLIBC__)
#error "written for x86-64 and glibc; build it nowhere else"
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

// Makes system call `number` with six arguments and returns what the kernel returns. The filter
// lets all system calls through that are made here.
std::int64_t watch_syscall(std::int64_t number, std::int64_t a, std::int64_t b, std::int64_t c,
                           std::int64_t d, std::int64_t e, std::int64_t f);
extern const char watch_syscall_end[];
}
asm(R"(
.text
.globl watch_syscall
.hidden watch_syscall
.type watch_syscall, @function
watch_syscall:
  .cfi_startproc
  movq %rdi, %rax
  movq %rsi, %rdi
  movq %rdx, %rsi
  movq %rcx, %rdx
  movq %r8, %r10
  movq %r9, %r8
  movq 8(%rsp), %r9
  syscall
.globl watch_syscall_end
.hidden watch_syscall_end
watch_syscall_end:
  ret
  .cfi_endproc
.size watch_syscall, .-watch_syscall
)");

namespace {

constexpr int kCalls = 512;  // Above the highest number of a system call.
constexpr int kRanges = 16;
constexpr int kFrames = 24;

// Addresses of a library's code and data. Filled before `watching` is set.
struct Ranges {
  std::uintptr_t begin[kRanges];
  std::uintptr_t end[kRanges];
  int count = 0;

  bool contains(const void* address) const {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    for (int i = 0; i < count; ++i) {
      if (begin[i] <= at && at < end[i]) return true;
    }
    return false;
  }
};

Ranges watched;
Ranges below;  // libc, the dynamic linker, this library: they call on behalf of others.
std::atomic<bool> watching{false};
std::atomic<std::int64_t> allocations{0};
std::atomic<std::int64_t> calls[kCalls];
thread_local bool handling = false;

void note_allocation(const void* caller) {
  if (watching.load(std::memory_order_relaxed) && watched.contains(caller)) ++allocations;
}

bool ours() {
  void* frames[kFrames];
  const int count = backtrace(frames, kFrames);
  for (int i = 0; i < count; ++i) {
    if (!below.contains(frames[i])) return watched.contains(frames[i]);
  }
  return false;
}

void handle(int /*signal*/, siginfo_t* /*info*/, void* context) {
  const int saved_errno = errno;
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const auto number = static_cast<std::int64_t>(registers[REG_RAX]);
  if (!handling && watching.load(std::memory_order_relaxed)) {
    handling = true;
    if (number >= 0 && number < kCalls && ours()) ++calls[number];
    handling = false;
  }
  registers[REG_RAX] =
      watch_syscall(number, registers[REG_RDI], registers[REG_RSI], registers[REG_RDX],
                    registers[REG_R10], registers[REG_R8], registers[REG_R9]);
  errno = saved_errno;
}

int find_ranges(dl_phdr_info* info, std::size_t /*size*/, void* library) {
  const char* name = info->dlpi_name;
  const bool is_watched = strstr(name, static_cast<const char*>(library)) != nullptr;
  const bool is_below = strstr(name, "/libc.so") != nullptr ||
                        strstr(name, "/ld-linux") != nullptr ||
                        strstr(name, "flownpu_watch") != nullptr;
  if (!is_watched && !is_below) return 0;
  Ranges& ranges = is_watched ? watched : below;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD || ranges.count == kRanges) continue;
    ranges.begin[ranges.count] = info->dlpi_addr + segment.p_vaddr;
    ranges.end[ranges.count] = info->dlpi_addr + segment.p_vaddr + segment.p_memsz;
    ++ranges.count;
  }
  return 0;
}

// Turns system calls into SIGSYS. Exceptions are calls from watch_syscall, the return from a
// handler, and calls that a handler cannot make for its caller (new threads and processes, and
// calls of a thread that blocks signals). Returns 0 or the error number.
int install_filter() {
  const auto end = reinterpret_cast<std::uintptr_t>(watch_syscall_end);
  const auto low = static_cast<std::uint32_t>(end);
  const auto high = static_cast<std::uint32_t>(end >> 32);
  constexpr auto kPointer = static_cast<std::uint32_t>(offsetof(seccomp_data, instruction_pointer));
  constexpr int kLetThrough[] = {SYS_rt_sigreturn, SYS_rt_sigprocmask, SYS_clone,
                                 SYS_clone3,       SYS_fork,           SYS_vfork,
                                 SYS_execve,       SYS_exit,           SYS_exit_group,
                                 SYS_rseq,         SYS_set_robust_list};
  sock_filter filter[64];
  int n = 0;
  const auto load = [&](std::uint32_t offset) {
    filter[n++] = BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offset);
  };
  load(kPointer);
  filter[n++] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, low, 0, 3);
  load(kPointer + 4);
  filter[n++] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, high, 0, 1);
  filter[n++] = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  load(offsetof(seccomp_data, nr));
  for (const int number : kLetThrough) {
    filter[n++] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(number), 0, 1);
    filter[n++] = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  }
  filter[n++] = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
  const sock_fprog program{static_cast<decltype(sock_fprog::len)>(n), filter};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return errno;
  if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) != 0)
    return errno;
  return 0;
}

}  // namespace

WATCH_EXPORT void* malloc(std::size_t bytes) {
  note_allocation(__builtin_return_address(0));
  return __libc_malloc(bytes);
}
WATCH_EXPORT void* calloc(std::size_t count, std::size_t bytes) {
  note_allocation(__builtin_return_address(0));
  return __libc_calloc(count, bytes);
}
WATCH_EXPORT void* realloc(void* memory, std::size_t bytes) {
  note_allocation(__builtin_return_address(0));
  return __libc_realloc(memory, bytes);
}
WATCH_EXPORT void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  note_allocation(__builtin_return_address(0));
  return __libc_memalign(alignment, bytes);
}
WATCH_EXPORT int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
  note_allocation(__builtin_return_address(0));
  *memory = __libc_memalign(alignment, bytes);
  return *memory == nullptr ? ENOMEM : 0;
}

// Watches the library whose path contains `library`, which must be loaded, until watch_stop().
// Returns 0, or the error number of the call that the system refused; ENOENT without such a
// library.
WATCH_EXPORT int watch_start(const char* library) {
  watched.count = below.count = 0;
  dl_iterate_phdr(find_ranges, const_cast<char*>(library));
  if (watched.count == 0) return ENOENT;
  void* frame = nullptr;
  backtrace(&frame, 1);  // The first call loads the unwinder.
  for (std::atomic<std::int64_t>& count : calls) count = 0;
  allocations = 0;
  static bool installed = false;
  if (!installed) {
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
    if (sigaction(SIGSYS, &action, nullptr) != 0) return errno;
    if (const int error = install_filter(); error != 0) return error;
    installed = true;
  }
  watching = true;
  return 0;
}

WATCH_EXPORT void watch_stop() { watching = false; }
WATCH_EXPORT std::int64_t watch_allocations() { return allocations; }
// The number of times that the library made the system call `number`.
WATCH_EXPORT std::int64_t watch_calls(int number) { return calls[number]; }

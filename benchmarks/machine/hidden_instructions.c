// SPDX-License-Identifier: Apache-2.0
// Preloaded into a process (LD_PRELOAD), hides newer instruction sets from all of its libraries:
// HIDDEN=amx hides AMX, HIDDEN=avx512 also AVX-512 and AVX-VNNI. So ONNX Runtime, which has no
// option for it, can be timed as on an older processor.
//
// Dataflow: CPUID faults (arch_prctl, Linux on Intel), the fault's handler executes it, clears
// features in its answer and returns behind it. Where it cannot fault (AMD), HIDDEN_BY=ud2 says
// that libraries have UD2, as long and illegal, in its place (benchmarks/machine/illegal_cpuid.py).
// Bits: Intel's manual, volume 2, CPUID, leaf 7.
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

static const unsigned kAmx = 1u << 22 | 1u << 24 | 1u << 25;  // BF16, TILE, INT8 in EDX
// In EBX: F, DQ, IFMA, PF, ER, CD, BW, VL.
static const unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 21 | 0xfu << 26 | 3u << 30;
static const unsigned kAvx512More = 1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14;  // ECX
static const unsigned kAvx512Fp16 = 1u << 23 | 1u << 8 | 3u << 2;                        // EDX
static const unsigned kVnniAndBf16 = 3u << 4;  // AVX-VNNI, AVX512-BF16 in EAX of subleaf 1
static const unsigned kAmxFp16 = 1u << 21;     // EAX of subleaf 1
static const unsigned kAvxVnniInt8 = 1u << 4 | 1u << 5 | 1u << 10 | 1u << 19;  // EDX of subleaf 1

static int hides_avx512;

static void fault_on_cpuid(int on) { syscall(SYS_arch_prctl, ARCH_SET_CPUID, !on); }

static void hide(unsigned leaf, unsigned subleaf, unsigned* a, unsigned* b, unsigned* c,
                 unsigned* d) {
  if (leaf == 0x1d || leaf == 0x1e) *a = *b = *c = *d = 0;  // descriptions of tiles
  if (leaf != 7) return;
  if (subleaf == 0) *d &= ~kAmx;
  if (subleaf == 1) *a &= ~kAmxFp16;
  if (!hides_avx512) return;
  if (subleaf == 0) {
    *b &= ~kAvx512;
    *c &= ~kAvx512More;
    *d &= ~kAvx512Fp16;
  } else {
    *a &= ~kVnniAndBf16;
    *d &= ~kAvxVnniInt8;
  }
}

static void on_fault(int signal_number, siginfo_t* info, void* context) {
  (void)info;
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const unsigned char* code = (const unsigned char*)registers[REG_RIP];
  const unsigned char second = signal_number == SIGILL ? 0x0b : 0xa2;
  if (code[0] != 0x0f || code[1] != second) {  // neither UD2 nor CPUID: a real fault
    signal(signal_number, SIG_DFL);
    return;
  }
  const unsigned leaf = (unsigned)registers[REG_RAX], subleaf = (unsigned)registers[REG_RCX];
  unsigned a, b, c, d;
  fault_on_cpuid(0);
  __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(subleaf));
  fault_on_cpuid(1);
  hide(leaf, subleaf, &a, &b, &c, &d);
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void start(void) {
  const char* hidden = getenv("HIDDEN");
  if (hidden == NULL || *hidden == '\0') return;
  hides_avx512 = strcmp(hidden, "avx512") == 0;
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  const char* by = getenv("HIDDEN_BY");
  if (by != NULL && strcmp(by, "ud2") == 0) {
    sigaction(SIGILL, &action, NULL);
    return;
  }
  sigaction(SIGSEGV, &action, NULL);
  if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0) != 0) {
    perror("CPUID cannot be made to fault here (arch_prctl)");
    _exit(1);
  }
}

# SPDX-License-Identifier: Apache-2.0
# A toolchain for another system: clang, with libc++ and the system's C library, as Zig brings them (ziglang, from PyPI). The
# C++ run time is linked in.
#
# In the environment (zig.py): ZIG, the compiler's path; ZIG_TARGET, what it compiles for; ZIG_AR, a program that calls its
# archiver, since CMake takes one word for it.
if($ENV{ZIG_TARGET} MATCHES windows)
  # mingw-w64's headers and import libraries; what else a library needs, Windows 10 has. Not g++ of mingw-w64: it puts
  # variables of 32 and 64 bytes on a stack that is aligned to 16, and the first access faults (GCC bug 54412).
  set(CMAKE_SYSTEM_NAME Windows)
  set(CMAKE_SYSTEM_PROCESSOR AMD64)
  set(cpu x86_64)
else()
  set(CMAKE_SYSTEM_NAME Linux)
  set(CMAKE_SYSTEM_PROCESSOR aarch64)
  set(cpu generic)
  set(CMAKE_STRIP aarch64-linux-gnu-strip)  # this machine's own knows no files of Arm, and Zig has none
  foreach(kind SHARED MODULE)
    set(CMAKE_${kind}_LINKER_FLAGS_INIT -Wl,--build-id=sha1)  # by which debuggers find the debug information
  endforeach()
endif()
set(CMAKE_CXX_COMPILER $ENV{ZIG} c++ --target=$ENV{ZIG_TARGET} -mcpu=${cpu})
set(CMAKE_CXX_COMPILER_LAUNCHER "")  # Zig keeps what it has compiled
set(CMAKE_AR $ENV{ZIG_AR})
set(CMAKE_RANLIB true)  # the archiver has written the index

# SPDX-License-Identifier: Apache-2.0
# A toolchain for another system: the clang, the libc++ and the system's C library in Zig's package (ziglang, from PyPI).
# libc++ is linked statically.
#
# Environment variables (zig.py): ZIG, the compiler's path; ZIG_TARGET, its target; ZIG_AR, a program that calls its
# archiver, for which CMake takes one word.
if($ENV{ZIG_TARGET} MATCHES windows)
  # mingw-w64's headers and import libraries; Windows 10 has the other libraries. The g++ of mingw-w64 is not used: it puts
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

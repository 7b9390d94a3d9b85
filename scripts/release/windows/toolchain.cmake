# SPDX-License-Identifier: Apache-2.0
# A toolchain for Windows x64: clang, with libc++, mingw-w64's headers and import libraries, as Zig brings them (ziglang, from
# PyPI). The C++ run time is linked in; what else a library needs, Windows 10 has. Not g++ of mingw-w64: it puts variables of
# 32 and 64 bytes on a stack that is aligned to 16, and the first access faults (GCC bug 54412).
#
# In the environment: ZIG, the compiler's path, and ZIG_AR, a program that is `zig ar`, since CMake takes one word for it.
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR AMD64)
set(target --target=x86_64-windows-gnu)
set(CMAKE_CXX_COMPILER $ENV{ZIG} c++ ${target} -mcpu=x86_64)
set(CMAKE_CXX_COMPILER_LAUNCHER "")  # Zig keeps what it has compiled
set(CMAKE_AR $ENV{ZIG_AR})
set(CMAKE_RANLIB true)  # the archiver has written the index

/* SPDX-License-Identifier: Apache-2.0 */
/* Python's configuration of a compiler for Windows x64: its types' sizes, and that functions and
   data come from a library (python311.dll, python3.dll). The headers of a Python on Linux say it of
   Linux; all else in them is the same. */
#pragma once

#define MS_WINDOWS 1
#define MS_WIN32 1
#define MS_WIN64 1
#define NT_THREADS 1
#define Py_ENABLE_SHARED 1
#define HAVE_DECLSPEC_DLL 1

#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_FLOAT 4
#define SIZEOF_DOUBLE 8
#define SIZEOF_VOID_P 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_WCHAR_T 2
#define SIZEOF_PID_T SIZEOF_INT
#define SIZEOF_TIME_T 8
#define ALIGNOF_MAX_ALIGN_T 8

#define HAVE_SSIZE_T 1
#define HAVE_STDDEF_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_WCHAR_H 1

// SPDX-License-Identifier: Apache-2.0
// The one function that onnxruntime-genai.dll imports from bcryptprimitives.dll, which Wine has
// only since version 9. Windows has its own.
#include <windows.h>
//
#include <ntsecapi.h>

// Fills memory with random bytes; always succeeds.
extern "C" __declspec(dllexport) BOOL ProcessPrng(unsigned char* data, SIZE_T bytes) {
  for (; bytes > 0; --bytes) RtlGenRandom(data++, 1);
  return TRUE;
}

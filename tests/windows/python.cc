// SPDX-License-Identifier: Apache-2.0
// python.exe: the interpreter is in its library, and Panda3D's wheels lack the program that calls
// it.
#include <windows.h>
//
#include <shellapi.h>

extern "C" __declspec(dllimport) int Py_Main(int count, wchar_t** words);

int main() {
  int count = 0;
  wchar_t** const words = CommandLineToArgvW(GetCommandLineW(), &count);
  return Py_Main(count, words);
}

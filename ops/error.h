// SPDX-License-Identifier: Apache-2.0
// The base of all exceptions that this project throws. Its text is part of the interface: what was
// expected, what came instead, and what to do.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace flownpu {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The device cannot compute a node for these inputs, although it can for others. Nothing was
// changed, so that another device may compute the run.
class Unsupported : public Error {
 public:
  using Error::Error;
};

// The device is gone or in an unknown state and takes no more runs. What it kept for a caller can
// still be restored (Device::restore).
class DeviceFailed : public Error {
 public:
  using Error::Error;
};

// fail("[Q4NXMatMul] expected K = ", k, ", got ", got): throws Error with the pieces joined.
template <typename... Pieces>
[[noreturn]] void fail(const Pieces&... pieces) {
  std::ostringstream text;
  (text << ... << pieces);
  throw Error(text.str());
}

// The same for Unsupported.
template <typename... Pieces>
[[noreturn]] void unsupported(const Pieces&... pieces) {
  std::ostringstream text;
  (text << ... << pieces);
  throw Unsupported(text.str());
}

}  // namespace flownpu

// SPDX-License-Identifier: Apache-2.0
// The one exception of this project. Its text is part of the interface: what was expected, what
// came, what to do.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace flownpu {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What a device cannot do with these inputs, though others of the same node it can: nothing was
// changed, and another device may be asked.
class Unsupported : public Error {
 public:
  using Error::Error;
};

// The device is gone or in an unknown state: it takes no more runs. What it kept for a caller can
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

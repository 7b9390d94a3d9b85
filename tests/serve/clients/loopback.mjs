// SPDX-License-Identifier: Apache-2.0
// `node --import loopback.mjs`: ends a script at once that tries to reach anything but the loopback address.

import net from "node:net";

const connect = net.Socket.prototype.connect;
net.Socket.prototype.connect = function (...given) {
  // net's own callers give what they have normalised already.
  const [options] = Array.isArray(given[0]) ? given[0] : net._normalizeArgs(given);
  if (options.host && !["localhost", "127.0.0.1", "::1"].includes(options.host)) {
    console.error(`a client tried to reach ${options.host}`);
    process.exit(3);
  }
  return connect.apply(this, given);
};

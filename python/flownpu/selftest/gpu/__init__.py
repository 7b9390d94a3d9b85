# SPDX-License-Identifier: Apache-2.0
"""`flownpu selftest --device gpu`: runs every variant of every kernel on an OpenCL device, compares and times it."""

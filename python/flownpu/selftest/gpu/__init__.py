# SPDX-License-Identifier: Apache-2.0
"""`flownpu selftest --device gpu`: every kernel in every variant on an OpenCL device, compared and timed."""

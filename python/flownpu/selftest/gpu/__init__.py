# SPDX-License-Identifier: Apache-2.0
"""`flownpu selftest --device gpu`: runs every variant of every kernel on a GPU, compares and times it."""

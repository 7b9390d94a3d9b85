# SPDX-License-Identifier: Apache-2.0
"""`flownpu selftest`: a ladder of programs, from a copy through one tile to a prompt, compared, timed and bounded."""

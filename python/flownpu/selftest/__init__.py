# SPDX-License-Identifier: Apache-2.0
"""`flownpu selftest`: programs from a copy through one tile to a prompt, whose results are compared and timed.

Each program is a stage of the self-test, and runs in a process of its own, within a time limit.
"""

# SPDX-License-Identifier: Apache-2.0
"""`flownpu selftest`: a ladder of programs, from a copy through one tile to a prompt; results are compared and timed.

Each program is a rung; it runs in a process of its own, within a time limit.
"""

# SPDX-License-Identifier: Apache-2.0
"""IRON programs, one for each operator: the places on the array, and the run-time sequence of a call.

A design is a class of array-time parameters, which an xclbin is compiled for, with a method `program` of call-time
parameters, which enter as run-time parameters and DMA patterns. Two calls of one array differ in their sequence only.
"""

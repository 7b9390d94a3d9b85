# SPDX-License-Identifier: Apache-2.0
"""Rules for plain graphs: graphs of standard operators only, as torch's exporter writes them.

    graph           helpers of the rules: constants, shapes, operands
    rewriter        all rules, in order
    known_sizes     computed sizes -> constants
    attention       softmax between two products -> FlowQKVAttention
    weights         products, embeddings and mixtures of experts in float32 -> Q4NX

Every other file is a rule: a function whose docstring is the equation.
"""

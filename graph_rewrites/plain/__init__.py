# SPDX-License-Identifier: Apache-2.0
"""Rules for plain graphs: graphs of standard operators only, as torch's exporter writes them.

    graph           what the rules ask of such a graph: constants, shapes, operands
    rewriter        all rules, in order
    attention       softmax between two products -> FlowQKVAttention
    weights         products, embeddings and mixtures of experts in float32 -> Q4NX

Every other file is a rule: a function whose docstring is the equation.
"""

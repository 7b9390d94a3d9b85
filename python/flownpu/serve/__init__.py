# SPDX-License-Identifier: Apache-2.0
"""`flownpu serve`: models over HTTP, for the clients of OpenAI's API and Ollama's, and a page to talk with them.

What computes is below the interface of `flownpu.generate.worker`: a paged model in GenAI's engine, any other in GenAI's
generators. Nothing here calls GenAI.
"""

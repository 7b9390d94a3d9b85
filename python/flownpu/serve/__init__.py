# SPDX-License-Identifier: Apache-2.0
"""`flownpu serve`: models over HTTP, for the clients of OpenAI's API and Ollama's, and a page to talk with them.

Answers are computed behind the interface of `flownpu.generate.worker`, by GenAI's engine for a paged model, and by
GenAI's generators for any other. Nothing in this package calls GenAI.
"""

# SPDX-License-Identifier: Apache-2.0
"""`flownpu serve`: models over HTTP, for the clients of OpenAI's API and Ollama's, and a page to talk with them.

Answers are computed behind the interface of `flownpu.generate.worker`: those of a paged model by GenAI's engine, those
of any other by GenAI's generators. Nothing in this package calls GenAI.
"""

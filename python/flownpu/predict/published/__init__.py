# SPDX-License-Identifier: Apache-2.0
"""Published tables of language models' speed on AMD's NPUs, unchanged, each with its source."""

from flownpu.predict.published.tables import CONTEXTS, TABLES, Role, Row, Table, watts

__all__ = ["CONTEXTS", "TABLES", "Role", "Row", "Table", "watts"]

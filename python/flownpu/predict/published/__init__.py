# SPDX-License-Identifier: Apache-2.0
"""Tables that others published of language models on NPUs of AMD's, as they are printed, each with its source."""

from flownpu.predict.published.tables import CONTEXTS, TABLES, Role, Row, Table, watts

__all__ = ["CONTEXTS", "TABLES", "Role", "Row", "Table", "watts"]

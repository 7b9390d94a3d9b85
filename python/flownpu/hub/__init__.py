# SPDX-License-Identifier: Apache-2.0
"""Models by their names: repositories of Hugging Face's hub, downloaded and converted once, and kept in a folder."""

import os

# huggingface_hub reads this when it is imported.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

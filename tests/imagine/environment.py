# SPDX-License-Identifier: Apache-2.0
"""The environment with diffusers and optimum, of its own because optimum-onnx wants a transformers below 4.58.

    python -m tests.imagine.environment MODULE ARGUMENT...

makes it, if need be, and runs a module in it. torch and all other packages are the tests' own.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.rewrites import optimum_export

# optimum-onnx 0.1.0, of December 2025, is the newest, and no version lifts its bound.
REQUIREMENTS = (
    "diffusers==0.39.0",  # the newest that takes a huggingface-hub below 1, which transformers 4.57 needs
    "importlib-metadata==10.2.0",  # diffusers imports it
    "zipp==4.1.2",  # importlib-metadata imports it
)
# Nothing is fetched, and nothing reports its use. A second thread of torch would only spin beside other tests.
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "ORT_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def python() -> Path:
    """The environment's interpreter; it is made if there is none, and kept in the cache folder.

    Raises:
        FlowNPUError: pip failed.
    """
    return optimum_export.environment("diffusers", REQUIREMENTS)


if __name__ == "__main__":
    sys.exit(subprocess.run([python(), "-m", *sys.argv[1:]], env={**os.environ, **VARIABLES}, check=False).returncode)

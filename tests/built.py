# SPDX-License-Identifier: Apache-2.0
"""The folder of what `-DFLOWNPU_TESTING=ON` builds, and the modules in it through which tests call C++."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
BUILT = Path(os.environ.get("FLOWNPU_TESTING_DIR", ROOT / "build" / "testing"))


def load(name: str) -> ModuleType:
    """A module of BUILT, which is loaded once. Raises ImportError if it was not built."""
    if name in sys.modules:
        return sys.modules[name]
    found = sorted(BUILT.glob(f"{name}*.so"))
    if not found:
        raise ImportError(
            f"expected the module {name} in {BUILT}, found none: run `make test`, or build it with "
            "`cmake -S . -B build/testing -DFLOWNPU_TESTING=ON && cmake --build build/testing`"
        )
    spec = importlib.util.spec_from_file_location(name, found[0])
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

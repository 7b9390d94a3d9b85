# SPDX-License-Identifier: Apache-2.0
"""What is built for Windows x64, and laid out to be tried where there is only Wine."""

from scripts.release.building import ROOT

__all__ = ["DIST", "WORK"]

WORK = ROOT / "build" / "release" / "windows"
"""Where it is built, and laid out."""
DIST = ROOT / "dist" / "windows"

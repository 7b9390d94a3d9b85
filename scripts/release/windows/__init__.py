# SPDX-License-Identifier: Apache-2.0
"""Builds for Windows x64, and lays files out so that tests can run them under Wine."""

from scripts.release.building import ROOT

__all__ = ["DIST", "WORK"]

WORK = ROOT / "build" / "release" / "windows"
"""Where files are built and laid out."""
DIST = ROOT / "dist" / "windows"

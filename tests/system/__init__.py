"""Imitations of macOS and Windows, on which cpuft is a head; on a Mac, training can be tried out, too."""

from __future__ import annotations

from pathlib import Path


def imitate(system: str) -> dict[str, str]:
    """Return the environment variables with which a Python process resembles that of "darwin" or "win32"."""
    # Windows says in USERNAME who the user is, and has no module that tells.
    return {"FOREIGN_SYSTEM": system, "PYTHONPATH": str(Path(__file__).parent), "USERNAME": "root"}

"""Scripts of this directory import each other by name, under mpirun and under pytest alike."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

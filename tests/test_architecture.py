"""Who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "cpuft"
FIRST = {"errors", "config", "files", "loader"}
SECOND = FIRST | {"words", "world", "arguments", "hostfile", "topology", "record", "facts"}
THIRD = SECOND | {"environment", "plan", "mpi"}
FOURTH = THIRD | {"execute", "ssh", "registry", "cluster"}
# Pure rooms and facts of this host serve both sides; nothing that plans or launches does.
WORKER = SECOND - {"hostfile"}
ALLOWED = {
    "errors": set(),
    "config": set(),
    "loader": set(),
    "files": {"errors"},
    "arguments": FIRST,
    "hostfile": FIRST,
    "topology": FIRST,
    "record": FIRST,
    "words": set(),
    "world": FIRST,
    "facts": set(),
    "plan": SECOND,
    "environment": SECOND | {"plan"},
    "mpi": SECOND | {"plan"},
    "rank": THIRD,
    "execute": FIRST | {"plan"},
    "ssh": FIRST | {"plan", "hostfile"},
    "cluster": FOURTH,
    "launch": FOURTH | {"sweep"},
    "supervise": FOURTH | {"rank"},
    "compare": FOURTH | {"launch", "baggage"},
    "registry": SECOND,
    "sweep": FIRST,
    "baggage": FOURTH,
    "master": FOURTH | {"rank", "supervise", "baggage"},
    "provision": FOURTH | {"provision", "launch"},
    "doctor": FOURTH | {"doctor", "launch"},
    "script": set(),
    "train": WORKER | {"train", "comm", "script"},
    "comm": WORKER | {"comm", "rank", "script", "sweep"},
    "report": {"record", "errors", "report"},
}
FREE = {"cli", "__init__", "__main__"}


def imports_of(path: Path) -> set[str]:
    """The rooms of cpuft that a module imports, wherever in it the import stands."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "cpuft":
            rooms |= {name.name for name in node.names if name.name != "__version__"}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cpuft."):
            rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            rooms |= {name.name.split(".")[1] for name in node.names if name.name.startswith("cpuft.")}
    return rooms


def modules() -> list[tuple[str, Path]]:
    found = sorted(ROOT.rglob("*.py"))
    return [(path.relative_to(ROOT).parts[0].removesuffix(".py"), path) for path in found]


@pytest.mark.parametrize(
    "room, path", [(r, p) for r, p in modules() if r not in FREE], ids=lambda v: getattr(v, "name", v)
)
def test_imports_point_down(room: str, path: Path) -> None:
    assert imports_of(path) <= ALLOWED[room]


def test_the_command_line_imports_nothing_that_trains() -> None:
    assert not imports_of(ROOT / "cli.py") & {"train", "comm"}


@pytest.mark.parametrize("path", [path for _, path in modules()], ids=lambda path: path.name)
def test_only_execute_starts_processes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    # Two run on hosts that have no execute.py, and a rank that compiles its kernels may not import it.
    allowed = path.name in ("execute.py", "facts.py", "probe.py", "kernels.py")
    assert allowed or ("import subprocess" not in text and "os.system" not in text)

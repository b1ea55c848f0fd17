"""README is true: its commands parse and plan, its table is what the code sets."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from cpuft.launch.planning import plan_settings
from cpuft.options.fields import LaunchConfig
from tests.conftest import run_cpuft
from tests.launch.test_planning import make_cluster
from tests.records import make_record
from tests.report.test_comparison import write_record

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TABLE = re.compile(r"(?<=<!-- settings -->\n).*(?=<!-- /settings -->)", re.DOTALL)


def commands() -> list[str]:
    """Lines of README's code blocks that call cpuft."""
    blocks = re.findall(r"^```\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line.startswith(("cpuft ", 'eval "$(cpuft '))]


@pytest.mark.parametrize("command", commands())
def test_every_command_works(command: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "hostfiles", tmp_path / "hostfiles")
    (tmp_path / "train.py").write_text("")
    for ranks in (1, 2):
        write_record(make_record(ranks), tmp_path / f"runs/mrpc-np{ranks}")
    state = {"CPUFT_STATE": str(tmp_path / "state")}
    lab = run_cpuft("provision", "local", "--without-root", "--name", "lab", "--nodes", "4", settings=state)
    assert lab.returncode == 0, lab.stderr
    words = shlex.split(command.removeprefix('eval "$(').removesuffix(')"'))[1:]
    place = words.index("--") if "--" in words else len(words)
    words[place:place] = ["--dry-run"] if words[0] in ("launch", "compare", "bench", "provision") else []
    done = run_cpuft(*words, settings=state)
    assert done.returncode == 0, done.stderr


def test_the_script_in_it_trains(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?init_process_group.*?)^```", README.read_text("utf-8"), re.DOTALL | re.M)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    done = run_cpuft("launch", "--np", "2", "--run-dir", "run", "--", "train.py", "--lr", "1e-4")
    assert done.returncode == 0, done.stderr
    said = [(tmp_path / f"run/logs/rank-{rank}.out").read_text() for rank in (0, 1)]
    assert [line.split(" loss ")[0] for line in said] == ["rank 0 of 2:", "rank 1 of 2:"]


def test_the_line_around_a_loop_of_ones_own(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.DOTALL | re.M)
    (text,) = (block for block in blocks if "cpuft.accelerate" in block)
    found: dict[str, Any] = {}
    exec(text, found)
    assert type(found["optimizer"]).__name__ == "FusedAdamW"


@pytest.mark.parametrize("script", sorted(set(re.findall(r"scripts/[a-z-]+", README.read_text(encoding="utf-8")))))
def test_every_script_is_there_and_can_be_run(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o111


def test_the_table_of_settings_is_made_from_the_code(request: pytest.FixtureRequest) -> None:
    shared, per_host = plan_settings(make_cluster((1, 1)), LaunchConfig(np=2, comm_cores=4), "gloo", {})
    rows = [f"| `{s.name}` | `{s.value}` | {s.reason} |" for s in shared + per_host[0] if "CPUFT" not in s.name]
    table = "\n".join(["", "| variable | value | why |", "| --- | --- | --- |", *rows, "", ""])
    text = README.read_text(encoding="utf-8")
    if request.config.getoption("--rewrite-golden"):
        README.write_text(TABLE.sub(lambda _: table, text), encoding="utf-8")
    found = TABLE.search(README.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == table

"""Exit code 75 means that --resume goes on, and the last line says how."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.config import LaunchConfig, ScriptConfig, TrainConfig
from cpuft.launch.failures import describe_end
from cpuft.rank.process import format_failure
from cpuft.rank.world import World
from cpuft.record import InterruptedLine, Line, format_line
from tests.records import make_record, make_steps

HEADER = replace(make_record(2).header, options=dict(vars(TrainConfig())))
STEPS = make_steps(3, [0.1])
INTERRUPTED = InterruptedLine(3, 9, "SIGUSR1")
ENDED = format_failure(World(0, 2, 0, 2), "a", 75)
WAITED = format_failure(World(1, 2, 0, 2), "b", 75, [0])
WATCHED = f"cpuft comm: rank 0: ended because rank 1 gave up\n{ENDED}"


def end(folder: Path, code: int, lines: tuple[Line, ...], errors: str, script: list[str]) -> tuple[int, str]:
    (folder / "logs").mkdir()
    (folder / "logs/rank-0.err").write_text(errors)
    record = folder / ("record.jsonl" if lines else "nothing")
    record.write_text("".join(format_line(line) + "\n" for line in lines))
    return describe_end(code, str(folder), ("a", "b"), LaunchConfig(cluster="lab"), script)


@pytest.mark.parametrize(
    "code, lines, errors, script, wanted, said",
    [
        (3, (HEADER,), "", [], 3, ""),
        (75, (HEADER, *STEPS, INTERRUPTED), ENDED, [], 75, "interrupted by SIGUSR1 after update 3 of 9: go on with {}"),
        (75, (HEADER, *STEPS), WAITED, [], 75, ""),
        (75, (HEADER, *STEPS), WATCHED, [], 75, ""),
        (75, (HEADER, *STEPS), "", [], 75, ""),
        (75, (), "", [], 1, ""),
        (75, (), ENDED, ["train.py", "a b"], 75, "ranks ended with 75: go on with {} -- train.py 'a b'"),
        (75, (), WAITED, ["train.py"], 75, ""),
    ],
)
def test_75_is_kept_for_what_can_be_resumed(
    tmp_path: Path, code: int, lines: tuple[Line, ...], errors: str, script: list[str], wanted: int, said: str
) -> None:
    line = said.format(f"cpuft launch --resume {tmp_path} --cluster=lab")
    assert end(tmp_path, code, lines, errors, script) == (wanted, line and f"cpuft: {line}")


def test_a_script_is_resumed_with_its_own_options(tmp_path: Path) -> None:
    end(tmp_path, 75, (), ENDED, ["train.py"])
    config, how = LaunchConfig(), ScriptConfig(independent=True)
    _, line = describe_end(75, str(tmp_path), ("a", "b"), config, ["train.py"], how)
    assert line.endswith(f"go on with cpuft launch --resume {tmp_path} --independent -- train.py")


def test_the_last_line_of_a_run_that_came_to_its_end_is_its_place(tmp_path: Path) -> None:
    assert end(tmp_path, 0, (HEADER, *STEPS), "", []) == (0, f"run: {tmp_path}")

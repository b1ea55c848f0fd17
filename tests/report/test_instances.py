"""The table of hosts to rent."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.report.instances import COLUMNS, TABLE, find_instance, parse_instances

HEAD = ",".join(COLUMNS)


def test_our_own_table_is_one() -> None:
    found = parse_instances(TABLE.read_text(), "instances.csv")
    assert found["c6i.16xlarge"].cores == 32
    assert not found["c6i.16xlarge"].amx
    assert found["c7i.8xlarge"].amx


def test_a_table_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(f"{HEAD}\nidle server,24,yes,1,0,2026\n")
    assert find_instance("idle server", str(path)).gbits_per_second == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 0: its head is not name,cores,"),
        ("a,b\n", "line 1: its head is not name,cores,"),
        (f"{HEAD}\nx,1,yes\n", "line 2: 3 columns, not 6"),
        (f"{HEAD}\nx,many,yes,1,1,2026\n", "line 2: invalid literal"),
        (f"{HEAD}\nx,0,yes,1,1,2026\n", "line 2: cores, rate and price must be positive"),
        (f"{HEAD}\nx,1,yes,nan,1,2026\n", "line 2: cores, rate and price must be positive"),
    ],
)
def test_a_broken_table_is_refused_by_line(text: str, said: str) -> None:
    with pytest.raises(CpuftError, match=said):
        parse_instances(text, "own.csv")


def test_an_unknown_name_is_answered_with_the_next_ones() -> None:
    with pytest.raises(CpuftError, match=r"--instance c6i.16xlrage is not a known type of instance: .*c6i.16xlarge"):
        find_instance("c6i.16xlrage")
    with pytest.raises(CpuftError, match="there is no file no/such, which --instances names"):
        find_instance("c6i.16xlarge", "no/such")

"""What scripts/test quick leaves out is found by what tests use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import run_cpuft


def _help() -> str:
    return run_cpuft("--help").stdout


def test_who_starts_something_is_real(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("real")
    assert _help().startswith("Usage: cpuft")


@pytest.mark.skipif(False, reason="asks for something")
def test_who_asks_for_something_is_real(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("real")


def test_a_unit_is_not(request: pytest.FixtureRequest) -> None:
    assert not request.node.get_closest_marker("real")


def test_what_the_users_shell_has_for_the_hub_is_nothing_to_tests() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/cli/test_mistakes.py",
        "-k",
        "lanch",
    ]
    shell = {**os.environ, "HF_HUB_OFFLINE": "1", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], env=shell, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout

"""What scripts/test quick leaves out is found by what tests use."""

from __future__ import annotations

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

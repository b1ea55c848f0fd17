"""Plans as shell scripts."""

from __future__ import annotations

import subprocess

import pytest

from cpuft.plans import Plan, Setting, Step, format_export, format_plan
from tests.conftest import Golden

AWKWARD = ["a 0", 'a"=0"', "a'; echo foo", "$HOME", "a\nb", "", "`id`", "-n", "ä", "\\"]


@pytest.mark.parametrize("value", AWKWARD)
def test_a_script_passes_every_value_on_as_it_is(value: str) -> None:
    step = Step(value, ("printf", "%s|%s", value, value), (Setting("X", value, value),))
    show = Step("show", ("bash", "-c", 'printf "%s" "$X"'), (Setting("X", value, value),))
    done = subprocess.run(
        ["bash"], input=format_plan(Plan(((step,), (show,)), (value,))), capture_output=True, text=True
    )
    assert done.stdout == f"{value}|{value}{value}"
    assert done.stderr == f"cpuft: {value}\ncpuft: show\n"


@pytest.mark.parametrize("value", AWKWARD)
def test_exports_survive_eval(value: str) -> None:
    script = 'eval "$(cat)"; printf "%s" "$X"'
    done = subprocess.run(
        ["bash", "-c", script], input=format_export(Setting("X", value, value)), capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == (value, "")


def test_a_failing_step_ends_the_script_with_its_exit_code() -> None:
    plan = Plan(((Step("fails", ("bash", "-c", "exit 7")),), (Step("never", ("echo", "reached")),)))
    done = subprocess.run(["bash"], input=format_plan(plan), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "")


def test_script(golden: Golden) -> None:
    prepare = Step("make room", ("mkdir", "-p", "/run/logs"))
    sides = tuple(
        Step(f"greet {host}", ("echo", "hello there"), (Setting("A", "1 2", "two"),), host) for host in ("a", "b")
    )
    command_prefixes: dict[str, tuple[str, ...]] = {host: ("ssh", "-F", "my config", host) for host in ("a", "b")}
    golden("plan.sh", format_plan(Plan(((prepare,), sides), ("made for a test",), command_prefixes)))

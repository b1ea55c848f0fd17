import os
import threading
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.plan import Plan, Step
from cpuft.provision.reconcile import lock, make_runner, plan_file, reconcile, run_stages

DONE = Answer(0, "")
STEP = Step("make it", ("true",))


def quiet(text: str) -> None:
    """Progress that no test looks at."""


def test_it_ends_when_nothing_is_missing() -> None:
    done: list[str] = []

    def plan(facts: int) -> Plan:
        return Plan(((STEP,),)) if facts == 0 else Plan()

    def run(step: Step) -> Answer:
        done.append(step.why)
        return DONE

    assert reconcile(lambda: len(done), plan, run, quiet) == 1


def test_facts_at_hand_are_not_gathered_again() -> None:
    def gather() -> int:
        raise AssertionError

    assert reconcile(gather, lambda facts: Plan(), lambda step: DONE, quiet, found=7) == 7


def test_the_same_plan_twice_is_stuck_and_says_on_what() -> None:
    with pytest.raises(CpuftError, match="changed nothing: make it: look at"):
        reconcile(lambda: 0, lambda facts: Plan(((STEP,),)), lambda step: DONE, quiet)


def test_every_step_that_failed_is_named_with_its_last_words() -> None:
    steps = tuple(Step("install", ("false",), host=host) for host in ("a", "b", "c"))

    def run(step: Step) -> Answer:
        if step.host == "c":
            raise CpuftError("host c is off")
        return Answer(1, "first\n", "no space left\n") if step.host == "a" else DONE

    with pytest.raises(CpuftError) as caught:
        run_stages(Plan((steps,)), run, quiet)
    assert str(caught.value) == (
        "a: install: failed (first | no space left); c: install: failed (host c is off): "
        "correct that and run the same command again"
    )


@pytest.mark.parametrize("text", ["a 0", 'a"=0"', "a'; echo foo", "$HOME", "two\nlines\n", "EOF\n"])
def test_a_file_is_written_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "new folder" / "it's here"
    assert make_runner()(plan_file(str(path), text, "write", mode="600")) == DONE
    assert path.read_text() == text
    assert path.stat().st_mode & 0o777 == 0o600


def test_only_one_works_on_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "local.lock"
    entered = threading.Event()

    def second() -> None:
        with lock(path):
            entered.set()

    with lock(path):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.3)
        with pytest.raises(CpuftError, match=r"worked on local for 0 s: wait for its end"), lock(path, seconds=0.0):
            pass
    thread.join(5)
    assert entered.is_set()
    assert not path.exists()


def test_writing_beside_a_file_follows_no_link(tmp_path: Path) -> None:
    path, other = tmp_path / "folder" / "file", tmp_path / "other"
    other.write_text("mine")
    path.parent.mkdir()
    path.with_name("file.new").symlink_to(other)
    assert make_runner()(plan_file(str(path), "text", "why")).exit_code == 0
    assert (path.read_text(), other.read_text(), os.listdir(path.parent)) == ("text", "mine", ["file"])

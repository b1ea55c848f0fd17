"""Gives random input to parsers and verbs, and keeps the shortest input of each fault."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
from hypothesis import strategies as st

from cpuft.cli import main
from cpuft.errors import CpuftError
from tests.fuzz.parsers import Parser
from tests.fuzz.sandbox import ROOT, reset, snapshot_near
from tests.fuzz.values import as_bytes
from tests.fuzz.verbs import FILES, Case, base_environ

T = TypeVar("T")
_SECONDS = 60
"""An input that takes longer hangs."""

_IS_YAML = "import sys, yaml; list(yaml.safe_load_all(sys.stdin.buffer))"
_PACKAGE = f"{os.sep}cpuft{os.sep}"


Fault = tuple[str, str]
"""Its kind, by which equal ones are counted together, and what was said; empty for none."""

NONE: Fault = ("", "")


class TooLongError(BaseException):
    """An input took longer than `_SECONDS`. No handler of ours may catch it."""


@dataclass
class Faults:
    """What was found: of each kind how often, what was said, and one input, without what it does not need."""

    inputs: int = 0
    found: dict[str, tuple[int, str, object]] = field(default_factory=dict)

    def note(self, value: T, check: Callable[[T], Fault]) -> None:
        """Check an input, and keep the first of each kind of fault."""
        kind, said = check(value)
        self.inputs += 1
        if kind in self.found:
            times, said, first = self.found[kind]
            self.found[kind] = (times + 1, said, first)
        elif kind:
            self.found[kind] = (1, said, shorten(value, lambda other: check(other)[0] == kind))


def shorten(value: Any, is_alike: Callable[[Any], bool]) -> Any:
    """The same input without words, files, variables or parts of a text that the fault does not need."""
    if isinstance(value, Case):
        for at in reversed(range(value.fixed, len(value.words))):
            value = _better(replace(value, words=value.words[:at] + value.words[at + 1 :]), value, is_alike)
        for name in value.files:
            value = _better(replace(value, files={k: v for k, v in value.files.items() if k != name}), value, is_alike)
        for name in value.environ:
            value = _better(
                replace(value, environ={k: v for k, v in value.environ.items() if k != name}), value, is_alike
            )
        return value
    size = len(value) // 2
    while size:
        for at in reversed(range(0, len(value), size)):
            value = _better(value[:at] + value[at + size :], value, is_alike)
        size //= 4
    return value


def _better(shorter: T, value: T, is_alike: Callable[[T], bool]) -> T:
    return shorter if is_alike(shorter) else value


def fuzz(strategy: st.SearchStrategy[T], check: Callable[[T], Fault], inputs: int, seed: int, faults: Faults) -> None:
    """Draw `inputs` values; `check` says what is wrong with what became of one."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=inputs,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def one(value: T) -> None:
        faults.note(value, check)

    one()


def check_parser(parser: Parser, text: str) -> Fault:
    """A text is accepted, or refused in one line."""
    try:
        with _time_limit():
            parser.call(text)
    except BaseException as error:
        refused = isinstance(error, (CpuftError, *parser.refusals))
        return NONE if refused and str(error).isprintable() else _place(error)
    return NONE


def check_verb(case: Case, outside: dict[str, str]) -> Fault:
    """A command line ends with exit code 0 or 1, or with 2 and one line; outside its room nothing has changed."""
    reset()
    for name, text in ({name: good for name, (good, _) in FILES.items()} | case.files).items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(as_bytes(text))
    with _environ(base_environ() | case.environ), _capture() as (output, errors):
        fault = _run(case, output, errors)
    now = snapshot_near()
    changed = sorted(name for name in now.keys() | outside.keys() if now.get(name) != outside.get(name))
    if changed:
        _undo(changed, outside, now)
        return "changed outside of its room", ", ".join(changed[:5])
    return fault


def _run(case: Case, output: io.BytesIO, errors: io.BytesIO) -> Fault:
    try:
        with _time_limit():
            main(list(case.words))
    except SystemExit as end:
        sys.stdout.flush()
        return _judge(case, end.code, output.getvalue(), errors.getvalue().decode(errors="backslashreplace"))
    except BaseException as error:
        return _place(error)


def _judge(case: Case, code: Any, output: bytes, errors: str) -> Fault:
    verb = " ".join(case.words[:2])
    refused = errors.rsplit("cpuft: error: ", 1)[-1].removesuffix("\n")
    if code == 2 and not ("cpuft: error: " in errors and refused.isprintable()):
        return f"{verb}: not refused in one line", errors[-300:]
    if code not in (0, 1, 2):
        return f"{verb}: exit code {code}", errors[-300:]
    if code == 0 and ("--dry-run" in case.words or case.words[0] == "env"):
        # Plans are scripts, but those of containers; a policy is JSON. Settings set variables and do nothing else.
        command = ["bash", "-n"] if "--dry-run" in case.words else ["env", "-i", "bash", "-e"]
        is_yaml = verb in ("submit kubernetes", "submit trainjob", "submit batch") or "--policy" in case.words
        command = [sys.executable, "-c", _IS_YAML] if is_yaml else command
        script = subprocess.run(command, input=output, capture_output=True, check=False, env={"PATH": "/usr/bin:/bin"})
        wrong = script.returncode or script.stdout or script.stderr
        return (f"{verb}: prints no script", repr(script)[-300:]) if wrong else NONE
    return NONE


def _place(error: BaseException) -> Fault:
    """The exception's name and the line of cpuft from which it came, and what it says."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _PACKAGE in frame.filename and "site-packages" not in frame.filename]
    last = (own or list(frames))[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno} {last.name}", str(error)[:300]


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        last = [traceback.extract_stack(one)[-1] for one in sys._current_frames().values()]
        raise TooLongError(", ".join(f"{one.filename}:{one.lineno}" for one in last))

    signal.signal(signal.SIGALRM, end)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


@contextlib.contextmanager
def _environ(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _capture() -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    """This process's streams, as `cpuft.terminal` makes them."""
    output, errors = io.BytesIO(), io.BytesIO()
    before = sys.stdin, sys.stdout, sys.stderr
    sys.stdin = io.StringIO()
    sys.stdout = io.TextIOWrapper(output, encoding="utf-8", errors="backslashreplace", write_through=True)
    sys.stderr = io.TextIOWrapper(errors, encoding="utf-8", errors="backslashreplace", write_through=True)
    try:
        yield output, errors
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


def _undo(changed: list[str], outside: dict[str, str], now: dict[str, str]) -> None:
    """What appeared is taken away, so that the next input is not blamed for it; what is gone stays gone."""
    for name in changed:
        path = Path(name)
        if name not in outside and path.exists():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    outside.clear()
    outside.update(snapshot_near())

"""Processes that SIGKILL ends before or after each of their calls: what they leave is found and continued with."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest

from cpuft.provision.aws.client import AwsClient
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.aws.provider import Aws, Services
from tests.provision.aws.bottle.bottle import NOTHING_LEFT, Bottle, open_bottle
from tests.provision.aws.region import NAME, REGION, is_mutating, refuse, say, watch

pytestmark = pytest.mark.real
NODES = 2
VERBS = {"make": 6, "refill": 2, "extend": 1, "close": 1, "down": 4}
"""Number of changing calls of each verb."""
MOMENTS = [(verb, number, when) for verb in VERBS for number in range(VERBS[verb]) for when in ("before", "after")]


class Launcher:
    """A machine that runs `cpuft provision`, with a clock that only its own sleeping moves."""

    def __init__(self, bottle: Bottle) -> None:
        self.bottle = bottle
        self.start, self.seconds = time.time(), 0.0
        self.calls, self.killed_at = 0, (-1, "")
        self.cloud = AwsClient(REGION, self._sleep)
        watch(self.cloud, self._hook)

    def _hook(self, when: str, method: str, parameters: Mapping[str, Any]) -> None:
        if is_mutating(method, parameters):
            if (self.calls, when) == self.killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.calls += when == "after"

    def _sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def _now(self) -> float:
        return self.start + self.seconds

    def _aws(self) -> Aws:
        services = Services(lambda name: self.cloud, self._sleep, self._now, lambda: "203.0.113.7", uses_ssh=False)
        config = AwsConfig(name=NAME, nodes=NODES, region=REGION, yes=True)
        return Aws(config, {"CPUFT_STATE": str(self.bottle.folder / "state")}, services=services)

    def make(self) -> None:
        self._aws().make(say, refuse)

    def refill(self) -> None:
        """Make it again when one of its instances has ended."""
        self.bottle.ask("terminate", self.bottle.live()[0]["id"])
        self.make()

    def extend(self) -> None:
        self._aws().extend("5h", say)

    def down(self) -> None:
        self._aws().down(say)

    def prepare(self, verb: str) -> Callable[[], None]:
        """What there must be before; the verb itself."""
        if verb != "make":
            self.make()
            self.bottle.ask("litter")
        if verb in ("refill", "extend"):
            self.make()
        verbs = {"make": self.make, "refill": self.refill, "extend": self.extend, "close": self.make, "down": self.down}
        return verbs[verb]

    def die(self, verb: str, number: int, when: str) -> None:
        """In a process that kills itself before or after its mutating call of this number."""
        do = self.prepare(verb)
        child = os.fork()
        if not child:
            self.calls, self.killed_at = 0, (number, when)
            with suppress(BaseException):
                do()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """A process whose boto3 clients are inherited by its forks, because clients are slow to make. No real instances."""
    with open_bottle(tmp_path_factory.mktemp("endpoint"), hosts=False) as bottle, pytest.MonkeyPatch.context() as patch:
        for name, value in bottle.environ.items():
            patch.setenv(name, value)
        yield Launcher(bottle)


@pytest.fixture
def launcher(alone: Launcher) -> Iterator[Launcher]:
    yield alone
    alone.down()
    assert alone.bottle.ask("left") == NOTHING_LEFT
    alone.bottle.ask("forget")


def choose(*quick: tuple[str, int, str]) -> list[Any]:
    """Return all moments; those that are not in `quick` are tried by the long tests only."""
    return [pytest.param(*one, marks=() if one in quick else pytest.mark.proof) for one in MOMENTS]


@pytest.mark.parametrize("verb", ["make", *(pytest.param(one, marks=pytest.mark.proof) for one in [*VERBS][1:])])
def test_the_list_of_moments_is_complete(launcher: Launcher, verb: str) -> None:
    do = launcher.prepare(verb)
    launcher.calls = 0
    do()
    assert launcher.calls == VERBS[verb]


@pytest.mark.parametrize(("verb", "number", "when"), choose(("make", 5, "before"), ("make", 5, "after")))
def test_down_finds_everything_that_a_killed_process_left(
    launcher: Launcher, verb: str, number: int, when: str
) -> None:
    launcher.die(verb, number, when)
    launcher.down()
    assert launcher.bottle.ask("left") == NOTHING_LEFT
    launcher.make()
    assert len(launcher.bottle.live()) == NODES


@pytest.mark.parametrize(("verb", "number", "when"), choose(("make", 5, "after"), ("refill", 1, "after")))
def test_make_continues_what_a_killed_process_began(launcher: Launcher, verb: str, number: int, when: str) -> None:
    launcher.die(verb, number, when)
    launcher.make()
    assert len(launcher.bottle.live()) == NODES
    launcher.bottle.ask("calls")
    launcher.make()
    assert launcher.bottle.ask("calls") == []

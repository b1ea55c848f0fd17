"""What waits for gloo, on operations that fail."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch.distributed as dist

from cpuft.comm.backends.gloo import GlooWork


class Failing(dist.Work):
    """An operation that fails, and would wait for ever if it were asked again."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def wait(self, *timeout: Any) -> bool:
        """Fail."""
        self.asked += 1
        raise RuntimeError("connection closed by peer")


class Group:
    """Counts how operations end."""

    def __init__(self) -> None:
        self.ended: list[object] = []

    def end(self, operation: object, error: object = None) -> None:
        """Note the end of an operation."""
        self.ended.append(error)


def test_a_second_wait_for_a_failed_operation_raises_its_error_and_does_not_ask_gloo_again() -> None:
    group, failing = Group(), Failing()
    work = GlooWork(cast(Any, group), [failing], cast(Any, object))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed by peer"):
            work.wait()
    assert (failing.asked, len(group.ended)) == (1, 1)

"""What a rank does with a function; tests/test_api.py starts real ranks."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable

import pytest

from cpuft.errors import CpuftError
from cpuft.rank.call import CallHeader, python_version
from cpuft.rank.world import World
from cpuft.train.call_function import load_call, pickle_result

HEADER = CallHeader("ab" * 32, python_version())


def test_a_missing_module_is_named() -> None:
    pickled = b"cnone_such_module\nfunction\n."
    with pytest.raises(CpuftError, match=r"No module named 'none_such_module'.*: install that module on all hosts"):
        load_call(pickled)


def test_a_call_comes_as_it_was() -> None:
    assert load_call(pickle.dumps((len, ("abc",), {}))) == (len, ("abc",), {})


@pytest.mark.parametrize("make", [threading.Lock, lambda: (number for number in range(3))])
def test_a_result_that_cannot_be_pickled_is_named(make: Callable[[], object]) -> None:
    with pytest.raises(CpuftError, match=r"rank 1 returned a (lock|generator) that cannot be pickled"):
        pickle_result(HEADER, World(1, 2, 1, 2), make())
    assert len(pickle_result(HEADER, World(1, 2, 1, 2), 3)) > 32

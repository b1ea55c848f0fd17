"""Fixtures: a simulated AWS region for each test, or a region with real instances for each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.provision.aws.bottle.bottle import Bottle, open_bottle, write_machine_wheels
from tests.provision.aws.region import Region, open_region


@pytest.fixture
def region() -> Iterator[Region]:
    with open_region() as opened:
        yield opened


@pytest.fixture(scope="module")
def bottle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bottle]:
    """A region with real instances (needs root). The folder `wheels` has what they train with."""
    with open_bottle(tmp_path_factory.mktemp("bottle")) as opened:
        write_machine_wheels(opened.folder / "wheels")
        yield opened

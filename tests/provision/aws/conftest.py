"""A region for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.provision.aws.region import Region, open_region


@pytest.fixture
def region() -> Iterator[Region]:
    with open_region() as opened:
        yield opened

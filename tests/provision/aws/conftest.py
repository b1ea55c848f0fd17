"""Fixtures: a simulated AWS region for each test, or a region with real instances for each file."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.provision.aws.bottle.bottle import Bottle, open_bottle, write_machine_wheels
from tests.provision.aws.region import Region, open_region


@pytest.fixture(scope="session", autouse=True)
def _models_are_read_once() -> Iterator[None]:
    """Each session of botocore decodes the descriptions of AWS's services again, which takes half of a test's time."""
    from botocore.loaders import JSONFileLoader

    read = functools.cache(JSONFileLoader().load_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", lambda self, path: read(path))
        yield


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

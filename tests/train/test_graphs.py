"""The packages that graphs need."""

from __future__ import annotations

import pytest

from cpuft.config.export import EXPORT_FORMATS
from cpuft.errors import CpuftError
from cpuft.train.graphs import GRAPHS, check_packages


def test_every_format_has_a_graph() -> None:
    assert tuple(GRAPHS) == EXPORT_FORMATS


@pytest.mark.parametrize("format", EXPORT_FORMATS)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_packages(format)
    package = GRAPHS[format].packages[-1]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else name)
    with pytest.raises(CpuftError, match=rf"--format {format} needs {package}: .*pip install .*\[{format}\]"):
        check_packages(format)

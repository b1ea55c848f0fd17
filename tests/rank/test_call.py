"""Files with a function and its results are loaded only if this call wrote them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.rank.call import (
    CALL_FILE,
    CALL_FOLDER,
    CallHeader,
    compute_digest,
    pack_call,
    python_version,
    read_call,
    read_result,
    sign_result,
    write_result,
)

KEY = "ab" * 32


def write_call(folder: Path, header: CallHeader) -> str:
    """Write a call into the folder of a run, and return its digest."""
    content = pack_call(header, b"a pickle\nwith lines")
    (folder / CALL_FOLDER).mkdir(mode=0o700)
    (folder / CALL_FILE).write_bytes(content)
    return compute_digest(content)


def test_a_rank_gets_the_call_that_was_planned(tmp_path: Path) -> None:
    header = CallHeader(KEY, python_version(), ("/a", "/b"))
    digest = write_call(tmp_path, header)
    assert read_call(str(tmp_path), digest) == (header, b"a pickle\nwith lines")


def test_a_call_that_somebody_changed_is_not_loaded(tmp_path: Path) -> None:
    digest = write_call(tmp_path, CallHeader(KEY, python_version()))
    with (tmp_path / CALL_FILE).open("ab") as file:
        file.write(b"x")
    with pytest.raises(CpuftError, match="is not the function that was sent"):
        read_call(str(tmp_path), digest)


def test_a_call_of_another_python_names_both(tmp_path: Path) -> None:
    digest = write_call(tmp_path, CallHeader(KEY, "3.1"))
    with pytest.raises(CpuftError, match=r"pickled by Python 3\.1, and this host has Python 3\."):
        read_call(str(tmp_path), digest)


def test_a_link_in_place_of_the_call_is_not_followed(tmp_path: Path) -> None:
    digest = write_call(tmp_path, CallHeader(KEY, python_version()))
    (tmp_path / CALL_FILE).rename(tmp_path / "elsewhere")
    (tmp_path / CALL_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CpuftError, match="cannot be read"):
        read_call(str(tmp_path), digest)


def test_only_this_user_can_read_a_result(tmp_path: Path) -> None:
    write_result(str(tmp_path), 1, sign_result(KEY, 1, b"result"))
    assert (tmp_path / CALL_FOLDER / "result-1").stat().st_mode & 0o777 == 0o600
    assert read_result(str(tmp_path), 1, KEY) == b"result"


@pytest.mark.parametrize("key, rank, cut", [("cd" * 32, 1, 0), (KEY, 0, 0), (KEY, 1, 1), (KEY, 1, 40)])
def test_a_result_with_another_signature_is_not_loaded(tmp_path: Path, key: str, rank: int, cut: int) -> None:
    signed = sign_result(key, rank, b"result")
    write_result(str(tmp_path), 1, signed[: len(signed) - cut])
    with pytest.raises(CpuftError, match="was not written by rank 1 of this run, so it is not loaded"):
        read_result(str(tmp_path), 1, KEY)


class Planted:
    """An object whose pickle makes a folder when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("planted",)


def test_a_planted_result_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / CALL_FOLDER).mkdir()
    (tmp_path / CALL_FOLDER / "result-0").write_bytes(bytes(32) + pickle.dumps(Planted()))
    with pytest.raises(CpuftError, match="is not loaded"):
        pickle.loads(read_result(str(tmp_path), 0, KEY))
    assert not Path("planted").exists()

"""Disks that are full, small or read-only."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from cpuft.errors import explain_os_error
from tests.conftest import run_cpuft, run_shell
from tests.provision.simulated import needs_root
from tests.train.tiny import save_tiny

DEMO = "--task=demo --max-train-samples=64 --max-steps=2"


@pytest.mark.parametrize(
    "error, said",
    [
        (OSError(errno.EFBIG, "large"), "a file cannot be used (large): see to its disk and its mode, or give an"),
        (OSError(errno.EROFS, "read-only", "a"), "a cannot be used (read-only): see to"),
        (OSError(errno.EACCES, "denied", "a", None, "b"), "b cannot be used (denied): see to"),
        (OSError(errno.ESRCH, "no such process"), ""),
    ],
)
def test_what_is_said_of_a_disk(error: OSError, said: str) -> None:
    explained = explain_os_error(error)
    assert str(explained or "").startswith(said)
    assert bool(explained) == bool(said)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_is_no_bad_input(number: int) -> None:
    found = explain_os_error(OSError(number, "full", "run/record.jsonl"))
    assert found is not None
    assert found.exit_code == 74
    said = f"no space is left on the disk of run/record.jsonl on host {socket.gethostname()}: make room there"
    assert str(found).startswith(said)


@needs_root
def test_a_record_that_finds_no_room_ends_the_rank_with_74() -> None:
    options = "--task=demo --max-train-samples=16 --max-steps=2 --max-length=16 --save-model=False --checkpoint-every=0"
    full = "mkdir run && mount -t tmpfs -o size=4k none run && head -c 4096 /dev/zero > run/filler 2>/dev/null"
    done = run_shell(f"{full}; python -m cpuft.train --run-dir=run {options} --model={save_tiny(Path('tiny'))}")
    assert done.returncode == 74
    said = f"cpuft: error: no space is left on the disk of run/record.jsonl on host {socket.gethostname()}: make room"
    assert done.stderr.splitlines()[-1].startswith(said)


@pytest.mark.parametrize(
    "start",
    [
        f"cpuft launch --run-dir run {DEMO}",
        "python -m cpuft.train --run-dir=run --task=text --train-file=texts.txt",
    ],
)
def test_a_full_cache_is_named(start: str, tmp_path: Path) -> None:
    Path("texts.txt").write_text("a line of several words\n" * 999)
    # Python would leave compiled modules that are cut off.
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_shell(f"ulimit -f 8; {start}", **own)
    said = (
        f"cpuft: error: the prepared data cannot be written to the cache folder {tmp_path}/cache/cpuft "
        "(File too large): free space there"
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"{said}, or set XDG_CACHE_HOME to another folder"
    assert not Path("run").exists()
    assert [one.name for one in (tmp_path / "cache" / "cpuft").iterdir() if one.name != "going"] == []


@needs_root
def test_a_home_that_cannot_be_written_leaves_the_cache_to_a_folder_of_the_user_in_var_tmp(tmp_path: Path) -> None:
    home = "mkdir home && mount -t tmpfs -o ro none home && mount -t tmpfs none /var/tmp"
    show = "import os; from cpuft.files import cache_folder; print(cache_folder(os.environ))"
    done = run_shell(f"{home}; unset XDG_CACHE_HOME; HOME=$PWD/home python -c '{show}' && stat -c %a /var/tmp/cpuft*")
    assert done.stdout.split() == [f"/var/tmp/cpuft-cache-{os.geteuid()}", "700"], done.stderr


@pytest.mark.parametrize("home", ["~", "none"])
def test_a_cache_is_never_made_in_the_working_folder(home: str, tmp_path: Path) -> None:
    done = run_cpuft("launch", "--run-dir", "run", settings={"XDG_CACHE_HOME": home})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("set XDG_CACHE_HOME to a folder of your own")
    assert list(tmp_path.iterdir()) == []


FILLS = """
import os
with open(os.environ["CPUFT_RUN_DIR"] + "/../filler", "wb", buffering=0) as file:
    try:
        while file.write(bytes(1 << 20)):
            pass
    except OSError:
        print("x" * 1_000_000, flush=True)
"""


@needs_root
def test_a_disk_that_fills_up_while_ranks_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "fills.py").write_text(FILLS)
    (tmp_path / "small").mkdir()
    script = "mount -t tmpfs -o size=300m none small && cpuft launch --run-dir small/run -- fills.py"
    done = run_shell(script)
    assert done.returncode == 74
    said = f"cpuft: error: no space is left on the disk of {tmp_path}/small/run on host {socket.gethostname()}: make"
    assert done.stderr.splitlines()[-1].startswith(said)


@needs_root
def test_a_place_for_clusters_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_shell("cpuft provision local --name q", CPUFT_STATE=str(tmp_path / "file" / "state"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("cpuft: error: ")
    assert f"{tmp_path}/file" in done.stderr
    assert "Traceback" not in done.stderr

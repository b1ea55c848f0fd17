"""The files in a run's folder through which a function of the user's goes to the ranks, and its results come back.

A pickle can run any code when it is loaded. So a rank loads a call only if its file has the SHA-256 that the plan
gives, and the launcher loads a result only if its file is signed (HMAC, RFC 2104) with the key in that file, which only
this user can read. Nothing here loads a pickle.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.files import open_regular, write_atomically
from cpuft.serialization import load, parse_json
from cpuft.transfer import NO_LINK

CALL_FOLDER = "function"
"""Folder in the folder of a run; only this user can open it."""
CALL_FILE = f"{CALL_FOLDER}/call"
"""The call, in the folder of a run: a line of JSON (`CallHeader`), and the pickle of (function, args, kwargs)."""


@dataclass(frozen=True)
class CallHeader:
    """What a rank needs before it loads a call."""

    key: str
    """Random key that signs the results, in hexadecimal digits."""
    python: str
    """Version of the Python that wrote the pickle, such as "3.11"; others may not read it."""
    path: tuple[str, ...] = ()
    """Folders from which the caller imports modules; a rank uses those that it has."""


def python_version() -> str:
    """Return the version of this Python that decides whether it can read a pickled function, such as "3.11"."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def pack_call(header: CallHeader, pickled: bytes) -> bytes:
    """Return the content of a call's file: the header as a line of JSON, then the pickle."""
    return json.dumps(asdict(header)).encode() + b"\n" + pickled


def compute_digest(content: bytes) -> str:
    """Return the SHA-256 of the content of a call's file, in 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def read_call(run_dir: str, digest: str) -> tuple[CallHeader, bytes]:
    """Return header and pickle, not loaded, of a run's call (RUN_DIR/function/call). Raises CpuftError: the file cannot
    be read, is another user's or has not the SHA-256 `digest`, or another version of Python wrote the pickle.
    """
    path = Path(run_dir, CALL_FILE)
    content = _read_own(path)
    if not hmac.compare_digest(compute_digest(content), digest):
        raise CpuftError(f"{path} is not the function that was sent: somebody has changed it; start the run again")
    line, _, pickled = content.partition(b"\n")
    header = load(CallHeader, parse_json(line.decode()), str(path))
    if header.python != python_version():
        raise CpuftError(
            f"the function was pickled by Python {header.python}, and this host has Python {python_version()}, which "
            f"cannot read it: use the same version on all hosts"
        )
    return header, pickled


def write_result(run_dir: str, rank: int, signed: bytes) -> None:
    """Write what `sign_result` returned for a rank to RUN_DIR/function/result-RANK, readable by this user only."""
    path = _result_path(run_dir, rank)
    with write_atomically(path) as beside:
        beside.chmod(0o600)
        beside.write_bytes(signed)


def sign_result(key: str, rank: int, pickled: bytes) -> bytes:
    """Return the pickle of a rank's result after its 32-byte signature by `key` (hexadecimal), for this rank only."""
    return _sign(key, rank, pickled) + pickled


def read_result(run_dir: str, rank: int, key: str) -> bytes:
    """Return the pickle of a rank's result, not loaded; CpuftError if there is none that `key` signed for this rank."""
    path = _result_path(run_dir, rank)
    signed = _read_own(path)
    signature, pickled = signed[:32], signed[32:]
    if not hmac.compare_digest(signature, _sign(key, rank, pickled)):
        raise CpuftError(f"{path} was not written by rank {rank} of this run, so it is not loaded: start the run again")
    return pickled


def _sign(key: str, rank: int, pickled: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(key), f"{rank}\n".encode() + pickled, "sha256")


def _result_path(run_dir: str, rank: int) -> Path:
    return Path(run_dir, CALL_FOLDER, f"result-{rank}")


def _read_own(path: Path) -> bytes:
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY | NO_LINK), "rb") as file:
            if sys.platform != "win32" and os.fstat(file.fileno()).st_uid != os.geteuid():
                raise CpuftError(f"{path} belongs to another user, so it is not loaded: start the run again")
            return file.read()
    except OSError as error:
        raise CpuftError(f"{path} cannot be read ({error.strerror}): start the run again") from None

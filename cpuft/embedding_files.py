"""The file of embeddings that `cpuft predict` writes."""

from __future__ import annotations

from pathlib import Path

from cpuft.config.predict import PredictConfig
from cpuft.errors import CpuftError
from cpuft.files import refuse_input, refuse_special

_EMBEDDING_FILES = {".npy": b"\x93NUMPY", ".parquet": b"PAR1"}
"""Endings of the names of files of embeddings, and the first bytes of such files."""


def name_embeddings(request: PredictConfig) -> Path:
    """Return the path of --output, or of embeddings.npy in the run's folder. Raises CpuftError: neither is given, the
    ending is not .npy or .parquet (with --id-column not .parquet), it is --file, or a file is there, unless it is empty
    or, with --overwrite, has embeddings.
    """
    if not request.output and not request.run:
        raise CpuftError("--model needs --output: name a file for the embeddings that ends in .npy or .parquet")
    path = Path(request.output or Path(request.run, "embeddings.npy"))
    if path.suffix not in _EMBEDDING_FILES:
        raise CpuftError(f"{path} has the ending {path.suffix!r:.20}: give an --output that ends in .npy or .parquet")
    if request.id_column and path.suffix != ".parquet":
        raise CpuftError(f"{path} has no room for the ids of --id-column: give an --output that ends in .parquet")
    refuse_special(path)
    refuse_input(path, request.file)
    try:
        with path.open("rb") as file:
            begin = file.read(6)
    except FileNotFoundError:
        return path
    except OSError as error:
        raise CpuftError(f"{path} cannot be written ({error.strerror}): give another --output") from None
    if begin and not begin.startswith(_EMBEDDING_FILES[path.suffix]):
        raise CpuftError(f"{path} exists and holds no embeddings: give another --output")
    if begin and not request.overwrite:
        raise CpuftError(f"{path} exists: give another --output, or replace the file with --overwrite")
    return path

"""Embeddings of the texts of a file: `python -m cpuft.train.write_embeddings --file=...`, started by `cpuft predict`.

Texts are read, tokenised, embedded and written in windows of some thousands, so that neither the texts nor the
embeddings have to fit into memory. Importing this module imports no torch: with --np, the processes that compute are
pinned to their cores before they import it.
"""

from __future__ import annotations

import abc
import itertools
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cpuft.config import PredictConfig, name_embeddings, parse_arguments
from cpuft.errors import CpuftError, counted, install_command, suggest_names
from cpuft.files import write_atomically
from cpuft.train.data.tables import Table, find_column, read_tables
from cpuft.train.embedding_form import EmbeddingForm, find_embedding_model, read_form
from cpuft.train.startup import resume_garbage_collection, run_as_process

if TYPE_CHECKING:
    from cpuft.train.embedding import Embedder

_WINDOW_TEXTS, _TEXT_CHARACTERS = 8192, 2048
"""Most texts of a window, and about the most characters of its texts on average. Texts of similar length in a window
are computed together."""
_USUAL_COLUMNS = ("text", "sentence", "document", "query", "question")
_PROGRESS_SECONDS = 10.0
_END_SECONDS = 10.0
"""Time that a computing process has to end after its last window, before it is killed."""
_PROMPT_NAME = re.compile(r"\w+", re.ASCII)
_NPY_HEADER_BYTES = 128
"""Size of the header of a .npy file here: it has room for any number of rows, which is known at the end only."""


@dataclass(frozen=True)
class Window:
    """Some consecutive rows of the file."""

    texts: list[str]
    ids: list[str]
    """Their ids; empty without --id-column."""


class EmbeddingWriter(abc.ABC):
    """Writes a file of embeddings, some rows at a time."""

    def __init__(self, path: Path, dimensions: int) -> None:
        """`path`: an empty file."""
        self.path, self.dimensions = path, dimensions
        self.rows = 0
        """Number of embeddings that have been written."""

    @abc.abstractmethod
    def write(self, embeddings: NDArray[np.float32], ids: Sequence[str]) -> None:
        """Append embeddings, shape (texts, dimensions). `ids`: those of the texts, or empty."""

    @abc.abstractmethod
    def close(self) -> None:
        """Complete the file."""


class NpyWriter(EmbeddingWriter):
    """Writes an array of NumPy, fp32, shape (texts, dimensions). It has no ids: rows are in the order of the texts."""

    def __init__(self, path: Path, dimensions: int) -> None:
        """See `EmbeddingWriter`."""
        super().__init__(path, dimensions)
        self._file = path.open("r+b")
        self._file.write(make_npy_header(0, dimensions))

    def write(self, embeddings: NDArray[np.float32], ids: Sequence[str]) -> None:
        """See `EmbeddingWriter`."""
        self._file.write(np.ascontiguousarray(embeddings, "<f4").tobytes())
        self.rows += len(embeddings)

    def close(self) -> None:
        """See `EmbeddingWriter`."""
        with self._file:
            self._file.seek(0)
            self._file.write(make_npy_header(self.rows, self.dimensions))


def make_npy_header(rows: int, columns: int) -> bytes:
    """Return the header of a .npy file, version 1.0, for an fp32 array: 128 bytes for any number of rows."""
    text = repr({"descr": "<f4", "fortran_order": False, "shape": (rows, columns)}).encode()
    size = _NPY_HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + text.ljust(size - 1) + b"\n"


class ParquetWriter(EmbeddingWriter):
    """Writes a Parquet file with the columns id and embedding (a list of fp32 numbers).

    The ids are texts, or without --id-column the numbers of the rows, from 0.
    """

    def __init__(self, path: Path, dimensions: int, has_ids: bool) -> None:
        """See `EmbeddingWriter`. `has_ids`: whether `write` gets ids."""
        super().__init__(path, dimensions)
        import pyarrow
        from pyarrow import parquet

        kind = pyarrow.string() if has_ids else pyarrow.int64()
        self._has_ids = has_ids
        self._schema = pyarrow.schema({"id": kind, "embedding": pyarrow.list_(pyarrow.float32(), dimensions)})
        self._writer = parquet.ParquetWriter(path, self._schema)

    def write(self, embeddings: NDArray[np.float32], ids: Sequence[str]) -> None:
        """See `EmbeddingWriter`."""
        import pyarrow

        names: Any = list(ids) if self._has_ids else np.arange(self.rows, self.rows + len(embeddings))
        vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(embeddings.ravel()), self.dimensions)
        kind = self._schema.field("id").type
        self._writer.write_table(pyarrow.Table.from_arrays([pyarrow.array(names, kind), vectors], schema=self._schema))
        self.rows += len(embeddings)

    def close(self) -> None:
        """See `EmbeddingWriter`."""
        self._writer.close()


def name_output(request: PredictConfig) -> Path:
    """Return the file to write, as `name_embeddings` does.

    Raises CpuftError: what `name_embeddings` raises, or the file is a Parquet file and pyarrow is not installed.
    """
    path = name_embeddings(request)
    if path.suffix == ".parquet":
        try:
            import pyarrow
        except ImportError:
            raise CpuftError(f"writing {path} needs pyarrow: {install_command('train')}") from None
        del pyarrow
    return path


def choose_column(table: Table, wanted: str, option: str = "--text-columns") -> str:
    """Return the column of the texts: `wanted`, a usual name, or the only column.

    `option`: the option that names the column, for messages.

    Raises CpuftError: `wanted` is not there or more than one name, or nothing says which column it is.
    """
    if "," in wanted and wanted not in table.columns:
        raise CpuftError(f"{option} {wanted!r:.80}: name one column, as each text has an embedding of its own")
    if wanted:
        find_column(table.columns, wanted, table.source)
        return wanted
    usual = [name for name in _USUAL_COLUMNS if name in table.columns]
    if not usual and len(table.columns) != 1:
        raise CpuftError(
            f"{table.source} has the columns {', '.join(table.columns)}: name the one of the texts with {option}"
        )
    return usual[0] if usual else table.columns[0]


def choose_prompt(form: EmbeddingForm, wanted: str, model: str) -> str:
    """Return the text of a prompt: that of a name, or `wanted` itself if it is no name (letters, digits and _).

    Raises CpuftError: the model has no prompt of that name.
    """
    known = {"query": form.query_prompt, "document": form.document_prompt, **form.prompts}
    if not wanted or not _PROMPT_NAME.fullmatch(wanted):
        return wanted
    if not known.get(wanted):
        names = [name for name, text in known.items() if text]
        raise CpuftError(
            f"{model} has no prompt {wanted!r:.40}: "
            f"{suggest_names(wanted, names) if names else 'leave --prompt out, or give the text of the prompt'}"
        )
    return known[wanted]


def read_windows(
    table: Table, column: str, id_column: str = "", prompt: str = "", window_texts: int = 0
) -> Iterator[Window]:
    """Yield the texts of a table, with a prompt in front, and their ids, in windows of limited size.

    Parameters
    ----------
    window_texts: most texts of a window; 0 for 8192.

    Raises CpuftError: a row cannot be read or has no text in one of the columns, or there are no rows.
    """
    limit = window_texts or _WINDOW_TEXTS
    texts, ids, size, is_empty = list[str](), list[str](), 0, True
    for where, cells in table.rows:
        is_empty = False
        for name in (column, id_column) if id_column else (column,):
            if not isinstance(cells.get(name), str):
                raise CpuftError(
                    f"{where} has no text in the column {name!r}: correct that row, or name another column"
                )
        texts.append(prompt + str(cells[column]))
        size += len(texts[-1])
        if id_column:
            ids.append(str(cells[id_column]))
        if len(texts) == limit or size >= limit * _TEXT_CHARACTERS:
            yield Window(texts, ids)
            texts, ids, size = [], [], 0
    if is_empty:
        raise CpuftError(f"{table.source} has no rows: give a file with texts")
    if texts:
        yield Window(texts, ids)


@dataclass(frozen=True)
class EmbeddingModel:
    """Which model computes embeddings, and how."""

    name: str
    precision: str = "auto"
    batch_size: int = 0
    normalize: bool = False
    dimensions: int = 0

    @classmethod
    def of(cls, request: PredictConfig) -> EmbeddingModel:
        """Return the model of a request."""
        name = request.model or request.run
        return cls(name, request.precision, request.batch_size, request.normalize, request.dimensions)

    def load(self) -> Embedder:
        """Load the model. Raises CpuftError: it cannot be found or read, or has fewer dimensions."""
        from cpuft.train.embedding import Embedder  # imports torch

        embedder = Embedder(self.name, self.precision)
        if self.dimensions > embedder.dimensions:
            raise CpuftError(
                f"--dimensions {self.dimensions}: the embeddings of {self.name} have {embedder.dimensions} dimensions; "
                f"give as many or fewer"
            )
        form = embedder.form
        embedder.form = replace(
            form, normalize=form.normalize or self.normalize, dimensions=self.dimensions or form.dimensions
        )
        return embedder


Computed = tuple[Window, NDArray[np.float32]]
"""A window and the embeddings of its texts."""
Computer = Callable[[Iterator[Window]], Iterator[Computed]]
"""Yields windows with their embeddings, in the order of the windows."""


@contextmanager
def start_computing(model: EmbeddingModel, processes: int) -> Iterator[tuple[int, Computer]]:
    """Load the model, in this process or in several, and yield the number of dimensions and a function that computes.

    Raises CpuftError: the model cannot be used (see `EmbeddingModel.load`), or there are fewer cores than processes.
    """
    if processes == 1:
        embedder = model.load()
        resume_garbage_collection()
        with ThreadPoolExecutor(1) as reader:
            yield embedder.dimensions, lambda windows: compute_here(embedder, model.batch_size, windows, reader)
        return
    cores = list_cores()
    if processes > len(cores):
        raise CpuftError(
            f"--np {processes}: this host gives cpuft {counted(len(cores), 'core')}; give as many or fewer"
        )
    share = len(cores) // processes
    with ExitStack() as stack:
        workers = [
            stack.enter_context(_start_worker(model, cores[rank * share : (rank + 1) * share]))
            for rank in range(processes)
        ]
        dimensions, *_ = [worker.receive() for worker in workers]
        yield dimensions, lambda windows: _compute_in_workers(workers, windows)


def compute_here(
    embedder: Embedder, batch_size: int, windows: Iterator[Window], reader: ThreadPoolExecutor
) -> Iterator[Computed]:
    """Yield windows and their embeddings, computed in this process while `reader` reads and tokenises the next one."""

    def read() -> tuple[Window, list[list[int]]] | None:
        window = next(windows, None)
        return None if window is None else (window, embedder.encode(window.texts))

    following = reader.submit(read)
    while (found := following.result()) is not None:
        following = reader.submit(read)
        yield found[0], embedder.embed_encoded(found[1], batch_size)


def list_cores() -> list[int]:
    """Return the CPU numbers that this process may use; with OMP_NUM_THREADS only as many, the first ones.

    The launcher sets OMP_NUM_THREADS to the number of cores. The second hardware threads of cores have the last
    numbers.
    """
    cpus = sorted(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return cpus[: int(threads)] if threads.isdecimal() and int(threads) else cpus


class _Worker:
    """A process that computes, as its parent sees it."""

    def __init__(self, process: Any, connection: Connection) -> None:
        self.process, self.connection = process, connection

    def send(self, texts: list[str] | None) -> None:
        self.connection.send(texts)

    def receive(self) -> Any:
        """Return what the process has sent. Raises CpuftError: its own one, or that it has ended."""
        wait([self.connection, self.process.sentinel])
        try:
            found = self.connection.recv()
        except EOFError:
            self.process.join(_END_SECONDS)
            raise CpuftError(
                f"a process that computes embeddings has ended with exit code {self.process.exitcode}: start the "
                f"command again, with a smaller --np if memory is short"
            ) from None
        if isinstance(found, str):
            raise CpuftError(found)
        return found


@contextmanager
def _start_worker(model: EmbeddingModel, cores: list[int]) -> Iterator[_Worker]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, model, cores), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _Worker(process, ours)
    finally:
        ours.close()  # which ends the process
        process.join(_END_SECONDS)
        process.kill()


def _work(connection: Connection, model: EmbeddingModel, cores: list[int]) -> None:
    """Compute the embeddings of the lists of texts that come, on these cores, until the parent closes the connection.

    The first message to the parent is the number of dimensions; a text is the message of a CpuftError.
    """
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    try:
        import torch

        torch.set_num_threads(len(cores))
        embedder = model.load()
        connection.send(embedder.dimensions)
        while True:
            connection.send(embedder.embed(connection.recv(), batch_size=model.batch_size))
    except CpuftError as error:
        connection.send(str(error))
    except (EOFError, ConnectionError):
        pass  # the parent has ended


def _compute_in_workers(workers: Sequence[_Worker], windows: Iterator[Window]) -> Iterator[Computed]:
    """Give each worker a window in turn. A worker gets its next window when its embeddings have arrived."""
    active: list[tuple[_Worker, Window]] = []
    for worker, window in zip(workers, itertools.islice(windows, len(workers))):
        worker.send(window.texts)
        active.append((worker, window))
    while active:
        worker, window = active.pop(0)
        embeddings = worker.receive()
        if (following := next(windows, None)) is not None:
            worker.send(following.texts)
            active.append((worker, following))
        yield window, embeddings


def open_windows(request: PredictConfig, window_texts: int = 0) -> Iterator[Window]:
    """Return the windows of the file of a request; the first one has been read.

    Parameters
    ----------
    window_texts: most texts of a window; 0 for 8192.

    Raises CpuftError: the file cannot be read or is empty, its columns or the options do not fit, or the files beside
    the model are damaged. Iterating raises what `read_windows` raises.
    """
    table = read_tables(request.file, "--file", request)
    column = choose_column(table, request.text_columns)
    if request.id_column:
        find_column(table.columns, request.id_column, table.source)
    name = request.model or request.run
    prompt = choose_prompt(read_form(find_embedding_model(name)), request.prompt, name)
    windows = read_windows(table, column, request.id_column, prompt, window_texts)
    return itertools.chain([next(windows)], windows)


@contextmanager
def open_writer(path: Path, dimensions: int, has_ids: bool) -> Iterator[EmbeddingWriter]:
    """Yield the writer of a file that gets its name when the block has ended without an error.

    Parameters
    ----------
    path: ends in .npy or .parquet; from `name_output`.
    has_ids: whether the texts have ids.
    """
    with write_atomically(path) as beside:
        writer = NpyWriter(beside, dimensions) if path.suffix == ".npy" else ParquetWriter(beside, dimensions, has_ids)
        try:
            yield writer
        finally:
            writer.close()


def write_embeddings(request: PredictConfig) -> None:
    """Write the embeddings of all texts of a file, and print the name of the file that was written.

    Raises
    ------
    CpuftError
        The file, the model or the options do not allow it. Nothing is written.
    OSError
        The file cannot be written, for example because the disk is full.
    """
    path = name_output(request)
    windows = open_windows(request)  # an empty file is found before the model is loaded
    model = EmbeddingModel.of(request)
    with (
        start_computing(model, request.np) as (dimensions, compute),
        open_writer(path, dimensions, bool(request.id_column)) as writer,
    ):
        write_all(writer, compute(windows))
    print(f"embeddings: {path} ({counted(writer.rows, 'text')}, {counted(dimensions, 'dimension')})")


def write_all(writer: EmbeddingWriter, computed: Iterator[Computed]) -> None:
    """Write embeddings as they come; tell the speed on standard error every 10 s and at the end."""
    start = said = time.perf_counter()
    told = -1
    for window, embeddings in computed:
        writer.write(embeddings, window.ids)
        if time.perf_counter() - said > _PROGRESS_SECONDS:
            said, told = time.perf_counter(), writer.rows
            _tell_speed(told, said - start)
    if told != writer.rows:
        _tell_speed(writer.rows, time.perf_counter() - start)


def _tell_speed(rows: int, seconds: float) -> None:
    print(f"{counted(rows, 'text')} embedded, {rows / seconds:.1f} texts/s", file=sys.stderr, flush=True)


def main() -> None:
    """Write embeddings as the command line says; the exit code is that of `run_as_process`."""
    run_as_process(lambda: write_embeddings(parse_arguments(PredictConfig, sys.argv[1:])))


if __name__ == "__main__":
    main()

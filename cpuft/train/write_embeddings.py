"""Embeddings of the texts of a file: `python -m cpuft.train.write_embeddings --file=...`, started by `cpuft predict`.

Windows of some thousands of texts are embedded and written at a time, so that neither texts nor embeddings have to fit
into memory. Importing this module imports no torch: with --np, the processes that compute are pinned to their cores
before they import it.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cpuft.config.fields import parse_arguments
from cpuft.config.predict import PredictConfig
from cpuft.embedding_files import name_embeddings
from cpuft.errors import CpuftError, counted, suggest_names
from cpuft.files import write_atomically
from cpuft.rank.process import end_with_parent
from cpuft.rank.world import list_allowed_cpus
from cpuft.train.data.sources import get_text
from cpuft.train.data.tables import Table, choose_column, find_column, read_tables
from cpuft.train.data.write_tables import check_pyarrow
from cpuft.train.embedding_form import EmbeddingForm, find_embedding_model, read_form
from cpuft.train.startup import resume_garbage_collection, run_as_process

if TYPE_CHECKING:
    from cpuft.train.embedder import Embedder, Embeddings

_WINDOW_TEXTS, _TEXT_CHARACTERS = 8192, 2048
"""Most texts of a window, of which those of similar length are computed together, and about their characters."""
_PROGRESS_SECONDS = 10.0
_PROMPT_NAME = re.compile(r"\w+", re.ASCII)


@dataclass(frozen=True)
class Window:
    """Some consecutive rows of the file."""

    texts: list[str]
    ids: list[str]
    """Empty without --id-column."""


Write = Callable[[NDArray[np.float32], Sequence[str]], None]
"""Appends embeddings, shape (texts, dimensions), to a file, with the ids of their texts, which may be empty."""


@contextmanager
def open_npy(path: Path, dimensions: int) -> Iterator[Write]:
    """Yield what appends embeddings to a new .npy file, fp32, (texts, dimensions), in order; ids are ignored."""
    rows = 0

    def write(embeddings: NDArray[np.float32], ids: Sequence[str]) -> None:
        nonlocal rows
        file.write(np.ascontiguousarray(embeddings, "<f4").tobytes())
        rows += len(embeddings)

    def write_header() -> None:
        # NumPy leaves room for any number of rows, which is known at the end only.
        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, dimensions)}
        np.lib.format.write_array_header_1_0(file, header)

    with path.open("wb") as file:
        write_header()
        yield write
        file.seek(0)
        write_header()


@contextmanager
def _open_parquet(path: Path, dimensions: int, has_ids: bool) -> Iterator[Write]:
    """Write a Parquet file with the columns id (texts, or row numbers from 0) and embedding (lists of fp32 numbers)."""
    import pyarrow
    from pyarrow import parquet

    kind = pyarrow.string() if has_ids else pyarrow.int64()
    schema = pyarrow.schema({"id": kind, "embedding": pyarrow.list_(pyarrow.float32(), dimensions)})
    rows = 0

    def write(embeddings: NDArray[np.float32], ids: Sequence[str]) -> None:
        nonlocal rows
        names: Any = list(ids) if has_ids else np.arange(rows, rows + len(embeddings))
        vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(embeddings.ravel()), dimensions)
        writer.write_table(pyarrow.Table.from_arrays([pyarrow.array(names, kind), vectors], schema=schema))
        rows += len(embeddings)

    with parquet.ParquetWriter(path, schema) as writer:
        yield write


@contextmanager
def open_writer(path: Path, dimensions: int, has_ids: bool) -> Iterator[Write]:
    """Yield what appends embeddings to a .npy file, or with another ending to a Parquet file with ids (row numbers from
    0 without `has_ids`). The file gets its name after the block. Raises CpuftError: `path` is a folder, a device or a
    pipe.
    """
    with write_atomically(path) as beside:
        is_npy = path.suffix == ".npy"
        with open_npy(beside, dimensions) if is_npy else _open_parquet(beside, dimensions, has_ids) as write:
            yield write


def choose_embeddings_file(request: PredictConfig) -> Path:
    """Return --output, else the run's embeddings.npy. CpuftError: there is neither, it does not end in .npy or .parquet
    (with --id-column in .parquet), a file there may not be replaced, or pyarrow is missing for .parquet.
    """
    path = name_embeddings(request)
    check_pyarrow(path)
    return path


def choose_prompt(form: EmbeddingForm, wanted: str, model: str) -> str:
    """Return the text of the model's prompt with the name `wanted`, else `wanted` itself if it is "" or cannot be a
    name (letters, digits and _ only). Raises CpuftError: it can, and the model has no prompt of that name.
    """
    known = {"query": form.query_prompt, "document": form.document_prompt, **form.prompts}
    if known.get(wanted):
        return known[wanted]
    if not _PROMPT_NAME.fullmatch(wanted):
        return wanted
    names = [name for name, text in known.items() if text]
    advice = suggest_names(wanted, names) if names else "leave --prompt out, or give the text of the prompt"
    raise CpuftError(f"{model} has no prompt {wanted!r:.40}: {advice}")


def read_windows(
    table: Table, column: str, id_column: str = "", prompt: str = "", window_texts: int = 0
) -> Iterator[Window]:
    """Yield the texts of a table after a prompt, and their ids, in windows that end after `window_texts` texts (0:
    8192), or 2048 times as many characters. Raises CpuftError: a cell is no text, or there are no rows.
    """
    limit = window_texts or _WINDOW_TEXTS
    texts, ids, size, is_empty = list[str](), list[str](), 0, True
    for where, cells in table.rows:
        is_empty = False
        texts.append(prompt + get_text(cells, column, where))
        size += len(texts[-1])
        if id_column:
            ids.append(get_text(cells, id_column, where))
        if len(texts) == limit or size >= limit * _TEXT_CHARACTERS:
            yield Window(texts, ids)
            texts, ids, size = [], [], 0
    if is_empty:
        raise CpuftError(f"{table.source} has no rows: give a file with texts")
    if texts:
        yield Window(texts, ids)


def make_embedder(request: PredictConfig) -> Embedder:
    """Load the model of a request; raise CpuftError if it cannot be read, or has fewer dimensions than --dimensions."""
    from cpuft.train.embedder import Embedder  # imports torch

    name = request.model or request.run
    embedder = Embedder(name, request.precision)
    if request.dimensions > embedder.dimensions:
        raise CpuftError(f"the embeddings of {name} have {embedder.dimensions} dimensions: give at most as many")
    form = embedder.form
    embedder.form = replace(
        form, normalize=form.normalize or request.normalize, dimensions=request.dimensions or form.dimensions
    )
    return embedder


Computed = tuple[Window, NDArray[np.float32]]
Computer = Callable[[Iterator[Window]], Iterator[Computed]]
"""Yields windows with their embeddings, in the order of the windows."""


@contextmanager
def start_computing(request: PredictConfig) -> Iterator[tuple[int, Computer]]:
    """Load the model, in this process or in --np ones, and yield the number of dimensions and what computes. Raises
    CpuftError: the model cannot be used, or --np is more than the cores.
    """
    processes = request.np
    if processes == 1:
        embedder = make_embedder(request)
        resume_garbage_collection()
        with ThreadPoolExecutor(1) as reader:
            yield embedder.dimensions, lambda windows: compute_here(embedder, request.batch_size, windows, reader)
        return
    cores = list_cores()
    if processes > len(cores):
        raise CpuftError(f"--np {processes}: this host gives cpuft {counted(len(cores), 'core')}; give at most as many")
    share, context = len(cores) // processes, multiprocessing.get_context("spawn")
    places = context.SimpleQueue()
    for rank in range(processes):
        places.put(cores[rank * share : (rank + 1) * share])
    with ProcessPoolExecutor(processes, context, _pin_process, (places,)) as pool:

        def submit(texts: list[str]) -> Callable[[], Embeddings]:
            return pool.submit(_embed, request, texts).result

        try:
            # One process chooses for all: on Arm, they may measure differently.
            request = replace(request, precision=pool.submit(_find_precision, request.precision).result())
            dimensions, *_ = pool.map(_count_dimensions, [request] * processes)
            yield dimensions, lambda windows: compute_in_turn(windows, [submit], processes)
        except BrokenProcessPool:
            raise CpuftError("a process has ended: start again, with a smaller --np if memory is short") from None
        finally:
            for process in multiprocessing.active_children():
                process.kill()  # after an error, nobody waits for the windows that are being computed


def _pin_process(places: Any) -> None:
    end_with_parent()
    cores = places.get()
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))  # torch reads it when it is imported


_load_embedder = functools.cache(make_embedder)


def _find_precision(wanted: str) -> str:
    from cpuft.train.precision import find_precision  # imports torch

    return find_precision(wanted)


def _count_dimensions(request: PredictConfig) -> int:
    return _load_embedder(request).dimensions


def _embed(request: PredictConfig, texts: list[str]) -> Embeddings:
    return _load_embedder(request).embed(texts, batch_size=request.batch_size)


def compute_in_turn(
    windows: Iterator[Window], starts: Sequence[Callable[[list[str]], Callable[[], Embeddings]]], ahead: int
) -> Iterator[Computed]:
    """Yield windows with their embeddings, in their order, which processes with at most `ahead` windows each compute in
    turn. Each of `starts` sends texts to one, and returns a function that waits for their embeddings.
    """
    waiting = deque[tuple[Window, Callable[[], "Embeddings"]]]()
    for window, start in zip(windows, itertools.cycle(starts)):
        waiting.append((window, start(window.texts)))
        if len(waiting) == ahead * len(starts):
            window, finish = waiting.popleft()
            yield window, finish()
    for window, finish in waiting:
        yield window, finish()


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
    """Return the CPU numbers that this process may use; with OMP_NUM_THREADS only as many, the first ones."""
    # The launcher sets OMP_NUM_THREADS to the number of cores, whose second hardware threads have the last numbers.
    cpus = list_allowed_cpus()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return cpus[: int(threads)] if threads.isdecimal() and int(threads) else cpus


def open_windows(request: PredictConfig, window_texts: int = 0) -> Iterator[Window]:
    """Return the windows of the file of a request; the first one has been read, so that an empty file is found here.
    Raises CpuftError: the file, a column, a text of that window or the prompt is missing, or the model is not usable.
    """
    table = read_tables(request.file, "--file", request)
    column = choose_column(table, request.text_columns)
    if request.id_column:
        find_column(table.columns, request.id_column, table.source)
    name = request.model or request.run
    prompt = choose_prompt(read_form(find_embedding_model(name)), request.prompt, name)
    windows = read_windows(table, column, request.id_column, prompt, window_texts)
    return itertools.chain([next(windows)], windows)


def write_embeddings(request: PredictConfig) -> None:
    """Write the embeddings of a file's texts, and print where. Raises CpuftError: model or files cannot be used."""
    path = choose_embeddings_file(request)
    windows = open_windows(request)  # an empty file is found before the model is loaded
    with (
        start_computing(request) as (dimensions, compute),
        open_writer(path, dimensions, bool(request.id_column)) as write,
    ):
        rows = write_all(write, compute(windows))
    print(f"embeddings: {path} ({counted(rows, 'text')}, {counted(dimensions, 'dimension')})")


def write_all(write: Write, computed: Iterator[Computed]) -> int:
    """Write embeddings as they come; return their number. Print the speed on stderr every 10 s and at the end."""
    rows, tell = 0, make_progress(lambda done, speed: f"{counted(done, 'text')} embedded, {speed:.1f} texts/s")
    for window, embeddings in computed:
        write(embeddings, window.ids)
        rows += len(embeddings)
        tell(rows)
    tell(rows, is_end=True)
    return rows


def make_progress(describe: Callable[[int, float], str]) -> Callable[..., None]:
    """Return a function of (how much is done, is_end=False), which prints on standard error what `describe` returns for
    what is done and the speed per second: at most every 10 s, and once at the end.
    """
    start = said = time.perf_counter()
    told = -1

    def tell(done: int, is_end: bool = False) -> None:
        nonlocal said, told
        now = time.perf_counter()
        if done != told and (is_end or now - said > _PROGRESS_SECONDS):
            said, told = now, done
            print(describe(done, done / (now - start)), file=sys.stderr, flush=True)

    return tell


if __name__ == "__main__":
    run_as_process(lambda: write_embeddings(parse_arguments(PredictConfig, sys.argv[1:])))

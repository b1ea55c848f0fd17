"""What a run's saved model predicts for each validation example: `predictions.parquet` in the run folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuft.errors import CpuftError, requires
from cpuft.files import write_atomically
from cpuft.serialization import load, parse_json

if TYPE_CHECKING:
    import numpy as np
    import pyarrow
    from numpy.typing import NDArray

FILE_NAME = "predictions.parquet"
MOST_PROBABILITIES = 100
"""Largest number of classes for which the probability of every class is kept."""
QUERY_KINDS = ("pairs", "relevance")
"""Kinds whose metrics are means over queries."""
_KEY = b"cpuft"


@dataclass(frozen=True)
class About:
    """What the rows of a file of predictions are."""

    kind: str
    classes: tuple[str, ...]
    """Names of the classes in the order of their numbers; empty for the kinds without."""
    metrics: dict[str, float]
    """The metrics of these predictions, as the record has them."""
    rows: str
    """Checksum of the validation rows as they were read, which does not depend on the tokenizer: only predictions with
    equal checksums can be compared row by row."""
    step: int
    """Update whose weights predicted."""
    slice_by: str = ""
    """Name of the column whose values are in `slice`; empty if there is none."""


@dataclass(frozen=True)
class RunPredictions:
    """The predictions of a run; the columns of `table` depend on the kind.

    All kinds: `split` (string: the suffix of the metrics' names), `row` (int64: number in the split, from 0) and
    `tokens` (int32: length after cutting; 0 for pairs). Unless the run was started with --no-examples, `text` (list of
    strings: the beginning of each text of the row, of pairs the query's). With --slice-by, `slice` (string: the value
    of that column). Then

    - class: `label` and `prediction` (strings), `confidence` and `label_probability` (float32: probabilities of the
      prediction and of the label), and `probabilities` (list of float32 in the order of the classes), which is left out
      with more than `MOST_PROBABILITIES` classes.
    - labels: `label` and `prediction` (lists of strings), and `probabilities` as for class.
    - tags: `label` and `prediction` (lists of strings, one for each word that the tokenizer left).
    - score and similarity: `label` and `prediction` (float64).
    - relevance: `query` (int64), `label` and `prediction` (float64: relevance, and the model's score).
    - pairs: a row is a query; one float64 column for each metric, named like it, whose mean is the metric.
    """

    about: About
    table: pyarrow.Table

    def column(self, name: str) -> Any:
        """Return a column as a NumPy array of numbers or objects (strings; arrays for lists). KeyError: none such."""
        return self.table.column(name).to_numpy()

    def replace(self, table: pyarrow.Table, **about: Any) -> RunPredictions:
        """Return predictions with another table, and the same `about` but for the given fields of `About`."""
        return RunPredictions(dataclasses.replace(self.about, **about), table)

    def number_classes(self, name: str) -> NDArray[np.int64]:
        """Return the numbers of the classes in a column of the kind class, (rows,); KeyError: an unknown class."""
        import numpy as np

        numbers = {label: number for number, label in enumerate(self.about.classes)}
        return np.asarray([numbers[label] for label in self.column(name)], np.int64)

    def mark_classes(self, name: str) -> NDArray[np.bool_]:
        """Return which classes each row of a column of the kind labels has, (rows, classes); KeyError: unknown one."""
        import numpy as np

        numbers = {label: number for number, label in enumerate(self.about.classes)}
        marks = np.zeros((len(self.table), len(numbers)), bool)
        for row, labels in enumerate(self.column(name)):
            marks[row, [numbers[label] for label in labels]] = True
        return marks

    def probabilities(self) -> NDArray[np.float32]:
        """Return a copy of the probabilities of all classes, shape (rows, classes); KeyError if they were not kept."""
        values: Any = self.table.column("probabilities").combine_chunks().flatten().to_numpy(zero_copy_only=False)
        array: NDArray[np.float32] = values.astype("float32").reshape(len(self.table), len(self.about.classes))
        return array


def write_predictions(folder: Path, about: About, columns: dict[str, Any]) -> None:
    """Write FOLDER/predictions.parquet, completely or not at all; `columns`, values by name, have the same length."""
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table(columns).replace_schema_metadata({_KEY: json.dumps(vars(about))})
    with write_atomically(folder / FILE_NAME) as beside:
        parquet.write_table(table, beside, compression="zstd")


@contextmanager
def explain_damage(run: str) -> Iterator[None]:
    """Turn every Exception but CpuftError into a CpuftError that says that RUN/predictions.parquet is damaged."""
    try:
        yield
    except CpuftError:
        raise
    except Exception as error:  # PyArrow, NumPy and others raise many kinds of errors
        raise CpuftError(f"{run}/{FILE_NAME} is damaged ({error!r:.200}): fetch or train the run again") from None


def read_predictions(run: str) -> RunPredictions:
    """Read the predictions in the folder `run`. CpuftError: there are none, they are damaged, or PyArrow is missing."""
    path = Path(run, FILE_NAME)
    if not path.is_file():
        raise CpuftError(f"{run} has no {FILE_NAME}: give the folder of a finished run with labels, scores or queries")
    with requires("train", f"{FILE_NAME} is read with PyArrow"):
        from pyarrow import parquet
    with explain_damage(run):
        table = parquet.read_table(path)
        about = load(About, parse_json((table.schema.metadata or {})[_KEY].decode()), str(path))
        return RunPredictions(about, table)

"""The Python API: `cpuft.launch`, `cpuft.compare` and the runs that they return, for scripts and notebooks.

Both functions plan and execute what the commands of the same names do. Errors are raised as CpuftError.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pickle
import re
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from cpuft.cli.common import check_hosts, find_model_folder, say
from cpuft.cli.options import pick
from cpuft.cli.predict import check_request, is_embedding_task, plan_prediction
from cpuft.config.compare import CompareConfig
from cpuft.config.conflicts import name_alternatives
from cpuft.config.fields import option_names, parse_numbers, parse_value
from cpuft.config.launch import LAUNCH_ONLY, LaunchConfig, ResumeConfig, ScriptConfig
from cpuft.config.predict import PredictConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import RESUMABLE, CpuftError, Interrupted, explain_os_error, requires, suggest_names
from cpuft.execute import open_memory_file, run_step
from cpuft.hosts.cluster import Cluster
from cpuft.launch.compare import plan_comparison, run_comparison
from cpuft.launch.failures import explain_exit, read_failures
from cpuft.launch.progress_bar import choose_progress, is_notebook
from cpuft.launch.run import LaunchRequest, PlannedLaunch, plan_request, run_launch
from cpuft.launch.run_folder import choose_run_dir
from cpuft.rank.call import CALL_FOLDER, CallHeader, compute_digest, pack_call, python_version, read_result
from cpuft.record import Record, read_record
from cpuft.serialization import find_control
from cpuft.transfer import NO_LINK

if TYPE_CHECKING:
    from cpuft.report.comparison import Comparison

_CALL_MODULE = "cpuft.train.call_function"
_SIGINT_CODE = 130


class RankError(CpuftError):
    """A rank failed; the text is the cause in one line, then the end of the error output of the first such rank."""

    exit_code = 1

    def __init__(self, message: str, rank: int, host: str, output: str) -> None:
        super().__init__(message)
        self.rank, self.host, self.output = rank, host, output

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(str(CpuftError(line)) for line in self.output.splitlines())])


@dataclass(frozen=True)
class Run:
    """A run that has ended: `cpuft.launch` returns it, and `Run("runs/mrpc-np2")` opens an earlier run.

    Raises CpuftError: there is no such folder.
    """

    folder: Path
    results: list[Any] = field(default_factory=list)
    """What the function returned on each rank, in the order of ranks; empty for a training."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder).absolute())
        if not self.folder.is_dir():
            raise CpuftError(f"there is no folder {self.folder}: give the folder of an earlier run")

    @cached_property
    def record(self) -> Record:
        """The record of the training, as it was when this attribute was first read.

        Raises CpuftError: the folder holds no record, for example because the run called a function.
        """
        return read_record(str(self.folder))

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the saved model, such as {"accuracy": 0.86}; {} without an evaluation. CpuftError: no record."""
        return self.record.metrics

    def load_model(self) -> Any:
        """Return the trained model, a model of transformers in fp32 that is ready to predict.

        Raises CpuftError: the run has no model, torch or transformers is not installed, or the model cannot be loaded.
        """
        folder = find_model_folder(str(self.folder))
        with requires("train", "a model needs torch and transformers"):
            import transformers

            from cpuft.train.model import load_weights
        try:
            names = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
            read = getattr(transformers, names[0]).from_pretrained
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CpuftError(f"{folder}/config.json names no model of transformers ({error}): train again") from None
        model, _ = load_weights(read, str(folder))
        return model.eval()

    def predict(self, rows: Iterable[Any], **options: Any) -> Any:
        """Predict examples with the trained model, as `cpuft predict --file` does.

        Parameters
        ----------
        rows: each a text, a tuple of two texts, or a dict of columns; for a task with tags, a list of words. A data
            frame is one dict for each of its rows; a single text or dict is one row.
        options: of `cpuft predict`, such as batch_size or precision, but none about files or ids.

        Returns
        -------
        For an embedding model, a NumPy array of embeddings, fp32, shape (rows, dimensions). Else a list with a dict for
        each row, by the task: with `label` (the most likely class) and `probabilities` (by class), with `score`, with
        `labels` (those above the option `threshold`) and `probabilities`, or with `tags` (for each word a tag, empty if
        it was cut off). Without rows, [].

        Raises
        ------
        CpuftError: the run has no model or does not predict labels, the rows do not fit the task, an option is
            wrong, or this is not called in the main thread.
        """
        if isinstance(rows, str | Mapping):
            rows = [rows]
        rows = rows.to_dict("records") if hasattr(rows, "to_dict") and hasattr(rows, "columns") else list(rows)
        if not rows:
            return []
        _check_thread()
        with _raise_for_python(), tempfile.TemporaryDirectory(prefix="cpuft-") as folder:
            task = self.record.header.task
            is_embedding = is_embedding_task(task)
            file = Path(folder, "rows.jsonl")
            output = Path(folder, "embeddings.npy" if is_embedding else "predictions.jsonl")
            columns = write_rows(rows, file)
            fixed = {"run": str(self.folder), "file": str(file), "output": str(output)}
            _refuse_options(options, (*fixed, "split", "id_column", "with_input"), "is for files of predictions")
            given = parse_options({"text_columns": ",".join(columns)} | options, PredictConfig) | fixed
            request = PredictConfig(**given)
            check_request(request, self.record.header)
            step = plan_prediction(request, task)
            with open_memory_file() as said:
                code = run_step(step, os.environ, said)
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines()
            if code:
                raise CpuftError((lines or ["the prediction failed"])[-1].removeprefix("cpuft: error: "))
            if is_embedding:
                import numpy

                return numpy.load(output)
            return read_predicted_rows(output, len(rows))

    def plot(self) -> Any:
        """Return a figure of matplotlib with the loss, and the first metric, over the examples of the training.

        Raises CpuftError: the folder holds no record, or matplotlib is not installed.
        """
        from cpuft.report.plots import list_learning_panels

        panels = [panel for panel in list_learning_panels([self.record]) if panel.axes[0] == "examples"]
        return _make_figure(panels[:2])

    def __repr__(self) -> str:
        try:
            said = "".join(f", {name} {value:.4f}" for name, value in self.metrics.items())
        except CpuftError:
            said = f", {len(self.results)} results" if self.results else ""
        return f"<cpuft.Run {self.folder}{said}>"


@dataclass(frozen=True)
class ComparedRuns:
    """The runs of a comparison, and the report that was written into its folder."""

    folder: Path
    """Folder with report.txt, report.md, report.json and, if the extra `plot` is installed, report.html."""
    runs: list[Run]
    """The runs in the order in which they were made."""

    @cached_property
    def comparison(self) -> Comparison:
        """The table of the report as data: a row for each number of ranks, with speedup, efficiency and metrics."""
        from cpuft.report.comparison import compare as compare_records

        return compare_records([run.record for run in self.runs])

    def plot(self) -> Any:
        """Return a figure of matplotlib with the speedup over the number of ranks, and the loss of each run.

        Raises CpuftError: matplotlib is not installed.
        """
        from cpuft.report.plots import list_learning_panels, list_speedup_panels

        trained = [run.record for run in self.runs if not run.record.header.independent]
        return _make_figure([*list_speedup_panels(self.comparison), *list_learning_panels(trained)[:1]])

    def __repr__(self) -> str:
        from cpuft.report.comparison_tables import format_text

        return format_text(self.comparison).rstrip("\n")


def launch(
    target: Callable[..., Any] | TrainConfig | Mapping[str, Any] | None = None,
    /,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Train a model as `cpuft launch` does, or call a function on the ranks of one or more hosts, and wait for the end.

    A function is pickled with cloudpickle, goes to the ranks in a file that only this user can read, and is called once
    on every rank. torch's default process group has been formed by then. Ctrl-C, or the stop button of a notebook, ends
    all ranks.

    Parameters
    ----------
    target: a function; or the options of a training as TrainConfig or as a dict; None if `options` has them all.
    args, kwargs: arguments of the function.
    options: those of `cpuft launch` with underscores, such as np=2, cluster="lab" or task="mrpc". Options of the
        training are for a training only.

    Returns
    -------
    The run. For a function, `results` has what it returned on each rank.

    Raises
    ------
    CpuftError: an option is wrong, the function or its arguments cannot be pickled, the run cannot be made, or this is
        not called in the main thread. Also if a signal other than Ctrl-C ended the run.
    RankError: a rank failed; the text has its traceback.
    KeyboardInterrupt: Ctrl-C ended the run. All ranks have ended.
    """
    _check_thread()
    with _raise_for_python():
        if callable(target):
            return _launch_function(target, tuple(args), dict(kwargs or {}), options)
        if args or kwargs:
            raise CpuftError("args and kwargs are for a function: give the function first, or leave them out")
        values = parse_options(_options_of(target) | options, LaunchConfig, TrainConfig, ResumeConfig)
        configs = pick(LaunchConfig, values), pick(TrainConfig, values), ScriptConfig()
        request = LaunchRequest(*configs, (), values.get("resume", ""), frozenset(values), choose_progress())
        return Run(Path(_execute(request).run_dir))


def compare(
    config: TrainConfig | Mapping[str, Any] | None = None, /, *, np: str | Sequence[int] = (1, 2), **options: Any
) -> ComparedRuns:
    """Train on several numbers of ranks, one after another, and report the speedup, as `cpuft compare` does.

    Parameters
    ----------
    config: the options of the training as TrainConfig or as a dict; None if `options` has them all.
    np: the numbers of ranks, such as (1, 2, 4) or "1,2,4".
    options: those of `cpuft compare` with underscores, such as repeats=3 or task="mrpc".

    Returns
    -------
    The runs in the order in which they were made, and their report.

    Raises
    ------
    CpuftError: an option is wrong, a run cannot be made, or this is not called in the main thread.
    RankError: a rank failed.
    KeyboardInterrupt: Ctrl-C ended the comparison. All ranks have ended.
    """
    from cpuft.report.page import write_all

    _check_thread()
    with _raise_for_python():
        given = _options_of(config) | options | {"np": np}
        _refuse_options(given, LAUNCH_ONLY, "is an option of cpuft.launch only")
        values = parse_options(given, CompareConfig, TrainConfig, LaunchConfig)
        comparison, train = pick(CompareConfig, values), pick(TrainConfig, values)
        launch_config = pick(LaunchConfig, values | {"np": 1})
        run_dir = choose_run_dir(launch_config.run_dir, f"{train.task}-compare")
        ranks, progress = parse_numbers(comparison.np, "--np"), choose_progress()
        planned = plan_comparison(ranks, launch_config, train, comparison, run_dir, progress, os.environ)
        check_hosts(planned[-1].cluster, launch_config)
        code, last = run_comparison(planned, progress, launch_config.time_limit, say)
        if code:
            raise _describe_failure(code, last.run_dir, last.cluster)
        for line in write_all([run.run_dir for run in planned], run_dir):
            if not line.startswith("report: "):
                say(line)
        return ComparedRuns(Path(run_dir), [Run(Path(run.run_dir)) for run in planned])


def parse_options(options: Mapping[str, Any], *configs: type) -> dict[str, Any]:
    """Return the values of the given options by name (with underscores), as the types of their fields in `configs`.

    Values are checked as on the command line: 2 and "2" are the same. A list becomes a text with commas, None leaves an
    option out, and options that are not given get no default. Of fields of the same name in several `configs`, the
    first counts. Raises CpuftError: an option is unknown or not valid, or two exclude each other.
    """
    fields: dict[str, tuple[dataclasses.Field[Any], type]] = {}
    for config in configs:
        hints = get_type_hints(config)
        for one in dataclasses.fields(config):
            fields.setdefault(one.name, (one, hints[one.name]))
    values = {}
    for name, value in options.items():
        if name not in fields:
            raise CpuftError(f"there is no option {name!r}: {suggest_names(name, fields)}")
        if value is None:
            continue
        values[name] = parse_value(*fields[name], _format_value(name, value))
    if why := name_alternatives({name: name for name in values}):
        raise CpuftError(why)
    return values


def _format_value(name: str, value: Any) -> str:
    listed = value if isinstance(value, list | tuple) else [value]
    parts = [os.fspath(one) if isinstance(one, os.PathLike) else one for one in listed]
    if not all(isinstance(part, str | bool | int | float) for part in parts):
        raise CpuftError(f"{name} is a {type(value).__name__}: give a text, number, True or False, or a list of texts")
    text = ",".join(map(str, parts))
    if control := find_control(text):
        raise CpuftError(f"{name} {text[:80]!r} contains the control character {control!r}: give the value without it")
    return text


def _options_of(config: Any) -> dict[str, Any]:
    """Return the options of a configuration; of a TrainConfig those that differ from their defaults."""
    if config is None:
        return {}
    if isinstance(config, TrainConfig):
        default = TrainConfig()
        return {name: value for name, value in vars(config).items() if value != getattr(default, name)}
    if isinstance(config, Mapping):
        return dict(config)
    raise CpuftError(f"{type(config).__name__} is no function and no options: give a function, TrainConfig or dict")


def _refuse_options(options: Iterable[str], refused: Collection[str], reason: str) -> None:
    for name in options:
        if name in refused:
            raise CpuftError(f"{name} {reason}: leave it out")


def _launch_function(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Mapping[str, Any]
) -> Run:
    training = {*option_names(TrainConfig), "resume"} - set(option_names(LaunchConfig))
    _refuse_options(options, training, "is for a training, and the function has arguments: args and kwargs")
    config = pick(LaunchConfig, parse_options(options, LaunchConfig))
    name = re.sub(r"\W", "", getattr(function, "__name__", "")) or "function"
    run_dir = choose_run_dir(config.run_dir, f"{name}-np{config.np}" if config.np else name)
    config = dataclasses.replace(config, run_dir=run_dir)
    pickled = pickle_call(function, args, kwargs)
    header = CallHeader(secrets.token_hex(32), python_version(), tuple(filter(None, map(os.path.abspath, sys.path))))
    content = pack_call(header, pickled)
    # mkdtemp makes a folder that only this user can open. The file is copied into the run's folder, once that is made.
    with tempfile.TemporaryDirectory(prefix="cpuft-") as staging:
        file = os.open(f"{staging}/call", os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o600)
        with os.fdopen(file, "wb") as stream:
            stream.write(content)
        script = ("python", "-m", _CALL_MODULE, compute_digest(content))
        request = LaunchRequest(
            config, TrainConfig(), ScriptConfig(), script, "", frozenset(), "lines", f"{staging}/call"
        )
        with ExitStack() as cleaning:  # of what this launch has made: another one may have taken the folder
            folder = Path(config.run_dir, CALL_FOLDER)
            planned = _execute(request, lambda: cleaning.callback(shutil.rmtree, folder, ignore_errors=True))
            return Run(Path(config.run_dir), _load_results(config.run_dir, planned.cluster.ranks, header.key))


def pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the pickle of (function, args, kwargs); CpuftError: a part cannot be pickled, or cloudpickle is missing.

    It holds the code that the function uses of its module, unless that is installed: hosts need no copy of the module.
    """
    with requires("train", "a function needs cloudpickle"):
        import cloudpickle
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    by_value = module if module and _is_local(module) else None
    if by_value:
        cloudpickle.register_pickle_by_value(by_value)
    try:
        return bytes(cloudpickle.dumps((function, args, kwargs)))
    except Exception as error:  # objects raise errors of their own when they are pickled
        what, reason = _find_unpicklable(cloudpickle.dumps, function, args, kwargs)
        raise CpuftError(
            f"{what} cannot be pickled ({reason or error}): make it inside the function, or pass what it is made from"
        ) from None
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(by_value)


def _is_local(module: Any) -> bool:
    """Return whether a module is a file of the user's own, which other hosts may not have; not for __main__."""
    path = getattr(module, "__file__", None) or ""
    return bool(path) and module.__name__ != "__main__" and not re.search(r"/(site|dist)-packages/|/lib/python3", path)


def _find_unpicklable(
    dumps: Callable[[Any], bytes], function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the first argument of a call, or variable that its function uses, that cannot be pickled, and why."""
    name = getattr(function, "__name__", "the function")
    parts = [(f"argument {number} of {name}", value) for number, value in enumerate(args, start=1)]
    parts += [(f"argument {key!r} of {name}", value) for key, value in kwargs.items()]
    with suppress(TypeError, ValueError):  # it is no function of Python, or a variable has no value yet
        used = inspect.getclosurevars(function)
        parts += [(f"the variable {key!r} that {name} uses", value) for key, value in {**used[0], **used[1]}.items()]
    for what, value in (*parts, (f"the function {name}", function)):
        try:
            dumps(value)
        except Exception as error:
            return f"{what}, a {type(value).__name__},", str(error)
    return f"the function {name}", ""


def _load_results(run_dir: str, ranks: int, key: str) -> list[Any]:
    """Return what the function returned on each rank; only files that are signed with the key are loaded."""
    results = []
    for rank in range(ranks):
        try:
            results.append(pickle.loads(read_result(run_dir, rank, key)))
        except (ImportError, AttributeError) as error:
            raise CpuftError(f"rank {rank}'s result cannot be loaded ({error}): install that module here") from None
    return results


def _execute(request: LaunchRequest, on_planned: Callable[[], object] = lambda: None) -> PlannedLaunch:
    with ExitStack() as locks:
        with ExitStack() as sessions:
            planned = plan_request(request, os.environ, say, locks, sessions)
            on_planned()
            if planned.job:
                check_hosts(planned.cluster, planned.job.config)
        code, line = run_launch(request, planned, os.environ, say)
    if code:
        raise _describe_failure(code, planned.run_dir, planned.cluster, "" if request.script else line)
    return planned


def _describe_failure(code: int, run_dir: str, cluster: Cluster, line: str = "") -> CpuftError:
    """Return the error of a failed run with this closing line; KeyboardInterrupt is raised if Ctrl-C has stopped it."""
    if code == RESUMABLE and line:
        line = line.removeprefix("cpuft: ")
        if "by SIGINT" in line:
            raise KeyboardInterrupt(line)
        return CpuftError(line)
    failures = read_failures(Path(run_dir, "logs"), cluster.rank_hosts)
    if not failures:
        return CpuftError(f"the run in {run_dir} ended with exit code {code}: its logs are in {run_dir}/logs")
    first = failures[0]
    cause, advice = explain_exit(first.code, first.text)
    said = first.text.strip().splitlines()
    if first.code == 2 and said and said[-1].startswith("cpuft: error: "):
        return CpuftError(said[-1].removeprefix("cpuft: error: "))
    start = first.text.rfind("Traceback (most recent call last)")
    output = re.sub(r"^\[rank\d+\]: ?", "", first.text[max(start, 0) :].strip(), flags=re.MULTILINE)  # torch adds it
    message = f"rank {first.rank} on {first.host} failed ({cause}): {advice or f'its output is in {run_dir}/logs'}"
    return RankError(message, first.rank, first.host, output)


@contextmanager
def _raise_for_python() -> Iterator[None]:
    """Raise CpuftError or KeyboardInterrupt where the command line would end the program."""
    try:
        yield
        return
    except Interrupted as stopped:
        code = stopped.exit_code
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    except OSError as error:
        raise explain_os_error(error) or error from None
    if code == _SIGINT_CODE:
        raise KeyboardInterrupt("all ranks have ended") from None
    raise CpuftError(f"signal {code - 128} ended the run, and all ranks have ended: start it again") from None


def _check_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise CpuftError("cpuft handles Ctrl-C while it waits for a run: call it in the main thread of the program")


def write_rows(rows: Sequence[Any], path: Path) -> tuple[str, ...]:
    """Write examples to predict as JSON lines, and return the names of their text columns.

    These are ("text",) for texts, ("tokens",) for lists of words, ("text1", "text2") for tuples of two texts, and ()
    for dicts, which have names of their own, and without rows. What is in lists and tuples is not checked. Raises
    CpuftError: rows are of different or of other kinds, or a value is of no type of JSON.
    """
    columns: tuple[str, ...] = ()
    if all(isinstance(row, Mapping) for row in rows):
        lines = [dict(row) for row in rows]
    elif all(isinstance(row, str) for row in rows):
        columns, lines = ("text",), [{"text": row} for row in rows]
    elif all(isinstance(row, list) for row in rows):
        columns, lines = ("tokens",), [{"tokens": row} for row in rows]
    elif all(isinstance(row, tuple) and len(row) == 2 for row in rows):
        columns = ("text1", "text2")
        lines = [dict(zip(columns, row)) for row in rows]
    else:
        raise CpuftError("rows differ in kind: give texts, tuples of two texts, lists of words, or dicts of columns")
    try:
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    except TypeError as error:
        raise CpuftError(f"a row has a value that is no text and no number ({error}): convert it to a text") from None
    return columns


def read_predicted_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Return for each of `count` examples a dict as `Run.predict` does; {} without a line in the predictions' file."""
    found: list[dict[str, Any]] = [{} for _ in range(count)]
    for row in map(json.loads, path.read_text(encoding="utf-8").split("\n")[:-1]):
        one, prediction = found[row["index"]], row["prediction"]
        probabilities = {name.removeprefix("p_"): value for name, value in row.items() if name.startswith("p_")}
        if "token" in row:
            one.setdefault("tags", []).append(prediction or "")
        elif probabilities:
            one |= {"labels" if isinstance(prediction, list) else "label": prediction, "probabilities": probabilities}
        else:
            one["score"] = prediction
    return found


def _make_figure(panels: Sequence[Any]) -> Any:
    from cpuft.report.plots import make_figure

    figure = make_figure(panels)
    if is_notebook():
        from IPython import get_ipython
        from IPython.core.pylabtools import select_figure_formats

        shell = get_ipython()
        formatters = shell.display_formatter.formatters.values()
        if not any(type(figure) in formatter.type_printers for formatter in formatters):
            select_figure_formats(shell, "png")  # the user has chosen no format, for example with %matplotlib
    return figure

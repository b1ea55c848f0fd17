"""What Optuna chooses and prunes, from results that are made up."""

from __future__ import annotations

import builtins
import math
import sqlite3
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuft.errors import CpuftError
from cpuft.report.sweep import (
    DONE,
    FAILED,
    PRUNED,
    VERSION,
    AttemptEnd,
    AttemptStart,
    Evaluation,
    JournalLine,
    SearchSettings,
    Sweep,
    SweepHeader,
    Trial,
)
from cpuft.sweep.search import Values
from cpuft.sweep.study import OptunaSearch, judge_trial, lock_study, name_parameters

SETTINGS = SearchSettings(
    60, 1, "tpe", "median", seed=1, spaces=[{"learning_rate": "1e-6..1e-2"}], study="one", token="a"
)
EVALUATIONS = 3


def make_sweep(settings: SearchSettings = SETTINGS) -> Sweep:
    return Sweep("sweeps/a", SweepHeader(VERSION, ["--max-steps=10"], [], "", "maximize", 1, 0.0, [], search=settings))


def metric_of(run: dict[str, str]) -> float:
    """A metric that is best at a learning rate of 1e-4; it loses 0.1 for each factor of 10 away from that."""
    return 0.9 - 0.1 * abs(math.log10(float(run["learning_rate"])) + 4)


def train(search: OptunaSearch, sweep: Sweep, metric: Callable[[dict[str, str]], float] = metric_of) -> Sweep:
    """Train the next configuration, one seed after another."""
    trial = search.propose(sweep)
    sweep = sweep.add(trial)
    for run in sweep.list_runs(trial.number):
        sweep = sweep.add(AttemptStart(run, 1, "node1", f"run-{run}", 0.0))
        value = metric(sweep.header.runs[run - 1])
        end = AttemptEnd(run, 1, FAILED, 1, 1.0, {})
        if not math.isnan(value):
            end = AttemptEnd(run, 1, DONE, 0, 1.0, {"accuracy": value})
        for number in range(1, EVALUATIONS + 1):
            sweep = sweep.add(Evaluation(run, 1, 10 * number, {"accuracy": value - 0.01 * (EVALUATIONS - number)}))
            if search.is_pruned(sweep, run):
                end = AttemptEnd(run, 1, PRUNED, 143, 1.0, {})
                break
        sweep = sweep.add(end)
        search.finish(sweep, trial.number)
        if end.status == PRUNED:
            break
    return sweep


def find_rates(sweep: Sweep) -> list[float]:
    return [float(run["learning_rate"]) for run in sweep.header.runs]


def test_the_search_comes_near_the_best_and_prunes_what_is_worse_than_the_median() -> None:
    search, sweep = OptunaSearch(SETTINGS, True), make_sweep()
    for _ in range(30):
        sweep = train(search, sweep)
    distances = [abs(math.log10(rate) + 4) for rate in find_rates(sweep)]
    assert sum(distances[20:]) < 0.6 * sum(distances[:10])
    pruned = sweep.list_with_status(PRUNED)
    assert pruned
    # Optuna prunes nothing before five configurations are complete.
    assert min(pruned) > 5
    for run in pruned:
        done = [one for one in sweep.list_with_status(DONE) if one < run]
        better = [one for one in done if distances[one - 1] < distances[run - 1]]
        assert len(better) >= len(done) / 2
    assert min(distances) == min(distances[run - 1] for run in sweep.list_with_status(DONE))


def test_evaluations_are_compared_after_the_same_share_of_the_training() -> None:
    """Runs with a batch of 8 make eight times as many updates, and have learned less at the first evaluations."""
    settings = replace(SETTINGS, spaces=[{"batch_size": "8,64", "epochs": "1,2", "learning_rate": "1e-6..1e-2"}])
    search, sweep = OptunaSearch(settings, True), make_sweep(settings)
    sweep = Sweep(sweep.folder, replace(sweep.header, options=[]))
    seen = Counter[tuple[str, bool]]()

    def count_updates(run: dict[str, str]) -> int:
        return 640 * int(run["epochs"]) // int(run["batch_size"])

    for number in range(1, 31):
        sweep = sweep.add(search.propose(sweep))
        run = sweep.header.runs[number - 1]
        updates, quality = count_updates(run), metric_of(run)
        end = AttemptEnd(number, 1, DONE, 0, 1.0, {"accuracy": quality})
        sweep = sweep.add(AttemptStart(number, 1, "node1", f"run-{number}", 0.0))
        for update in range(5, updates, 5):
            sweep = sweep.add(Evaluation(number, 1, update, {"accuracy": quality - 0.5 * (1 - update / updates)}))
            if search.is_pruned(sweep, number):
                end = AttemptEnd(number, 1, PRUNED, 143, 1.0, {})
                done = [sweep.header.runs[one - 1] for one in sweep.list_with_status(DONE)]
                known = [one for one in done if 5 / count_updates(one) <= update / updates]
                assert quality < statistics.median(map(metric_of, known))
                break
        seen[run["batch_size"], end.status == PRUNED] += 1
        sweep = sweep.add(end)
        search.finish(sweep, number)
    assert seen["8", True]
    assert seen["8", False]


def test_a_smaller_metric_can_be_better() -> None:
    search, sweep = OptunaSearch(SETTINGS, False), make_sweep()
    for _ in range(30):
        sweep = train(search, sweep, lambda run: 1 - metric_of(run))
    distances = [abs(math.log10(rate) + 4) for rate in find_rates(sweep)]
    assert sum(distances[20:]) < 0.6 * sum(distances[:10])
    assert sweep.list_with_status(PRUNED)


def test_half_of_the_first_draws_of_a_wide_range_are_below_the_middle_of_its_logarithms() -> None:
    search, sweep = OptunaSearch(replace(SETTINGS, sampler="random"), True), make_sweep()
    for _ in range(40):
        sweep = sweep.add(search.propose(sweep))
    rates = find_rates(sweep)
    assert 0.3 < sum(rate < 1e-4 for rate in rates) / 40 < 0.7
    # Numbers are short, so that they can be read.
    assert max(len(run["learning_rate"]) for run in sweep.header.runs) <= len("0.0001234")
    assert rates != find_rates(sweep)[::-1]
    again = OptunaSearch(replace(SETTINGS, sampler="random"), True).propose(make_sweep())
    assert again.runs == sweep.header.runs[:1]
    other = OptunaSearch(replace(SETTINGS, sampler="random", seed=2), True).propose(make_sweep())
    assert other.runs != again.runs


@pytest.mark.parametrize("stopped", [3, 12, 20])
def test_a_continued_search_chooses_what_it_would_have_chosen(stopped: int) -> None:
    whole, sweep = OptunaSearch(SETTINGS, True), make_sweep()
    for _ in range(stopped):
        sweep = train(whole, sweep)
    continued = OptunaSearch(SETTINGS, True)
    continued.restore(sweep)
    after = sweep
    for _ in range(5):
        sweep, after = train(whole, sweep), train(continued, after)
    assert after.trials == sweep.trials
    assert after.list_with_status(PRUNED) == sweep.list_with_status(PRUNED)
    # The results matter after the first ten, which are random: a search that has not got them chooses something else.
    forgetful = OptunaSearch(SETTINGS, True)
    forgetful.restore(Sweep(sweep.folder, sweep.header, trials=sweep.trials))
    assert (forgetful.propose(sweep) == whole.propose(sweep)) == (len(sweep.trials) < 10)


def test_each_configuration_is_trained_with_all_seeds_and_counts_by_their_mean() -> None:
    settings = replace(SETTINGS, spaces=[{"learning_rate": "1e-6..1e-2", "seed": "1,2"}], seeds=2, trials=3)
    search, sweep = OptunaSearch(settings, True), make_sweep(settings)
    assert sweep.total == 6
    sweep = train(search, sweep, lambda run: 0.8 if run["seed"] == "1" else 0.6)
    assert [run["seed"] for run in sweep.header.runs] == ["1", "2"]
    assert len({run["learning_rate"] for run in sweep.header.runs}) == 1
    assert (sweep.total, sweep.list_runs(1), sweep.find_trial(2)) == (6, range(1, 3), 1)
    status, value = judge_trial(sweep, 1)
    assert (status, round(value, 9)) == (DONE, 0.7)
    assert search._study.trials[0].value == pytest.approx(0.7)
    assert search._study.trials[0].intermediate_values == pytest.approx({10: 0.68, 20: 0.69, 30: 0.7})
    # A run that failed is missing in the mean. Without any metric, Optuna learns of a failure.
    sweep = train(search, sweep, lambda run: 0.8 if run["seed"] == "1" else math.nan)
    assert judge_trial(sweep, 2) == (DONE, 0.8)
    assert judge_trial(sweep, 2, retried=[4]) == ("", 0.0)
    sweep = train(search, sweep, lambda run: math.nan)
    assert judge_trial(sweep, 3) == (FAILED, 0.0)
    assert search._study.trials[2].state.name == "FAIL"


def test_the_seeds_of_a_pruned_configuration_that_were_not_trained_are_pruned_too() -> None:
    settings = replace(SETTINGS, spaces=[{"learning_rate": "1e-6..1e-2", "seed": "1,2"}], seeds=2)
    search, sweep = OptunaSearch(settings, True), make_sweep(settings)
    while not sweep.list_with_status(PRUNED):
        sweep = train(search, sweep)
    assert sweep.list_with_status(PRUNED) == [*sweep.list_runs(len(sweep.trials))]
    assert search._study.trials[-1].state.name == "PRUNED"


def test_no_configuration_is_trained_twice() -> None:
    settings = replace(SETTINGS, trials=6, spaces=[{"lora_rank": "4,8,16", "batch_size": "8..9", "epochs": "2"}])
    search, sweep = OptunaSearch(settings, True), make_sweep(settings)
    for _ in range(6):
        sweep = train(search, sweep, lambda run: float(run["lora_rank"]))
    assert len({tuple(run.items()) for run in sweep.header.runs}) == 6
    assert all(run["epochs"] == "2" and run["batch_size"] in ("8", "9") for run in sweep.header.runs)
    with pytest.raises(CpuftError, match="hardly any configuration is left after 6 of --trials 6"):
        search.propose(sweep)
    continued = OptunaSearch(settings, True)
    continued.restore(sweep)
    assert len(continued._open) == 0


def test_alternatives_have_parameters_of_their_own() -> None:
    spaces = [
        {"epochs": Values(("1", "2")), "lora_rank": Values(("0",)), "learning_rate": Values(low=1e-5, high=1e-4)},
        {"epochs": Values(("1", "2")), "lora_rank": Values(("8", "16")), "learning_rate": Values(low=1e-4, high=1e-3)},
    ]
    assert name_parameters(spaces) == [
        {"epochs": "epochs", "learning_rate": "learning_rate (1)"},
        {"epochs": "epochs", "lora_rank": "lora_rank (2)", "learning_rate": "learning_rate (2)"},
    ]
    texts = [
        {"epochs": "1,2", "lora_rank": "0", "learning_rate": "1e-5..1e-4"},
        {"epochs": "1,2", "lora_rank": "8,16", "learning_rate": "1e-4..1e-3"},
    ]
    settings = replace(SETTINGS, spaces=texts)
    search, sweep = OptunaSearch(settings, True), make_sweep(settings)
    for _ in range(25):
        sweep = train(search, sweep)
    for run in sweep.header.runs:
        assert (float(run["learning_rate"]) <= 1e-4) == (run["lora_rank"] == "0")
    assert {run["lora_rank"] for run in sweep.header.runs} == {"0", "8", "16"}
    continued = OptunaSearch(settings, True)
    continued.restore(sweep)
    assert continued.propose(sweep) == search.propose(sweep)


def test_a_journal_with_other_configurations_is_refused() -> None:
    sweep = make_sweep()
    for params in ({"learning_rate": "1"}, {"learning_rate": "x"}, {}, {"alternative": "3", "learning_rate": "1e-4"}):
        odd = sweep.add(Trial(1, params, [{"learning_rate": "1e-4"}], [1.0]))
        with pytest.raises(CpuftError, match="a configuration that its search cannot have chosen"):
            OptunaSearch(SETTINGS, True).restore(odd)
    odd = sweep.add(Trial(1, {"learning_rate": "1e-4"}, [{"learning_rate": "2e-4"}], [1.0]))
    with pytest.raises(CpuftError, match="a configuration that its search cannot have chosen"):
        OptunaSearch(SETTINGS, True).restore(odd)


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/trials.db"


def test_a_storage_gets_the_study_also_when_a_sweep_continues(storage: str) -> None:
    search, sweep = OptunaSearch(SETTINGS, True, storage), make_sweep()
    search.restore(sweep)
    for _ in range(4):
        sweep = train(search, sweep)
    # The sweep was killed before the journal had the fifth one, and goes on without the storage for a while.
    search.propose(sweep)
    without = OptunaSearch(SETTINGS, True)
    without.restore(sweep)
    sweep = train(without, sweep)
    sweep = sweep.add(without.propose(sweep))
    continued = OptunaSearch(SETTINGS, True, storage)
    continued.restore(sweep)
    states = [(trial.user_attrs["cpuft_trial"], trial.state.name) for trial in continued._study.trials]
    assert states == [
        *((number, "COMPLETE") for number in range(1, 5)),
        (5, "FAIL"),
        (5, "COMPLETE"),
        (6, "RUNNING"),
    ]
    assert continued._study.best_value == max(metric_of(run) for run in sweep.header.runs[:5])
    assert continued.propose(sweep) == without.propose(sweep)


def test_a_study_of_another_sweep_is_not_used(storage: str, tmp_path: Path) -> None:
    import optuna

    OptunaSearch(SETTINGS, True, storage)
    with pytest.raises(
        CpuftError, match=r"the study one in --storage belongs to another sweep: give another --run-dir"
    ):
        OptunaSearch(replace(SETTINGS, token="b"), True, storage, is_new=True)
    OptunaSearch(replace(SETTINGS, token="b", study="two"), True, storage, is_new=True)
    own = optuna.create_study(storage=storage, study_name="mine")
    own.optimize(lambda trial: trial.suggest_float("x", 0, 1), 1)
    with pytest.raises(CpuftError, match="the study mine in --storage belongs to another sweep: give another storage"):
        OptunaSearch(replace(SETTINGS, study="mine"), True, storage)
    with lock_study(storage, "one"):
        with (
            pytest.raises(CpuftError, match="another cpuft sweep works on the study one in --storage"),
            lock_study(storage.replace("trials.db", "x/../trials.db"), "one"),
        ):
            pass
        with lock_study(storage, "two"), lock_study("postgresql://a/b", "one"):
            pass
    with lock_study(storage, "one"):
        pass


def test_a_storage_that_cannot_be_used_is_named_without_its_password(storage: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database" * 1000)
    for url, problem in (
        (f"sqlite:///{tmp_path}/none/a.db", "unable to open database file"),
        (f"sqlite:///{tmp_path}/text", "file is not a database"),
        ("nothing", "Could not parse SQLAlchemy URL"),
        ("oracle+nothing://user:secret@host/x", "Can't load plugin"),
    ):
        with pytest.raises(CpuftError, match="--storage cannot be used") as told:
            OptunaSearch(SETTINGS, True, url)
        assert problem in str(told.value)
        assert "secret" not in str(told.value)
        assert told.value.exit_code == 2


def test_a_storage_that_another_program_locks_is_an_error_with_a_next_step(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr("sqlite3.dbapi2.connect", lambda *words, **options: connect(*words, **options | {"timeout": 0}))
    search, sweep = OptunaSearch(SETTINGS, True, f"{storage}?timeout=0"), make_sweep()
    search.restore(sweep)
    other = connect(storage.removeprefix("sqlite:///"))
    other.execute("begin exclusive")
    with pytest.raises(CpuftError, match=r"database is locked.*continue with cpuft sweep --resume") as told:
        search.propose(sweep)
    assert told.value.exit_code == 1
    with pytest.raises(
        CpuftError, match=r"database is locked.*give the URL of a database that no other program locks"
    ) as told:
        OptunaSearch(SETTINGS, True, f"{storage}?timeout=0")
    assert told.value.exit_code == 2
    other.close()


def test_without_optuna_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *words: Any, **options: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return real(name, *words, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(CpuftError, match=r"--search optuna needs Optuna, which is not installed: .*\[optuna\]"):
        OptunaSearch(SETTINGS, True)


def test_evaluations_of_a_run_that_started_anew_count_once() -> None:
    sweep = make_sweep()
    lines: list[JournalLine] = [
        Trial(1, {"learning_rate": "1e-4"}, [{"learning_rate": "1e-4"}], [1.0]),
        AttemptStart(1, 1, "node1", "run-1", 0.0),
        Evaluation(1, 1, 10, {"accuracy": 0.5}),
        AttemptStart(1, 2, "node2", "run-1-attempt-2", 0.0),
        Evaluation(1, 2, 10, {"accuracy": 0.6}),
        AttemptStart(1, 3, "node2", "run-1-attempt-2", 0.0),
        Evaluation(1, 3, 10, {"accuracy": 0.7}),
        Evaluation(1, 3, 20, {"accuracy": 0.8}),
    ]
    for line in lines:
        sweep = sweep.add(line)
    assert sweep.average_curve(1) == [(10, 0.7), (20, 0.8)]
    assert sweep.count_evaluations(1) == 2

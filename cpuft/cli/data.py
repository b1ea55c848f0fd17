"""`cpuft data`: what a training would learn from, read on this machine. Imports no torch."""

from __future__ import annotations

from typing import Any

import click

from cpuft.cli.common import plan_module, run_or_print
from cpuft.cli.options import CONFIG_FILE, DRY_RUN_HERE, Verb, Verbs, make_options, pick
from cpuft.config.conflicts import refuse_conflicts
from cpuft.config.fields import format_arguments
from cpuft.config.train import DATA_OPTIONS, TrainConfig
from cpuft.errors import CpuftError


@click.group(cls=Verbs)
def data() -> None:
    """Look at the data of a training before it starts."""


@data.command(
    cls=Verb,
    params=[
        *make_options(TrainConfig, only=DATA_OPTIONS),
        click.Option(
            ["--baseline"],
            is_flag=True,
            help="Show what the metric is without a training: of word and character counts with a linear model, or of "
            "BM25 for search; of an embedding model or reranker, also before its training",
        ),
        click.Option(
            ["--static-model"],
            default="",
            metavar="NAME",
            help="With --baseline, for tasks with classes of texts, also show the metric of static embeddings with a "
            "linear model: the folder or the Hugging Face hub name of a model of model2vec",
        ),
        click.Option(["--json"], is_flag=True, help="Print the numbers as one JSON object"),
        DRY_RUN_HERE,
        CONFIG_FILE,
    ],
)
def show(dry_run: bool, json: bool, baseline: bool, static_model: str, **values: Any) -> None:
    """Show columns, labels, lengths and duplicates of the data that a training would use.

    The options are those of cpuft launch, and the examples are read and tokenised in the same way: the columns that are
    used, the examples of each class, the lengths in tokens, how many examples --max-length cuts, how
    many validation examples are training examples, too, labels that only validation examples have, and the share of
    tokens that the tokenizer does not know. What cpuft launch would refuse or what harms a training is named at the
    end. With --baseline, it also tells what the metric would be without a training.
    """
    if static_model and not baseline:
        raise CpuftError("--static-model adds static embeddings to the baseline: give --baseline as well")
    config = pick(TrainConfig, values)
    refuse_conflicts(config)
    own = ("json" if json else "text", "baseline" if baseline else "", static_model)
    why = f"read the data of --task {config.task}"
    run_or_print(plan_module(why, "cpuft.train.data.show", (*own, *format_arguments(config))), dry_run)

"""`cpuft mine`: hard negatives for the training of embedding models and rerankers. Imports no torch."""

from __future__ import annotations

from typing import Any

import click

from cpuft.cli.common import plan_module, run_or_print
from cpuft.cli.options import CONFIG_FILE, DRY_RUN_HERE, Verb, make_options, pick
from cpuft.config.fields import format_arguments
from cpuft.config.mine import MineConfig
from cpuft.config.table_files import OUTPUT_ENDINGS
from cpuft.errors import CpuftError


@click.command(cls=Verb, params=[*make_options(MineConfig), DRY_RUN_HERE, CONFIG_FILE])
def mine(dry_run: bool, **values: Any) -> None:
    """Find hard negatives: for each anchor, similar documents that do not belong to it.

    The rows of --file have an anchor, such as a question, and its positive, such as the answer. An embedding model
    compares each anchor with all positives of the file, and with the documents of --corpus. The most similar documents
    that the limits allow become the negatives of the anchor. Positives of an equal anchor, and the anchor itself, never
    do. The search is exact. --task pairs and --task rerank train on the result.
    """
    asked = pick(MineConfig, values)
    check_mining(asked)
    step = plan_module(f"mine hard negatives for {asked.file}", "cpuft.train.write_negatives", format_arguments(asked))
    run_or_print(step, dry_run)


def check_mining(asked: MineConfig) -> None:
    """Raise CpuftError if an option that `cpuft mine` needs is missing, or options do not fit together."""
    if not asked.model:
        raise CpuftError("there is no --model: name the embedding model that compares the texts, such as minilm")
    if not asked.file:
        raise CpuftError("there is no --file: give a file with rows of an anchor and a positive")
    if not asked.output:
        raise CpuftError(f"there is no --output: give a file that ends in {', '.join(OUTPUT_ENDINGS)}")
    if asked.corpus_column and not asked.corpus:
        raise CpuftError("--corpus-column names a column of --corpus: add --corpus, or leave it out")
    if 0 < asked.search_depth < asked.skip_top + asked.negatives:
        raise CpuftError(
            f"--search-depth {asked.search_depth} leaves fewer than {asked.negatives} documents after --skip-top "
            f"{asked.skip_top}: raise --search-depth, or lower the others"
        )

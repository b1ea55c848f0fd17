"""The options of `cpuft data show` for what can be had without a training."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config.fields import option


@dataclass(frozen=True)
class BaselineConfig:
    """Which baselines `cpuft data show` computes."""

    baseline: bool = option(
        False,
        "Show what the metric is without a training: of word and character counts with a linear model, or of BM25 for "
        "search; of an embedding model or reranker, also before its training",
    )
    static_model: str = option(
        "",
        "With --baseline, for tasks with classes of texts, also show the metric of static embeddings with a linear "
        "model: the folder or the Hugging Face hub name of a model of model2vec",
        takes="NAME",
    )

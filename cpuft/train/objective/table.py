"""The objective of each kind of task."""

from __future__ import annotations

from cpuft.config.train import TrainConfig
from cpuft.train.data.archive import Prepared
from cpuft.train.data.chat import read_chat_template
from cpuft.train.data.recipe import find_class_weights, find_metrics, parse_dimensions
from cpuft.train.embedding_form import choose_form
from cpuft.train.objective.base import Objective
from cpuft.train.objective.embeddings import Pairs, ScoredPairs
from cpuft.train.objective.labels import (
    Classification,
    ClassObjective,
    MultiLabelClassification,
    Regression,
    TokenClassification,
)
from cpuft.train.objective.masked_lm import MaskedLanguageModelling
from cpuft.train.objective.next_token import CausalLanguageModelling, Chat
from cpuft.train.objective.relevance import Relevance, read_activation

OBJECTIVES: dict[str, type[Objective]] = {
    "class": Classification,
    "score": Regression,
    "labels": MultiLabelClassification,
    "tags": TokenClassification,
    "masked": MaskedLanguageModelling,
    "causal": CausalLanguageModelling,
    "chat": Chat,
    "pairs": Pairs,
    "similarity": ScoredPairs,
    "relevance": Relevance,
}
"""Objectives by `Prepared.kind`."""


def make_objective(config: TrainConfig, prepared: Prepared) -> Objective:
    """Return the objective for `prepared.kind` (OBJECTIVES). CpuftError: an option or the file it names is invalid."""
    objective = OBJECTIVES[prepared.kind]
    shared = (prepared.labels, find_metrics(config, prepared), prepared.pad_id, prepared.vocab_size)
    if objective is MaskedLanguageModelling:
        return objective(*shared, kinds=prepared.token_kinds, mask_id=prepared.mask_id, config=config)
    if objective is Chat:
        return Chat(*shared, template=read_chat_template(config.chat_template) if config.chat_template else "")
    if objective is Pairs:
        form = choose_form(config)
        usual = 0.05 if form.similarity == "cosine" else 1.0
        return Pairs(
            *shared,
            form=form,
            texts=len(prepared.texts),
            matryoshka=parse_dimensions(config.matryoshka),
            temperature=config.temperature if config.temperature > 0 else usual,
        )
    if objective is ScoredPairs:
        dimensions = parse_dimensions(config.matryoshka)
        return ScoredPairs(*shared, form=choose_form(config), matryoshka=dimensions, loss=config.similarity_loss)
    if objective is Relevance:
        return Relevance(*shared, activation=read_activation(config), max_length=config.max_length)
    if issubclass(objective, ClassObjective):
        weights = find_class_weights(config.class_weights, prepared)
        return objective(*shared, label_smoothing=config.label_smoothing, class_weights=weights)
    return objective(*shared)

"""Say in one line how the data of a run was understood: examples, labels, columns, and what was cut."""

from __future__ import annotations

import math

from cpuft.config.train import TrainConfig
from cpuft.judge.metrics import LEAST_RELEVANT
from cpuft.serialization import to_number
from cpuft.tasks import TEXT_KINDS
from cpuft.train.data.archive import UNKNOWN, Prepared, count_classes
from cpuft.train.data.labels import SCORE_KINDS
from cpuft.train.data.tables import MISSING

_MAX_LISTED_LABELS = 10


def describe_data(prepared: Prepared, config: TrainConfig) -> str:
    """Return one line on how the data was understood, whose parts are separated by `; `.

    For example: `training on 3,668 examples, validating on 408; labels: 2 classes, 0 (1,194), 1 (2,474); columns:
    sentence1, sentence2 -> label; 1.2 % of the examples cut at --max-length 128`.
    """
    validation = " and ".join(f"{len(tokens):,}" for tokens in prepared.validation.values())
    if prepared.kind == "pairs":
        tokens = prepared.validation[""]
        queries = int(tokens.labels[:, 0].max()) + 1
        validation = f"{queries:,} {'query' if queries == 1 else 'queries'} among {len(tokens) - queries:,} documents"
    count = len(prepared.train)
    parts = [f"training on {count:,} example{'s' * (count != 1)}, validating on {validation}"]
    if prepared.kind == "pairs":
        parts += ["labels: none, each anchor belongs to its positive", f"columns: {', '.join(prepared.texts)}"]
    elif prepared.kind == "chat":
        said = int((prepared.train.labels == 1).sum())
        parts += [
            prepared.note,
            f"the assistant says {said:,} of {len(prepared.train.ids):,} tokens, which are learned",
        ]
    elif prepared.kind in ("masked", "causal"):
        parts.append(f"each example is a piece of text of up to {config.max_length} tokens, no labels are needed")
    else:
        parts += [_describe_labels(prepared, config), f"columns: {', '.join(prepared.texts)} -> {prepared.label}"]
    if prepared.kind not in TEXT_KINDS and prepared.truncated != UNKNOWN:
        # A share that would round to 0.0 % is written as the number of examples.
        share = prepared.truncated / max(1, count)
        some = f"{share:.1%}".replace("%", " %") if share >= 0.001 else f"{prepared.truncated or 'none'}"
        parts.append(f"{some} of the examples cut at --max-length {config.max_length}")
    if prepared.note and prepared.kind != "chat":
        parts.append(prepared.note)
    return "; ".join(parts)


def _describe_labels(prepared: Prepared, config: TrainConfig) -> str:
    labels = prepared.train.labels
    if prepared.kind in SCORE_KINDS:
        bounds = f"{float(labels.min()):g} to {float(labels.max()):g}"
        if prepared.kind == "relevance":
            count = int((labels >= LEAST_RELEVANT).sum())
            return f"labels: scores from {bounds}, {count:,} examples of {len(labels):,} with relevant documents"
        hint = " (--label-type class learns them as classes)" if config.task == "files" else ""
        learned = (
            "compared with the similarity of embeddings" if prepared.kind == "similarity" else "learned by regression"
        )
        return f"labels: numbers from {bounds}, {learned}{hint}"
    if prepared.kind == "labels":
        counts, what = labels.sum(0).astype(int).tolist(), "classes, of which an example may have several"
    else:
        counts = count_classes(labels, len(prepared.labels)).tolist()
        what = "tags of words" if prepared.kind == "tags" else "classes"
    common = sorted(zip(prepared.labels, counts), key=lambda one: -one[1])[:_MAX_LISTED_LABELS]
    shown = prepared.labels if len(prepared.labels) <= _MAX_LISTED_LABELS else [label for label, _ in common]
    named = ", ".join(f"{label} ({count:,})" for label, count in zip(prepared.labels, counts) if label in shown)
    rest = f" and {len(prepared.labels) - len(shown)} rarer ones" if len(shown) < len(prepared.labels) else ""
    if missing := [label for label in prepared.labels if label in MISSING]:
        rest += f" ({missing[0]} may stand for rows without a label, which --skip-unlabelled leaves out)"
    is_own = prepared.kind == "class" and config.task == "files"
    are_numbers = is_own and all(math.isfinite(to_number(label)) for label in prepared.labels)
    hint = " (the labels are numbers: --label-type number learns them by regression)" * are_numbers
    return f"labels: {len(prepared.labels)} {what}, {named}{rest}{hint}"

"""The model card: a README.md in the folder of the trained model, made from the record of the run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cpuft
from cpuft.config.fields import option_names
from cpuft.config.train import EVALUATION_ONLY, TRAINING_INPUTS, TrainConfig
from cpuft.errors import counted
from cpuft.files import hash_text
from cpuft.record import BaselineLine, EvaluationLine, Footer, Header, format_baseline, format_line
from cpuft.tasks import SENTENCE_TRANSFORMERS_KINDS, TASKS

_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?", re.ASCII)
_WITHOUT_EFFECT = ("report_to", "save_model", "checkpoint_every", "comm_timeout", *EVALUATION_ONLY)
_LEFT_OUT = ("task", *TRAINING_INPUTS, *_WITHOUT_EFFECT)
"""Options that the recipe does not show: they are elsewhere in the card, name local files, or change no weight."""


def format_model_card(
    header: Header, evaluation: EvaluationLine, footer: Footer, baseline: BaselineLine | None = None
) -> str:
    """Return a run's card as Markdown without host names and local paths, whose layout no text of a user can break."""
    base = header.model if _is_of_hub(header.model) and not header.options.get("from_config") else ""
    kind = TASKS[header.task].kind if header.task in TASKS else ""
    is_known = kind in SENTENCE_TRANSFORMERS_KINDS
    library = "sentence-transformers" if is_known else "transformers"
    front: dict[str, Any] = {"library_name": library, "tags": ["cpuft"], "metrics": list(evaluation.metrics)}
    if is_known:
        front["pipeline_tag"] = "text-ranking" if kind == "relevance" else "sentence-similarity"
    elif kind == "chat" or header.options.get("causal"):
        front["pipeline_tag"] = "text-generation"
    if base:
        front["base_model"] = base
    default, always = TrainConfig(), ("epochs", "batch_size", "learning_rate", "seed")
    recipe = {
        name: value
        for name in option_names(TrainConfig)
        if name in header.options and name not in _LEFT_OUT
        if (value := header.options[name]) != getattr(default, name) or name in always
    }
    # Ranks that are named only by number: the names of hosts are their owner's.
    speed = {
        "place": f"{counted(header.world_size, 'rank')} on {counted(len(header.hosts), 'host')} ({header.cpu_model})",
        "precision": header.precision,
        "backend": header.backend,
        "training": f"{footer.train_seconds:.0f} s, {footer.steady_samples_per_second:.1f} samples/s",
        "peak memory of a rank": f"{footer.peak_memory_bytes / 1e9:.2f} GB",
    }
    weights = f"after update {footer.saved_step}, the best evaluation" if footer.saved_step else "after the last update"
    parts = [
        "---",
        *(f"{name}: {json.dumps(value)}" for name, value in front.items()),
        "---",
        "",
        f"# A model for the task {_inline(header.task)}",
        "",
        f"{_inline(base) if base else 'A model'} was fine-tuned with cpuft {cpuft.__version__} on "
        f"{counted(header.examples, 'example')}. The weights are those {weights}.",
        "",
        *_table("Metrics on the validation examples", {k: f"{v:.4f}" for k, v in evaluation.metrics.items()}),
        *([f"For comparison, without a model: {_inline(format_baseline(baseline))}.", ""] if baseline else []),
        *_table("Recipe", {f"--{name.replace('_', '-')}": str(value) for name, value in recipe.items()}),
        *_table("Hosts and speed", speed),
        *_table("Versions", header.versions),
        f"Checksum of the examples: `{header.data}`; of the parameters: `{footer.checksum}`; of the run: "
        f"`{hash_text(format_line(header), 16)}`.",
        "",
    ]
    return "\n".join(parts)


def _is_of_hub(model: str) -> bool:
    """Return whether a name is not that of a folder, or of what was one in a folder of this place."""
    return bool(_HUB_NAME.fullmatch(model)) and not Path(Path(model).parts[0]).exists()


def _inline(text: str) -> str:
    """Return a text for a line of Markdown, with ? for line breaks and whatever makes tables, code or links."""
    plain = "".join(c if c.isprintable() and c not in "|`<>[]" else "?" for c in text)
    return re.sub(r":(?=//)|(?<=www)\.", "?", plain, flags=re.IGNORECASE)


def _table(title: str, values: Mapping[str, str]) -> list[str]:
    rows = [f"| {_inline(name)} | {_inline(str(value))} |" for name, value in values.items()]
    return [f"## {title}", "", "| | |", "| --- | --- |", *rows, ""]

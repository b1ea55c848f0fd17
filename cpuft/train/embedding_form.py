"""How a model makes embeddings, read from and written to the files that sentence-transformers has beside a model.

Data preparation uses this module, too, so that it imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cpuft.config.train import POOLINGS, TrainConfig
from cpuft.errors import CpuftError
from cpuft.model_files import NORMALIZE_FOLDER, POOLING_FOLDER, SENTENCE_TRANSFORMERS_FILES
from cpuft.serialization import load, parse_json
from cpuft.train.checkpoint.final_model import MODEL_DIR
from cpuft.train.model import find_model, locate_file
from cpuft.train.startup import find_hub_problem

SIMILARITIES = ("cosine", "dot")
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names under which models store the prompt of documents; the first one that a model has is used."""

_MODULES, _MODEL_SETTINGS, _TRANSFORMER_SETTINGS, _POOLING_SETTINGS, _NORMALIZE_SETTINGS = SENTENCE_TRANSFORMERS_FILES
_POOLING_KEYS = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "lasttoken": "pooling_mode_lasttoken",
}
"""Keys of poolings in the settings of sentence-transformers before version 6, which later versions read, too."""


@dataclass(frozen=True)
class EmbeddingForm:
    """How a model turns texts into embeddings."""

    pooling: str = "mean"
    """One of POOLINGS."""
    normalize: bool = False
    """Whether embeddings are scaled to length 1."""
    similarity: str = "cosine"
    """One of SIMILARITIES."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Texts that are put in front of a text, by what the text is, such as `query` and `document`."""
    max_length: int = 0
    """Number of tokens at which the model cuts texts; 0: it does not say."""
    dimensions: int = 0
    """Number of dimensions to which embeddings are cut; 0: all that the model has."""

    @property
    def query_prompt(self) -> str:
        """Text that is put in front of queries; empty if there is none."""
        return self.prompts.get("query", "")

    @property
    def document_prompt(self) -> str:
        """Text that is put in front of documents, by the first name of DOCUMENT_PROMPTS; empty if there is none."""
        return next((self.prompts[name] for name in DOCUMENT_PROMPTS if name in self.prompts), "")


def find_embedding_model(name: str) -> str:
    """Return NAME/model if `name` is the folder of a finished run, else what `find_model` returns or raises."""
    is_run = Path(name, MODEL_DIR, "config.json").exists()
    return str(Path(name, MODEL_DIR)) if is_run else find_model(name)


def read_form(source: str, pooling: str = "") -> EmbeddingForm:
    """Return how a model of `find_model`, a folder or hub name, makes embeddings, from its sentence-transformers files.

    Without these files, embeddings are the mean of the hidden states, as in sentence-transformers. `pooling` replaces
    the model's unless it is "". Raises CpuftError: a file is damaged or cannot be fetched, or cpuft cannot compute the
    form.
    """
    modules = _read(source, _MODULES, list[dict[str, Any]])
    if modules is None:
        _refuse_unknown(source)
        return EmbeddingForm(pooling or "mean")
    found, normalize = pooling or "mean", False
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling":
            found = pooling or _read_pooling(source, str(module.get("path", "")))
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise CpuftError(f"{source} has a module {name or str(module)[:60]}, unknown to cpuft: give another model")
    settings = _read(source, _MODEL_SETTINGS, dict[str, Any]) or {}
    lengths = _read(source, _TRANSFORMER_SETTINGS, dict[str, Any]) or {}
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise CpuftError(
            f"the embedding model {source} compares embeddings by {similarity!r:.40} ({_MODEL_SETTINGS}), which cpuft "
            f"does not compute: set similarity_fn_name there to {' or '.join(SIMILARITIES)}"
        )
    try:
        prompts = load(dict[str, str], settings.get("prompts") or {}, "prompts")
        max_length = load(int, lengths.get("max_seq_length") or 0, "max_seq_length")
        dimensions = load(int, settings.get("truncate_dim") or 0, "truncate_dim")
    except ValueError as error:
        raise CpuftError(
            f"the files of sentence-transformers in {source} are damaged ({error}): copy or download the model again"
        ) from None
    prompts = {name: text for name, text in prompts.items() if text}
    return EmbeddingForm(found, normalize, similarity, prompts, max(0, max_length), max(0, dimensions))


def _refuse_unknown(source: str) -> None:
    """Raise CpuftError if nobody knows whether a model of the hub has files of sentence-transformers."""
    problem = "" if Path(source).is_dir() else find_hub_problem()
    if not problem:
        return
    from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache

    if try_to_load_from_cache(source, _MODULES) is not _CACHED_NO_EXIST:
        raise CpuftError(
            f"cpuft cannot find out how the model {source} makes embeddings, because {problem} and {_MODULES} is not "
            f"in its cache: download the whole model where there is internet, and name its folder"
        )


def has_form(source: str) -> bool:
    """Return whether a folder's or hub name's files have a pooling, as no reranker's do; False without. CpuftError:
    damaged.
    """
    modules = _read(source, _MODULES, list[dict[str, Any]]) or []
    return any(str(module.get("type", "")).endswith(".Pooling") for module in modules)


def read_settings(source: str) -> dict[str, Any] | None:
    """Return the content of a model's config_sentence_transformers.json; `source` is a folder, or a hub name, whose
    file is downloaded. None: the file is missing, or the hub does not answer. Raises CpuftError: it is damaged.
    """
    settings: dict[str, Any] | None = _read(source, _MODEL_SETTINGS, dict[str, Any])
    return settings


def _read_pooling(source: str, folder: str) -> str:
    settings = _read(source, f"{folder}/config.json", dict[str, Any]) or {}
    if "pooling_mode" in settings:
        chosen = settings["pooling_mode"]
        modes = chosen if isinstance(chosen, list) else [chosen]
    else:
        names = {key: name for name, key in _POOLING_KEYS.items()}
        modes = [names.get(key, key) for key, value in settings.items() if key.startswith("pooling_mode_") and value]
    is_known = len(modes) == 1 and modes[0] in POOLINGS
    if not is_known or not settings.get("include_prompt", True):
        what = "leaves prompts out" if is_known else f"is {' and '.join(map(str, modes)) or 'none'}"
        raise CpuftError(
            f"the pooling of {source} {what} ({folder}/config.json): replace it by --pooling {' or '.join(POOLINGS)}"
        )
    return str(modes[0])


def _read(source: str, name: str, kind: type[Any]) -> Any:
    """Return the JSON value of a model's file, or None without such a file; raise CpuftError if it is damaged."""
    path = locate_file(source, name)
    if path is None:
        return None
    try:
        return load(kind, parse_json(path.read_text(encoding="utf-8")), name)
    except (OSError, ValueError) as error:
        raise CpuftError(f"{path} cannot be read ({error}): copy or download the model again") from None


def write_form(folder: Path, form: EmbeddingForm, hidden_size: int) -> None:
    """Write the files by which sentence-transformers loads the model in `folder`, in place of earlier ones."""
    parts = [("", "Transformer"), (POOLING_FOLDER, "Pooling")]
    if form.normalize:
        parts.append((NORMALIZE_FOLDER, "Normalize"))
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(parts)
    ]
    pooling = {key: name == form.pooling for name, key in _POOLING_KEYS.items()}
    settings: dict[str, Any] = {
        "prompts": form.prompts,
        "default_prompt_name": None,
        "similarity_fn_name": form.similarity,
    }
    if form.dimensions:
        settings["truncate_dim"] = form.dimensions
    files: dict[str, Any] = {
        _MODULES: modules,
        _POOLING_SETTINGS: {"word_embedding_dimension": hidden_size, **pooling, "include_prompt": True},
        _MODEL_SETTINGS: settings,
        _TRANSFORMER_SETTINGS: {"max_seq_length": form.max_length or None, "do_lower_case": False},
    }
    if form.normalize:
        # A folder without a file would be lost where the model is stored with git, as on the hub.
        files[_NORMALIZE_SETTINGS] = {}
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def choose_form(config: TrainConfig) -> EmbeddingForm:
    """Return how the model that these options train makes embeddings: as the model says, but for --pooling and prompts
    that are not auto ("": no prompt), and a longer --max-length. CpuftError: the model, or a file of it, is unusable.
    """
    pooling = "" if config.pooling == "auto" else config.pooling
    source = "" if config.from_config else find_model(config.model)
    form = read_form(source, pooling) if source else EmbeddingForm(pooling or "mean")
    prompts = dict(form.prompts)
    if config.query_prompt != "auto":
        prompts["query"] = config.query_prompt
    if config.document_prompt != "auto":
        prompts = {name: text for name, text in prompts.items() if name not in DOCUMENT_PROMPTS}
        prompts["document"] = config.document_prompt
    prompts = {name: text for name, text in prompts.items() if text}
    return replace(form, prompts=prompts, max_length=max(config.max_length, form.max_length))

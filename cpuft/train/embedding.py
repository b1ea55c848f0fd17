"""Embedding models: from hidden states to one vector for each text, in the file format of sentence-transformers.

`EmbeddingForm` says how a model makes embeddings. It is read from the files that sentence-transformers writes beside a
model, and written to them, so that `SentenceTransformer(folder)` loads a trained model. `Embedder` embeds texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.errors import CpuftError
from cpuft.hardware import choose_precision
from cpuft.serialization import load, parse_json
from cpuft.train.checkpoint.final_model import MODEL_DIR
from cpuft.train.data.tokenizer import load_tokenizer
from cpuft.train.fast.acceleration import patch_model
from cpuft.train.model import find_model, load_weights
from cpuft.train.precision import autocast, read_cpu
from cpuft.train.startup import find_hub_problem

Embeddings = NDArray[np.float32]
"""Embeddings of texts, fp32, shape (texts, dimensions)."""

POOLINGS = ("mean", "cls", "lasttoken")
"""How the hidden states of a text's tokens become one vector: their mean, the first one, or the last one."""
SIMILARITIES = ("cosine", "dot")
"""How two embeddings are compared: by the cosine of their angle, or by their dot product."""
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names under which models store the prompt of documents; the first one that a model has is used."""

_MODULES, _MODEL_SETTINGS, _TRANSFORMER_SETTINGS = (
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
_POOLING_FOLDER, _NORMALIZE_FOLDER = "1_Pooling", "2_Normalize"
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
        """Text that is put in front of documents; empty if there is none."""
        return next((self.prompts[name] for name in DOCUMENT_PROMPTS if name in self.prompts), "")


def read_form(source: str, pooling: str = "") -> EmbeddingForm:
    """Return how a model makes embeddings, from the files of sentence-transformers beside it.

    A model without these files gets the form that sentence-transformers gives to one: the mean of its hidden states.

    Parameters
    ----------
    source: folder or hub name of the model, as `find_model` returns it.
    pooling: one of POOLINGS, in place of the model's own; empty: the model's own.

    Raises CpuftError: a file is damaged; the model has other parts than a transformer, a pooling and a normalisation;
    or its pooling is not one of POOLINGS.
    """
    modules = _read(source, _MODULES, list[dict[str, Any]])
    if modules is None:
        return EmbeddingForm(pooling or "mean")
    found, normalize = "mean", False
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling":
            found = pooling or _read_pooling(source, str(module.get("path", "")))
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise CpuftError(
                f"the embedding model {source} has a module {name or module!r:.60} ({_MODULES}), which cpuft cannot "
                f"train: give a model of a transformer, a pooling and a normalisation only"
            )
    settings = _read(source, _MODEL_SETTINGS, dict[str, Any]) or {}
    lengths = _read(source, _TRANSFORMER_SETTINGS, dict[str, Any]) or {}
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise CpuftError(
            f"the embedding model {source} compares embeddings by {similarity!r:.40} ({_MODEL_SETTINGS}), which cpuft "
            f"does not compute: set similarity_fn_name there to {' or '.join(SIMILARITIES)}"
        )
    prompts = load(dict[str, str], settings.get("prompts") or {}, f"prompts in {_MODEL_SETTINGS}")
    return EmbeddingForm(
        found,
        normalize,
        similarity,
        {name: text for name, text in prompts.items() if text},
        int(lengths.get("max_seq_length") or 0),
        int(settings.get("truncate_dim") or 0),
    )


def _read_pooling(source: str, folder: str) -> str:
    settings = _read(source, f"{folder}/config.json", dict[str, Any]) or {}
    if "pooling_mode" in settings:
        chosen = settings["pooling_mode"]
        modes = chosen if isinstance(chosen, list) else [chosen]
    else:
        names = {key: name for name, key in _POOLING_KEYS.items()}
        modes = [names.get(key, key) for key, value in settings.items() if key.startswith("pooling_mode_") and value]
    if len(modes) != 1 or modes[0] not in POOLINGS or not settings.get("include_prompt", True):
        what = (
            "leaves prompts out" if modes and modes[0] in POOLINGS else f"is {' and '.join(map(str, modes)) or 'none'}"
        )
        raise CpuftError(
            f"the pooling of the embedding model {source} {what} ({folder}/config.json): cpuft trains models with one "
            f"of the poolings {', '.join(POOLINGS)} over all tokens; name it with --pooling to replace the model's own"
        )
    return str(modes[0])


def _read(source: str, name: str, kind: type[Any]) -> Any:
    """Return the JSON value of a model's file; None if the model has no such file. Raises CpuftError: it is damaged."""
    path = Path(source, name)
    if not Path(source).is_dir():
        from transformers.utils import cached_file

        find_hub_problem()
        found = cached_file(
            source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
        if found is None:
            return None
        path = Path(found)
    if not path.exists():
        return None
    try:
        return load(kind, parse_json(path.read_text(encoding="utf-8")), name)
    except (OSError, ValueError) as error:
        raise CpuftError(f"{path} cannot be read ({error}): copy or download the model again") from None


def write_form(folder: Path, form: EmbeddingForm, width: int) -> None:
    """Write the files by which sentence-transformers loads the model in `folder`; those that are there are replaced.

    Parameters
    ----------
    width: hidden size of the model.

    Raises OSError: a file cannot be written.
    """
    parts = [("", "Transformer"), (_POOLING_FOLDER, "Pooling")]
    if form.normalize:
        parts.append((_NORMALIZE_FOLDER, "Normalize"))
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
        f"{_POOLING_FOLDER}/config.json": {"word_embedding_dimension": width, **pooling, "include_prompt": True},
        _MODEL_SETTINGS: settings,
        _TRANSFORMER_SETTINGS: {"max_seq_length": form.max_length or None, "do_lower_case": False},
    }
    if form.normalize:
        # A folder without a file would be lost where the model is stored with git, as on the hub.
        files[f"{_NORMALIZE_FOLDER}/config.json"] = {}
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def pool(pooling: str, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return one vector for each text from the hidden states of its tokens, fp32, shape (texts, hidden size).

    Parameters
    ----------
    pooling: one of POOLINGS.
    hidden: hidden states of the last layer, shape (texts, length, hidden size).
    mask: 1 for tokens and 0 for padding, which is at the end of each row; shape (texts, length). Each text has a token.

    Raises KeyError: `pooling` is none of POOLINGS.
    """
    if pooling == "cls":
        return hidden[:, 0].float()
    if pooling == "lasttoken":
        return hidden[torch.arange(len(hidden)), mask.sum(1) - 1].float()
    if pooling != "mean":
        raise KeyError(pooling)
    weights = mask.to(hidden.dtype).unsqueeze(1)
    # A product reads the hidden states once, and does not store them multiplied by the mask.
    sums = torch.bmm(weights, hidden)[:, 0]
    return sums.float() / mask.sum(1, keepdim=True)


def normalize(embeddings: torch.Tensor) -> torch.Tensor:
    """Return embeddings scaled to length 1, in the same shape; those of zeros stay zeros."""
    return torch.nn.functional.normalize(embeddings, dim=-1)


class Embedder:
    """An embedding model that computes embeddings of texts, with the layers of the fast path.

    Making it loads the model. Raises CpuftError: the model or its tokenizer cannot be found or read, or cpuft cannot
    compute its form of embeddings.

    Parameters
    ----------
    name: folder or hub name of the model, or minilm; also the folder of a finished run.
    precision: bf16, fp32, or auto: bf16 where the CPU multiplies it, else fp32.
    max_length: number of tokens at which texts are cut; 0: that of the model's form, else its number of positions.
    pooling: one of POOLINGS; empty: that of the model's form.
    """

    def __init__(self, name: str, precision: str = "auto", max_length: int = 0, pooling: str = "") -> None:
        import transformers

        is_run = Path(name, MODEL_DIR, "config.json").exists()
        self.source = str(Path(name, MODEL_DIR)) if is_run else find_model(name)
        self.form = read_form(self.source, pooling)
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.tokenizer = load_tokenizer(self.source)
        settings = transformers.AutoConfig.from_pretrained(self.source)
        read = partial(transformers.AutoModel.from_pretrained, config=settings, attn_implementation="eager")
        self.model, _ = load_weights(read, self.source)
        self.model.eval()
        positions = getattr(settings, "max_position_embeddings", 0) or 0
        self.max_length = max_length or self.form.max_length or positions or 512
        self.precision = choose_precision(precision, False, read_cpu().flags).name
        patch_model(self.model, self.precision, first_token=False)

    def embed(self, texts: Sequence[str], prompt: str = "", batch_size: int = 64) -> Embeddings:
        """Return the embeddings of texts in their order, fp32, shape (texts, dimensions).

        Parameters
        ----------
        prompt: put in front of each text.
        batch_size: number of texts of a forward pass; texts of similar length are computed together.
        """
        encoded = self.tokenizer([prompt + text for text in texts], truncation=True, max_length=self.max_length)[
            "input_ids"
        ]
        lengths = np.asarray([len(ids) for ids in encoded])
        found = np.zeros((len(texts), self.form.dimensions or self.model.config.hidden_size), np.float32)
        order = np.argsort(-lengths, kind="stable")
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size]
            mask = np.arange(lengths[part].max()) < lengths[part, None]
            ids = np.full(mask.shape, self.tokenizer.pad_token_id or 0, np.int64)
            ids[mask] = np.concatenate([encoded[place] for place in part])
            found[part] = self.embed_tokens(torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))).numpy()
        return found

    def embed_tokens(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokenised texts, fp32, shape (texts, dimensions).

        Parameters
        ----------
        ids: int64, shape (texts, length), padded at the end.
        mask: 1 for tokens and 0 for padding, of the same shape.
        """
        with torch.inference_mode(), autocast(self.precision):
            hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        embeddings = pool(self.form.pooling, hidden, mask)
        if self.form.dimensions:
            embeddings = embeddings[:, : self.form.dimensions]
        return normalize(embeddings) if self.form.normalize else embeddings

"""The frozen weights of LoRA runs in the type of --base-precision, mapped from files that the ranks of a host share.

transformers maps safetensors files, so that a weight that keeps its type is in memory once per host. The first rank
converts other weights one by one into a file in the cache folder, which all ranks of its host map.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cpuft.errors import CpuftError
from cpuft.files import cache_folder, hash_file, hash_text, write_atomically
from cpuft.serialization import load, parse_json
from cpuft.train.checkpoint.state import lay_out
from cpuft.train.data.archive import explain_cache_failures
from cpuft.train.fast.frozen import can_freeze_embedding, freeze_embedding, freeze_linear, quantise
from cpuft.train.lora import find_whole_modules
from cpuft.train.model import locate_file

_FORMAT = 1
"""Part of the cache's keys, so that files of another version are not read."""
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SCALES = ".scales"
"""End of the name of the scales of an int8 weight in a file."""


def find_weight_files(source: str) -> list[Path]:
    """Return the safetensors files of a model's folder (of adapters alone if it has any), or of a hub name, which are
    downloaded; sorted by name. Raises CpuftError: there are none, one is missing, or the index is damaged; OSError: the
    hub does not answer.
    """
    folder = Path(source)
    if Path(folder, "adapter_config.json").is_file():
        names = ["adapter_model.safetensors"]
    else:
        names = [_FILE] if locate_file(source, _FILE, needs_hub=True) else []
        if not names and (index := locate_file(source, _INDEX, needs_hub=True)):
            try:
                content = load(dict[str, Any], parse_json(index.read_text(encoding="utf-8")))
                names = sorted(set(load(dict[str, str], content.get("weight_map"), "weight_map").values()))
            except ValueError as error:
                raise CpuftError(f"{index} is damaged ({error}): copy or download the model again") from None
    files = [path for name in names if (path := locate_file(source, name, needs_hub=True))]
    if not names:
        raise CpuftError(f"--base-precision needs safetensors, which {source} lacks: save it with save_pretrained")
    if len(files) < len(names):
        known = {path.name for path in files}
        missing = next(name for name in names if name not in known)
        raise CpuftError(f"{source} lacks the weights file {missing}: copy or download the model again")
    return files


def find_stored_type(files: Iterable[list[tuple[str, tuple[int, ...]]]]) -> torch.dtype:
    """Return the type of most matrices in the files' lists by `read_stored_tensors` if bf16 or fp16, else fp32."""
    counts = Counter(dtype for tensors in files for dtype, shape in tensors if len(shape) > 1)
    return _STORED.get(counts.most_common(1)[0][0], torch.float32) if counts else torch.float32


@contextmanager
def keep_stored_type(stored: torch.dtype) -> Iterator[None]:
    """Inside, from_pretrained loads linear weights and token embeddings in the type `stored`, and all others in fp32.

    The head of a task is loaded in fp32, because it is trained. The `dtype` option of transformers is for the whole
    model and would also round constants, such as the factor of Gemma's embedding.
    """
    from transformers import PreTrainedModel

    owner: Any = PreTrainedModel
    original = owner._get_dtype_plan

    def plan(self: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
        heads = tuple(f"{head}." for head in find_whole_modules(self, ()))
        base = (name for name, one in self.named_modules() if _is_base(one, self))
        own = {f"^{name}.weight$": stored for name in base if not f"{name}.".startswith(heads)}
        return {**original(self, dtype), **own}

    owner._get_dtype_plan = plan
    try:
        yield
    finally:
        owner._get_dtype_plan = original


def _is_base(module: nn.Module, model: Any) -> bool:
    return type(module) is nn.Linear or (module is model.get_input_embeddings() and can_freeze_embedding(module))


@contextmanager
def as_fp32(model: nn.Module) -> Iterator[None]:
    """Inside, floating-point weights of other types are fp32 zeros that take no memory; they come back at the end."""
    # peft makes adapters in the type of the weights that they are for: those of bf16 weights would begin rounded.
    narrow = [(p, p.data) for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32]
    for parameter, value in narrow:
        parameter.data = torch.zeros(()).expand(value.shape)
    try:
        yield
    finally:
        for parameter, value in narrow:
            parameter.data = value


@dataclass(frozen=True)
class _Held:
    """A frozen weight that is held in the type of --base-precision, and the modules that use it."""

    name: str
    parameter: nn.Parameter
    owners: list[Any]
    dtype: torch.dtype


def hold_base(model: Any, precision: str, files: Sequence[Path]) -> None:
    """Hold a peft model's frozen linear weights and token embedding in fp32, bf16 or int8, the rest in fp32, in place.

    With int8, the token embedding and the head of a language model are bf16, as in LLM.int8. The content of `files`,
    from which the model was loaded, identifies converted weights in the cache folder. Raises CpuftError: the cache
    cannot be written.
    """
    held = _find_held(model, precision)
    # Weights of another type, and those that adapters were merged into, which are in this rank's memory.
    is_merged = any(map(_is_adapter, files))
    converted = [one for one in held if is_merged or one.parameter.dtype != one.dtype]
    scales = dict[str, Tensor]()
    if converted:
        with explain_cache_failures(cache_folder(os.environ), "the converted weights"):
            path = _find_converted(converted, precision, files)
        scales = _map_weights(converted, path)
    known = {id(one.parameter) for one in held}
    for parameter in model.parameters():
        if id(parameter) not in known and parameter.is_floating_point():
            # A copy, so that nothing refers to a file whose weights have been converted: its pages are given back.
            parameter.data = parameter.data.to(torch.float32, copy=bool(converted))
    for one in held:
        for owner in one.owners:
            if isinstance(owner, nn.Embedding):
                freeze_embedding(owner)
            else:
                freeze_linear(owner, scales.get(one.name))


def _is_adapter(path: Path) -> bool:
    return path.name.startswith("adapter_model")


def _find_held(model: Any, precision: str) -> list[_Held]:
    """Return the frozen weights of which every user is a linear layer or an embedding that can be frozen."""
    users: dict[nn.Parameter, list[Any]] = {}
    for name, module in model.named_modules():
        # peft keeps the head as it was beside the one that is trained.
        for parameter in module.parameters(recurse=False) if "original_module" not in name else ():
            users.setdefault(parameter, []).append(module)
    outer = {model.get_input_embeddings(), model.get_output_embeddings()}
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[precision]
    found = []
    for name, parameter in model.named_parameters():
        owners = users.get(parameter, [])
        if parameter.requires_grad or parameter.ndim != 2 or not owners:
            continue
        frozen = all(not any(p.requires_grad for p in one.parameters(recurse=False)) for one in owners)
        if frozen and all(_is_base(one, model) for one in owners):
            is_outer = dtype == torch.int8 and any(one in outer for one in owners)
            found.append(_Held(name, parameter, owners, torch.bfloat16 if is_outer else dtype))
    return found


def _find_converted(held: Sequence[_Held], precision: str, files: Sequence[Path]) -> Path:
    """Return the file with these converted weights in the cache folder, which the first rank of a host writes."""
    # The settings of adapters decide what they add to the weights that they are merged into.
    settings = [path.with_name("adapter_config.json") for path in files if _is_adapter(path)]
    sources = [hash_file(path) for path in (*files, *settings)]
    names = repr((_FORMAT, precision, sources, [one.name for one in held]))
    path = cache_folder(os.environ) / f"base-{precision}-{hash_text(names, 16)}.safetensors"
    if path.exists():
        return path
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            for unfinished in path.parent.glob(f"{path.name}.*.new"):  # of a rank that was killed
                unfinished.unlink()
            with write_atomically(path) as beside:
                _write_converted(held, beside)
    return path


def _write_converted(held: Sequence[_Held], path: Path) -> None:
    shapes = [(one.name, one.dtype, tuple(one.parameter.shape)) for one in held]
    shapes += [(one.name + _SCALES, torch.float32, (len(one.parameter),)) for one in held if one.dtype == torch.int8]
    header, places = lay_out(shapes)
    with path.open("wb") as file:
        file.write(header)

        def write(name: str, value: Tensor) -> None:
            file.seek(places[name].start)
            file.write(value.contiguous().view(-1).view(torch.uint8).numpy().data)

        for one in held:
            if one.dtype == torch.int8:
                rounded, scales = quantise(one.parameter)
                write(one.name, rounded)
                write(one.name + _SCALES, scales)
            else:
                write(one.name, one.parameter.detach().to(one.dtype))
        file.flush()
        os.fsync(file.fileno())


def _map_weights(held: Sequence[_Held], path: Path) -> dict[str, Tensor]:
    """Let parameters be views of a mapped file, and return the scales of int8 weights by the weights' names."""
    from safetensors import safe_open

    opened: Any = safe_open
    with opened(path, framework="pt") as file:
        for one in held:
            one.parameter.data = file.get_tensor(one.name)
        return {one.name: file.get_tensor(one.name + _SCALES) for one in held if one.dtype == torch.int8}

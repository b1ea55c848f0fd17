"""How much memory the training of a decoder takes: its sizes, and what its layers and its head hold.

The layers are fast ones, or those of transformers with the attention of torch (sdpa), which keeps no scores. The terms
of the formulas are the tensors that autograd keeps, which tests count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAST_TYPES = ("llama", "qwen3", "smollm3", "gemma3_text")
"""Decoders with fast layers (`architectures.PRE_NORM_ARCHITECTURES`), by their model_type in config.json."""
CHUNK_LOGITS = 1 << 26
"""Largest number of logits that the loss computes at once (`objective.chunked_loss`)."""


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder like Llama that decide how much memory it takes."""

    layers: int
    hidden: int
    """The hidden size."""
    inner: int
    """The intermediate size of feed-forward, which has three products (gate, up, down)."""
    query: int
    """Width of all query heads together."""
    key: int
    """Width of all key heads together, and of all value heads."""
    heads: int
    """Number of query heads."""
    vocab_size: int
    is_tied: bool
    """Whether embedding and head share their weight."""
    norms: int = 2
    """Norms of the hidden size in a layer: 4 in Gemma 3, else 2."""
    norms_heads: bool = False
    """Whether queries and keys are normed in each head, as in Qwen3 and Gemma 3."""
    may_be_fast: bool = True
    """Whether there are fast layers for this architecture."""
    base_precision: str = "auto"
    """Number format of frozen weights (--base-precision). Unless it is auto, weights are converted in a buffer."""

    @property
    def layer_parameters(self) -> int:
        """Number of weights of a layer's linear modules."""
        return self.hidden * (2 * self.query + 2 * self.key + 3 * self.inner)

    @property
    def embedding_parameters(self) -> int:
        """Number of weights of the embedding, which is also that of the head."""
        return self.vocab_size * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        norms = self.layers * self.norms * self.hidden + self.hidden
        return self.layers * self.layer_parameters + norms + (2 - self.is_tied) * self.embedding_parameters

    def count_adapter_parameters(self, rank: int) -> int:
        """Return the number of parameters of LoRA adapters of this rank in all linear modules of the layers."""
        widths = 4 * self.hidden + 2 * self.query + 2 * self.key + 3 * (self.hidden + self.inner)
        return self.layers * rank * widths


def read_decoder_shape(settings: Mapping[str, Any]) -> DecoderShape | None:
    """Return the shape of a decoder from its config.json; None if it is none like Llama, or a size is missing.

    Parameters
    ----------
    settings: the content of config.json.
    """

    def size(name: str, otherwise: int = 0) -> int:
        found = settings.get(name)
        return found if type(found) is int and found > 0 else otherwise

    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    layers, hidden, inner, heads, vocab_size = map(size, names)
    if not all((layers, hidden, inner, heads, vocab_size)) or "num_key_value_heads" not in settings:
        return None
    kind = str(settings.get("model_type"))
    head_size = size("head_dim", hidden // heads)
    is_tied = settings.get("tie_word_embeddings", kind.startswith("gemma") or kind == "smollm3") is True
    key = size("num_key_value_heads", heads) * head_size
    return DecoderShape(
        layers,
        hidden,
        inner,
        heads * head_size,
        key,
        heads,
        vocab_size,
        is_tied,
        norms=4 if kind.startswith(("gemma2", "gemma3")) else 2,
        norms_heads=kind.startswith(("qwen3", "gemma3")),
        may_be_fast=kind in FAST_TYPES,
    )


def layer_bytes(shape: DecoderShape, size: int, adapts: bool, tokens: int, masked_scores: int) -> int:
    """Return the bytes that autograd keeps of a layer.

    They are the input of each norm and, where norms are trained, its result before it is scaled; the inputs of all
    products; queries, keys, values and context of attention; gate, its activation, up and their product; with bf16 the
    copies of the weights, unless these are converted in a buffer; and in each layer its own copy of an attention mask.

    Parameters
    ----------
    size: bytes of a number in products: 2 for bf16, else 4.
    adapts: whether LoRA adapters are trained, and not the norms.
    tokens: positions of the batch, with padding.
    masked_scores: numbers of the attention mask; 0 without one.
    """
    norm = 4 if adapts else 8
    # Autocast copies the input of each product by itself.
    inputs = 8 if size == 4 else 10
    heads = norm * shape.norms_heads
    widths = shape.hidden * (shape.norms * norm + inputs)
    widths += (shape.query + shape.key) * (2 * size + heads) + 4 * size * shape.inner
    small = 4 * (shape.heads + shape.norms + shape.heads * shape.norms_heads)
    weights = 2 * shape.layer_parameters if size == 2 and shape.base_precision == "auto" else 0
    return (widths + small) * tokens + weights + size * masked_scores


def fast_layer_bytes(shape: DecoderShape, size: int, tokens: int, gradient_checkpointing: bool = False) -> int:
    """Return the bytes that autograd keeps of a fast layer (`fast.prenorm.run_layer`).

    They are the inputs of norms and products; queries, keys and values, also before their norms; and gate and up. With
    gradient checkpointing, they are the layer's input, and that of a norm at its end.

    Parameters
    ----------
    size: bytes of a number in the layers: 2 for bf16, else 4.
    tokens: tokens of the batch, without padding.
    """
    ends = shape.norms - 2
    if gradient_checkpointing:
        return (size * (1 + (ends > 0)) * shape.hidden + 4) * tokens
    packed = shape.query + 2 * shape.key
    widths = (4 + ends) * shape.hidden + shape.query + (1 + shape.norms_heads) * packed + 3 * shape.inner
    return (size * widths + 4 * shape.norms) * tokens


def head_bytes(shape: DecoderShape, size: int, adapts: bool, targets: int, trains: bool = True) -> int:
    """Return the most bytes that the loss holds: the logits of a chunk, and what the gradient of the weight takes.

    Parameters
    ----------
    size, adapts: as for `layer_bytes`.
    targets: number of tokens that are predicted; 0 for a decoder that predicts labels, with a small head.
    trains: whether gradients are computed.
    """
    chunk = min(targets * shape.vocab_size, max(CHUNK_LOGITS, shape.vocab_size))
    logits = (8 + (2 if size == 2 else 0)) * chunk  # softmax needs a copy
    # A weight in fp32 is copied to bf16 as a whole. One that is held in bf16 is not.
    copies = size == 2 and targets > 0 and shape.base_precision in ("auto", "fp32")
    weight = 2 * shape.embedding_parameters if copies else 0
    if trains and not adapts:
        # A second gradient: that of a tied embedding, or the one to which a rank's buckets add it.
        weight += (4 + (2 if size == 2 else 0)) * shape.embedding_parameters
    return logits + weight + 4 * targets * shape.hidden


def decoder_activation_bytes(
    shape: DecoderShape,
    size: int,
    adapts: bool,
    gradient_checkpointing: bool,
    tokens: int,
    masked_scores: int,
    targets: int,
    fast_tokens: int = 0,
) -> int:
    """Return the most bytes that activations take in a forward and a backward pass.

    With gradient checkpointing, layers keep only their inputs, and are computed again one by one when the head has been
    freed; transformers' own last layer keeps all. The other parameters are those of `layer_bytes` and `head_bytes`.

    Parameters
    ----------
    fast_tokens: number of tokens without padding, if the layers are fast ones; else 0.
    """
    if fast_tokens:
        layer = fast_layer_bytes(shape, size, fast_tokens)
        kept = fast_layer_bytes(shape, size, fast_tokens, gradient_checkpointing)
        head = head_bytes(shape, size, adapts, targets)
        running = layer + 2 * size * shape.inner * fast_tokens  # and the gradients of gate and up
        ends = 12 * shape.hidden * tokens
        if gradient_checkpointing:
            return ends + shape.layers * kept + max(running, head)
        return ends + (shape.layers - 1) * layer + max(running, layer + head)
    layer = layer_bytes(shape, size, adapts, tokens, masked_scores)
    head = head_bytes(shape, size, adapts, targets)
    ends = 12 * shape.hidden * tokens  # embeddings, and the last norm
    if not gradient_checkpointing:
        return ends + shape.layers * layer + head
    inputs = 4 * shape.hidden * tokens * (shape.layers - 1)
    return ends + inputs + max(layer + head, 2 * layer)


def decoder_evaluation_bytes(shape: DecoderShape, size: int, tokens: int, targets: int) -> int:
    """Return the most bytes that activations take in evaluation, without gradients: those of one layer and the head."""
    layer = tokens * (12 * shape.hidden + size * (3 * shape.query + 2 * shape.key + 3 * shape.inner))
    return layer + head_bytes(shape, size, True, targets, trains=False)

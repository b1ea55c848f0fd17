"""Everything that cpuft knows about a model architecture by its name.

To bring the fast path to another architecture, add an entry to `ARCHITECTURES`, and a function that finds the modules
of one of its layers unless `_read_bert_layer` or `_read_llama_layer` fits; no other file has to change. This module
imports no torch, because data preparation reads it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cpuft.train.fast.disentangled import Distances
    from cpuft.train.fast.projection import PackedLinear


@dataclass(frozen=True)
class Heads:
    """The attention heads of one layer."""

    count: int
    """Number of query heads."""
    size: int
    """Width of a head. Of BERT and its kin the hidden size is count * size."""
    factor: float
    """By which scores are multiplied before softmax, such as 1 / sqrt(size)."""
    key_count: int = 0
    """Number of heads of keys and of values, a divisor of `count`; 0: as many as `count`. Query head h uses number h //
    (count // key_count)."""
    back: int = -1
    """How many positions before its own a query looks at; -1: all of them."""
    ahead: int = -1
    """How many positions after its own a query looks at; -1: all of them. 0 is causal attention."""

    @property
    def keys(self) -> int:
        """Number of heads of keys and of values, also where `key_count` is 0."""
        return self.key_count or self.count


@dataclass
class PositionParts:
    """What makes positions of keys and queries from relative embeddings, in a layer with disentangled attention."""

    key: Any
    """Linear layer; the projection of keys itself if the model shares it, and likewise for queries."""
    query: Any
    dropout: Any


@dataclass(kw_only=True)
class LayerParts:
    """The modules of one layer by their purpose. They stay in the model; this object only refers to them.

    A post-norm layer norms the sums of attention and of feed-forward with their residuals, a pre-norm layer the inputs
    of both. Linear layers are torch.nn.Linear, or peft's LoRA layers around one, see `projection.is_adapted`. Norms are
    modules that `elementwise.read_norm` knows. A dropout or norm is None where the layer has none.
    """

    heads: Heads
    attention_module: nn.Module
    """The module that makes query, key, value and context. A caller's hooks on it turn the fast path off."""
    projections: list[Any]
    """Linear layers whose outputs, side by side, are query, key and value: three, or one for all."""
    attention_dropout: nn.Module | float
    """Dropout of the attention probabilities, or its rate while `attention_module` is in training."""
    attention_output: Any
    attention_output_dropout: nn.Module | None = None
    attention_norm: Any
    """Norm after attention and its residual; in a pre-norm layer before attention."""
    inner: list[Any]
    """Linear layer to the intermediate size. In a pre-norm layer, the outputs of two, or of one for both, are the gate,
    which is activated, and what it is multiplied with."""
    activation: Any
    """The function between `inner` and `outer`; in a pre-norm layer its name in config.json, such as silu."""
    outer: Any
    """Linear layer from the intermediate size back to the hidden size."""
    outer_dropout: nn.Module | None = None
    """Dropout after `outer`; in a pre-norm layer before it."""
    outer_norm: Any = None
    """Norm after feed-forward and its residual; in a pre-norm layer of what feed-forward adds."""

    positions: PositionParts | None = None
    """What makes positions for disentangled attention; None for another attention."""
    more_outputs: tuple[Any, ...] | None = None
    """What follows the output in the tuple that the layer returns; None if it returns its output without a tuple."""

    feed_forward_norm: Any = None
    """Norm before feed-forward of a pre-norm layer; None in a post-norm layer."""
    query_norm: Any = None
    """Norm of each query head before the rotation; `key_norm` is that of each key head."""
    key_norm: Any = None
    is_rotated: bool = False
    """Whether queries and keys are rotated by their positions."""
    attention_end_norm: Any = None
    """Norm of what attention adds to the hidden states of a pre-norm layer."""

    packed: PackedLinear = field(init=False)
    """`projections` as one product; like `packed_inner`, made when `stack.Stack.install` patches the layer."""
    packed_inner: PackedLinear = field(init=False)
    int8: bool = False
    """Whether products have 8-bit operands while the layer is in training."""
    recomputes: bool = False
    """Whether backward recomputes attention scores and what lies between the products (gradient checkpointing)."""

    @property
    def is_pre_norm(self) -> bool:
        """Whether norms come before attention and feed-forward."""
        return self.feed_forward_norm is not None

    @property
    def linears(self) -> list[Any]:
        """The linear layers of attention and feed-forward, and those of positions alone, each once."""
        positions = [self.positions.key, self.positions.query] if self.positions else []
        return list(dict.fromkeys([*self.projections, self.attention_output, *self.inner, self.outer, *positions]))

    @property
    def norms(self) -> list[Any]:
        """The norms that the layer has."""
        own = (self.attention_norm, self.attention_end_norm, self.feed_forward_norm, self.outer_norm)
        return [norm for norm in (*own, self.query_norm, self.key_norm) if norm is not None]


def _read_bert_like_layer(
    layer: Any, attention: Any, projections: Sequence[str], attention_output: Any, attention_end: Any
) -> LayerParts:
    """Return the parts of a layer with BERT's feed-forward; `attention_end` has the dropout and norm of attention."""
    size = attention.attention_head_size
    return LayerParts(
        heads=Heads(attention.num_attention_heads, size, size**-0.5),
        attention_module=attention,
        projections=[getattr(attention, name) for name in projections],
        attention_dropout=attention.dropout,
        attention_output=attention_output,
        attention_output_dropout=attention_end.dropout,
        attention_norm=attention_end.LayerNorm,
        inner=[layer.intermediate.dense],
        activation=layer.intermediate.intermediate_act_fn,
        outer=layer.output.dense,
        outer_dropout=layer.output.dropout,
        outer_norm=layer.output.LayerNorm,
    )


def _read_bert_layer(layer: Any) -> LayerParts:
    attention, end = layer.attention.self, layer.attention.output
    return _read_bert_like_layer(layer, attention, ("query", "key", "value"), end.dense, end)


def _read_mpnet_layer(layer: Any) -> LayerParts:
    attention, end = layer.attention.attn, layer.attention
    return replace(_read_bert_like_layer(layer, attention, "qkv", attention.o, end), more_outputs=())


def _read_deberta_layer(layer: Any) -> LayerParts:
    attention, end = layer.attention.self, layer.attention.output
    parts = _read_bert_like_layer(layer, attention, ("query_proj", "key_proj", "value_proj"), end.dense, end)
    names = ("key_proj", "query_proj") if attention.share_att_key else ("pos_key_proj", "pos_query_proj")
    # `_find_unknown_in_deberta` refuses a model that lacks some of them.
    key, query, dropout = (getattr(attention, name, None) for name in (*names, "pos_dropout"))
    positions = PositionParts(key, query, dropout)
    heads = replace(parts.heads, factor=(3 * parts.heads.size) ** -0.5)
    return replace(parts, heads=heads, positions=positions, more_outputs=(None,))


def _read_distilbert_layer(layer: Any) -> LayerParts:
    attention, feed_forward = layer.attention, layer.ffn
    size = attention.dim // attention.n_heads
    return LayerParts(
        heads=Heads(attention.n_heads, size, size**-0.5),
        attention_module=attention,
        projections=[attention.q_lin, attention.k_lin, attention.v_lin],
        attention_dropout=attention.dropout,
        attention_output=attention.out_lin,
        attention_norm=layer.sa_layer_norm,
        inner=[feed_forward.lin1],
        activation=feed_forward.activation,
        outer=feed_forward.lin2,
        outer_dropout=feed_forward.dropout,
        outer_norm=layer.output_layer_norm,
    )


def _read_albert_layer(layer: Any) -> LayerParts:
    attention = layer.attention
    size = attention.attention_head_size
    return LayerParts(
        heads=Heads(attention.num_attention_heads, size, size**-0.5),
        attention_module=attention,
        projections=[attention.query, attention.key, attention.value],
        attention_dropout=attention.attention_dropout,
        attention_output=attention.dense,
        attention_output_dropout=attention.output_dropout,
        attention_norm=attention.LayerNorm,
        inner=[layer.ffn],
        activation=layer.activation,
        outer=layer.ffn_output,
        outer_norm=layer.full_layer_layer_norm,
    )


def _list_albert_runs(encoder: Any) -> list[Any]:
    config = encoder.config
    layers_of_group = config.num_hidden_layers / config.num_hidden_groups
    groups = [encoder.albert_layer_groups[int(i / layers_of_group)] for i in range(config.num_hidden_layers)]
    return [layer for group in groups for layer in group.albert_layers]


def _read_llama_layer(layer: Any) -> LayerParts:
    """Return the parts of a layer of Llama's form: also with norms of queries and keys, or norms after both halves."""
    attention, mlp = layer.self_attn, layer.mlp
    config, window = attention.config, getattr(attention, "sliding_window", None)
    reach = -1 if window is None else window - 1
    has_end_norms = hasattr(layer, "pre_feedforward_layernorm")
    return LayerParts(
        heads=Heads(
            config.num_attention_heads,
            attention.head_dim,
            attention.scaling,
            key_count=config.num_key_value_heads,
            back=reach,
            ahead=0 if attention.is_causal else reach,
        ),
        attention_module=attention,
        projections=[attention.q_proj, attention.k_proj, attention.v_proj],
        attention_dropout=attention.attention_dropout,
        attention_output=attention.o_proj,
        attention_norm=layer.input_layernorm,
        inner=[mlp.gate_proj, mlp.up_proj],
        activation=getattr(config, "hidden_act", "") or getattr(config, "hidden_activation", ""),
        outer=mlp.down_proj,
        outer_norm=layer.post_feedforward_layernorm if has_end_norms else None,
        feed_forward_norm=layer.pre_feedforward_layernorm if has_end_norms else layer.post_attention_layernorm,
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        is_rotated=bool(getattr(attention, "use_rope", True)),
        attention_end_norm=layer.post_attention_layernorm if has_end_norms else None,
    )


def _read_modernbert_layer(layer: Any) -> LayerParts:
    attention, mlp, config = layer.attn, layer.mlp, layer.attn.config
    # The module's own sliding_window is larger by one, for a library whose windows end before it.
    reach = -1 if attention.sliding_window is None else attention.sliding_window - 1
    return LayerParts(
        heads=Heads(config.num_attention_heads, attention.head_dim, attention.head_dim**-0.5, back=reach, ahead=reach),
        attention_module=attention,
        projections=[attention.Wqkv],
        attention_dropout=attention.attention_dropout,
        attention_output=attention.Wo,
        attention_output_dropout=attention.out_drop,
        attention_norm=None if type(layer.attn_norm).__name__ == "Identity" else layer.attn_norm,
        inner=[mlp.Wi],
        activation=config.hidden_activation,
        outer=mlp.Wo,
        outer_dropout=mlp.drop,
        feed_forward_norm=layer.mlp_norm,
        is_rotated=True,
    )


@dataclass(frozen=True)
class EncoderPositions:
    """What an encoder tells the attention of all its layers about distances between queries and keys."""

    method: str
    """Name of the encoder's method that makes distances of all pairs of positions for layers that are not fast."""
    read: Callable[[Any, int], Tensor | Distances]
    """(encoder, length of the examples) -> numbers of relative embeddings for each distance, or a bias that is
    added to the attention scores, (heads, 2 * length - 1), fp32, contiguous, in column key - query + length - 1 for a
    key and a query at these positions. Gradients flow to the encoder's parameters."""


def _read_mpnet_bias(encoder: Any, length: int) -> Tensor:
    import torch  # not above, because of data preparation

    buckets = encoder.relative_position_bucket(torch.arange(1 - length, length))
    bias: Tensor = encoder.relative_attention_bias(buckets)
    return bias.T.float().contiguous()


def _read_deberta_distances(encoder: Any, length: int) -> Distances:
    from cpuft.train.fast.disentangled import Distances, number_embeddings  # not above, because of data preparation

    return Distances.of(number_embeddings(length, encoder.position_buckets, encoder.max_relative_positions))


def _find_unknown_in_deberta(encoder: Any) -> str:
    if encoder.conv is not None:
        return "the convolution after the first layer"
    kinds = encoder.layer[0].attention.self.pos_att_type
    if not encoder.relative_attention or not {"c2p", "p2c"} <= {*kinds}:
        return "attention without both c2p and p2c in pos_att_type"
    return ""


@dataclass(frozen=True)
class SharedLayers:
    """How an encoder is built that runs the same layers several times."""

    encoder_class: str
    list_runs: Callable[[Any], list[Any]]
    """Return the layers of an encoder in the order in which it runs them, each as often as it does."""
    projection: str
    """Name of the module that brings embeddings to the hidden size before the first layer. It stays fp32."""
    counts: tuple[str, str]
    """Names in config.json of the number of groups of layers and of layers in a group, both 1 unless given."""


@dataclass(frozen=True)
class Architecture:
    """An architecture whose layers the fast path can replace."""

    model_type: str
    """As in config.json, such as xlm-roberta. With underscores it is the name of the package in transformers.models."""
    title: str
    layer_class: str
    """Name of the class of a layer in transformers, such as XLMRobertaLayer."""
    read_layer: Callable[[Any], LayerParts]
    """Raises AttributeError for a layer with other modules than one of `layer_class` has."""
    positions: EncoderPositions | None = None
    """None if its encoder tells attention nothing about distances."""
    shared_layers: SharedLayers | None = None
    """None if its encoder has a list `layer` or `layers`, and runs each once."""
    is_entered_at_model: bool = False
    """Whether hooks belong on the model that has its encoder as `encoder`, and not on the module that holds the layers:
    DeBERTa's encoder is not told whether the caller wants hidden states."""
    find_unknown: Callable[[Any], str] = lambda encoder: ""
    """Return what of an encoder the fast path does not know, so that none of its layers can be replaced, else ""."""
    keeps_sequences_apart: bool = False
    """Whether sequences that are packed into one row, which their position ids tell, do not attend to each other."""


POST_NORM_ARCHITECTURES = (
    Architecture("bert", "BERT", "BertLayer", _read_bert_layer),
    Architecture("roberta", "RoBERTa", "RobertaLayer", _read_bert_layer),
    Architecture("xlm-roberta", "XLM-RoBERTa", "XLMRobertaLayer", _read_bert_layer),
    Architecture("camembert", "CamemBERT", "CamembertLayer", _read_bert_layer),
    Architecture("electra", "ELECTRA", "ElectraLayer", _read_bert_layer),
    Architecture("distilbert", "DistilBERT", "TransformerBlock", _read_distilbert_layer),
    Architecture(
        "mpnet",
        "MPNet",
        "MPNetLayer",
        _read_mpnet_layer,
        positions=EncoderPositions("compute_position_bias", _read_mpnet_bias),
    ),
    Architecture(
        "albert",
        "ALBERT",
        "AlbertLayer",
        _read_albert_layer,
        shared_layers=SharedLayers(
            "AlbertTransformer",
            _list_albert_runs,
            "embedding_hidden_mapping_in",
            ("num_hidden_groups", "inner_group_num"),
        ),
    ),
    Architecture(
        "deberta-v2",
        "DeBERTa-v2/v3",
        "DebertaV2Layer",
        _read_deberta_layer,
        positions=EncoderPositions("get_rel_pos", _read_deberta_distances),
        is_entered_at_model=True,
        find_unknown=_find_unknown_in_deberta,
    ),
)
"""Encoders like BERT: norms come after attention and feed-forward and their residuals."""

PRE_NORM_ARCHITECTURES = (
    Architecture("modernbert", "ModernBERT", "ModernBertEncoderLayer", _read_modernbert_layer),
    Architecture("eurobert", "EuroBERT", "EuroBertDecoderLayer", _read_llama_layer),
    Architecture("llama", "Llama", "LlamaDecoderLayer", _read_llama_layer, keeps_sequences_apart=True),
    Architecture("qwen3", "Qwen3", "Qwen3DecoderLayer", _read_llama_layer, keeps_sequences_apart=True),
    Architecture("smollm3", "SmolLM3", "SmolLM3DecoderLayer", _read_llama_layer, keeps_sequences_apart=True),
    Architecture("gemma3", "Gemma 3 (text)", "Gemma3DecoderLayer", _read_llama_layer, keeps_sequences_apart=True),
)
"""Decoders and encoders whose norms come first, with rotary positions and gated feed-forward."""

ARCHITECTURES = (*POST_NORM_ARCHITECTURES, *PRE_NORM_ARCHITECTURES)

SIZE_SETTINGS = {
    "layers": ("num_hidden_layers", "n_layers"),
    "hidden": ("hidden_size", "dim"),
    "inner": ("intermediate_size", "hidden_dim"),
    "heads": ("num_attention_heads", "n_heads"),
    "vocab_size": ("vocab_size",),
    "positions": ("max_position_embeddings",),
}
"""Sizes that decide how much memory a model takes -> their names in config.json, first BERT's, then DistilBERT's."""


POSITIONS_AFTER_PADDING = (
    "roberta",
    "xlm-roberta",
    "camembert",
    "longformer",
    "mpnet",
    "data2vec-text",
    "roberta-prelayernorm",
    "xlm-roberta-xl",
    "xmod",
)
"""Model types that number positions from the padding token's id + 1 on, so that fewer positions are left for tokens and
the padding token must not change."""

ATTENTION_MODULE_NAMES = ("attention", "attn")
"""One of these is part of the names of attention modules, in the encoders and decoders of transformers."""


def _list_package(kind: type) -> list[Architecture]:
    module = kind.__module__.split(".")
    if module[0] != "transformers":
        return []
    return [one for one in ARCHITECTURES if one.model_type.replace("-", "_") == module[-2]]


def find_architecture(layer: object) -> Architecture | None:
    """Return the entry of `ARCHITECTURES` whose layer class is exactly that of a layer of transformers, else None."""
    kind = type(layer)
    return next((one for one in _list_package(kind) if one.layer_class == kind.__name__), None)


def reads_first_token(model: Any) -> bool:
    """Return whether a model's output depends only on the first token of the encoder's output: that of a sequence
    classifier of `POST_NORM_ARCHITECTURES`, also inside of a model of peft or a CrossEncoder.
    """
    if type(model).__name__ == "Transformer" and type(model).__module__.startswith("sentence_transformers."):
        model = getattr(model, "model", model)  # the module calls its forward without hooks
    kind = type(model.get_base_model() if hasattr(model, "get_base_model") else model)
    is_known = any(one in POST_NORM_ARCHITECTURES for one in _list_package(kind))
    return is_known and kind.__name__.endswith("ForSequenceClassification")

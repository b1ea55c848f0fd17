"""Everything that cpuft knows about a model architecture by its name.

To bring the fast path to another architecture, add an entry to `ARCHITECTURES` or to `PRE_NORM_ARCHITECTURES`, and a
function that finds the modules of one of its layers unless `_read_bert_layer` or `_read_llama_layer` fits. No other
file has to change. Data preparation reads this module, too, so that it imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

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
    """Number of heads of keys and of values, a divisor of `count`; 0: as many as `count`. Query head h uses number
    h // (count // key_count)."""
    back: int = -1
    """How many positions before its own a query looks at; -1: all of them."""
    ahead: int = -1
    """How many positions after its own a query looks at; -1: all of them. 0 is causal attention."""

    @property
    def keys(self) -> int:
        """The number of heads of keys and of values, also where `key_count` is 0."""
        return self.key_count or self.count


@dataclass
class PositionParts:
    """The modules by which a layer with disentangled attention makes the positions of its keys and queries."""

    key: Any
    """Linear layer from a relative embedding to the position of a key; the layer's `key` if it shares that."""
    query: Any
    """Linear layer from a relative embedding to the position of a query; the layer's `query` if it shares that."""
    dropout: nn.Dropout
    """Dropout of the relative embeddings."""


@dataclass
class LayerParts:
    """The modules of one encoder layer by their purpose. They stay in the model; this object only refers to them.

    Linear layers are torch.nn.Linear, or peft's LoRA layers around one, see `projection.is_adapted`.
    """

    heads: Heads
    attention_module: nn.Module
    """The module that makes query, key, value and context. Hooks on it, of a caller who wants attentions, turn the fast
    path off."""
    query: Any
    key: Any
    value: Any
    attention_dropout: nn.Dropout
    """Dropout of the attention probabilities."""
    attention_output: Any
    """Linear layer from the context to the hidden size."""
    attention_output_dropout: nn.Dropout | None
    """Dropout after `attention_output`; None in DistilBERT, which has none there."""
    attention_norm: nn.LayerNorm
    """Layer norm after attention and its residual."""
    inner: Any
    """Linear layer from the hidden size to the intermediate size."""
    activation: Callable[[Tensor], Tensor]
    """The function between `inner` and `outer`, such as GELU."""
    outer: Any
    """Linear layer from the intermediate size back to the hidden size."""
    outer_dropout: nn.Dropout | None
    """Dropout after `outer`; None in ALBERT, which has none there."""
    outer_norm: nn.LayerNorm
    """Layer norm after feed-forward and its residual: the end of the layer."""
    is_last: bool
    """Whether this is the last layer of its encoder. An encoder may also run it before, see `SharedLayers`."""
    packed: PackedLinear | None = None
    """Query, key and value as one product; None until `encoder.patch_layer` has patched the layer."""
    int8: bool = False
    """Whether products have 8-bit operands while the layer is in training."""
    recomputes: bool = False
    """Whether backward recomputes attention scores and what lies between the products (gradient checkpointing)."""
    needs_encoder: bool = False
    """Whether its attention scores depend on positions that its encoder gives it, so that the layer alone cannot be
    fast."""
    more_outputs: tuple[Any, ...] | None = None
    """What follows the output in the tuple that the layer returns; None if it returns its output without a tuple."""
    positions: PositionParts | None = None
    """What makes positions for disentangled attention; None for another attention."""

    @property
    def linears(self) -> list[Any]:
        """The linear layers: query, key, value, attention output, inner, outer; and those of positions alone."""
        own = [self.query, self.key, self.value, self.attention_output, self.inner, self.outer]
        return list(dict.fromkeys([*own, *([self.positions.key, self.positions.query] if self.positions else [])]))


def _read_bert_layer(layer: Any, is_last: bool) -> LayerParts:
    return _read_bert_like_layer(layer, is_last, "query", "key", "value")


def _read_bert_like_layer(layer: Any, is_last: bool, query: str, key: str, value: str) -> LayerParts:
    attention, attention_output = layer.attention.self, layer.attention.output
    return LayerParts(
        heads=Heads(attention.num_attention_heads, attention.attention_head_size, attention.attention_head_size**-0.5),
        attention_module=attention,
        query=getattr(attention, query),
        key=getattr(attention, key),
        value=getattr(attention, value),
        attention_dropout=attention.dropout,
        attention_output=attention_output.dense,
        attention_output_dropout=attention_output.dropout,
        attention_norm=attention_output.LayerNorm,
        inner=layer.intermediate.dense,
        activation=layer.intermediate.intermediate_act_fn,
        outer=layer.output.dense,
        outer_dropout=layer.output.dropout,
        outer_norm=layer.output.LayerNorm,
        is_last=is_last,
    )


def _read_distilbert_layer(layer: Any, is_last: bool) -> LayerParts:
    attention, feed_forward = layer.attention, layer.ffn
    size = attention.dim // attention.n_heads
    return LayerParts(
        heads=Heads(attention.n_heads, size, size**-0.5),
        attention_module=attention,
        query=attention.q_lin,
        key=attention.k_lin,
        value=attention.v_lin,
        attention_dropout=attention.dropout,
        attention_output=attention.out_lin,
        attention_output_dropout=None,
        attention_norm=layer.sa_layer_norm,
        inner=feed_forward.lin1,
        activation=feed_forward.activation,
        outer=feed_forward.lin2,
        outer_dropout=feed_forward.dropout,
        outer_norm=layer.output_layer_norm,
        is_last=is_last,
    )


def _read_mpnet_layer(layer: Any, is_last: bool) -> LayerParts:
    attention, output = layer.attention.attn, layer.output
    size = attention.attention_head_size
    return LayerParts(
        heads=Heads(attention.num_attention_heads, size, size**-0.5),
        attention_module=attention,
        query=attention.q,
        key=attention.k,
        value=attention.v,
        attention_dropout=attention.dropout,
        attention_output=attention.o,
        attention_output_dropout=layer.attention.dropout,
        attention_norm=layer.attention.LayerNorm,
        inner=layer.intermediate.dense,
        activation=layer.intermediate.intermediate_act_fn,
        outer=output.dense,
        outer_dropout=output.dropout,
        outer_norm=output.LayerNorm,
        is_last=is_last,
        needs_encoder=True,
        more_outputs=(),
    )


def _read_albert_layer(layer: Any, is_last: bool) -> LayerParts:
    attention = layer.attention
    size = attention.attention_head_size
    return LayerParts(
        heads=Heads(attention.num_attention_heads, size, size**-0.5),
        attention_module=attention,
        query=attention.query,
        key=attention.key,
        value=attention.value,
        attention_dropout=attention.attention_dropout,
        attention_output=attention.dense,
        attention_output_dropout=attention.output_dropout,
        attention_norm=attention.LayerNorm,
        inner=layer.ffn,
        activation=layer.activation,
        outer=layer.ffn_output,
        outer_dropout=None,
        outer_norm=layer.full_layer_layer_norm,
        is_last=is_last,
    )


def _list_albert_groups(encoder: Any) -> list[Any]:
    layers_of_group = encoder.config.num_hidden_layers / encoder.config.num_hidden_groups
    return [encoder.albert_layer_groups[int(i / layers_of_group)] for i in range(encoder.config.num_hidden_layers)]


def _read_deberta_layer(layer: Any, is_last: bool) -> LayerParts:
    attention = layer.attention.self
    parts = _read_bert_like_layer(layer, is_last, "query_proj", "key_proj", "value_proj")
    parts.heads = replace(parts.heads, factor=(3 * parts.heads.size) ** -0.5)
    shares = attention.share_att_key
    parts.positions = PositionParts(
        attention.key_proj if shares else attention.pos_key_proj,
        attention.query_proj if shares else attention.pos_query_proj,
        attention.pos_dropout,
    )
    parts.needs_encoder, parts.more_outputs = True, (None,)
    return parts


def _find_deberta_distances(encoder: Any, length: int) -> Distances:
    from cpuft.train.fast.disentangled import Distances, number_embeddings  # not above, because of data preparation

    return Distances.of(number_embeddings(length, encoder.position_buckets, encoder.max_relative_positions))


def _find_unknown_in_deberta(encoder: Any) -> str:
    if encoder.conv is not None:
        return "the convolution after the first layer"
    kinds = encoder.layer[0].attention.self.pos_att_type
    if not encoder.relative_attention or not {"c2p", "p2c"} <= {*kinds}:
        return "attention without both c2p and p2c in pos_att_type"
    return ""


def _make_mpnet_bias(encoder: Any, length: int) -> Tensor:
    import torch  # not above, because of data preparation

    buckets = encoder.relative_position_bucket(torch.arange(1 - length, length))
    bias: Tensor = encoder.relative_attention_bias(buckets)
    return bias.T.float().contiguous()


@dataclass
class PreNormParts:
    """The modules of one pre-norm layer by their purpose. They stay in the model; this object only refers to them.

    Such a layer norms the input of attention and of feed-forward, and adds their outputs to the hidden states. Linear
    layers are torch.nn.Linear, or peft's LoRA layers around one, see `projection.is_adapted`. Norms are modules that
    `elementwise.read_norm` knows.
    """

    heads: Heads
    attention_module: nn.Module
    """The module that makes query, key, value and context. Hooks on it, of a caller who wants attentions, turn the fast
    path off."""
    attention_norm: nn.Module | None
    """Norm before attention; None in ModernBERT's first layer, which has none."""
    projections: list[Any]
    """Linear layers whose outputs, side by side, are query, key and value: three, or one for all."""
    attention_dropout: float
    """Dropout rate of the attention probabilities."""
    attention_output: Any
    """Linear layer from the context to the hidden size."""
    feed_forward_norm: nn.Module
    """Norm before feed-forward."""
    inner: list[Any]
    """Linear layers whose outputs, side by side, are the gate, which is activated, and what it is multiplied with: two,
    or one for both."""
    activation: str
    """Name of the activation in config.json, such as silu."""
    outer: Any
    """Linear layer from the intermediate size back to the hidden size."""
    is_first: bool
    is_last: bool
    query_norm: nn.Module | None = None
    """Norm of each query head before the rotation; None for none."""
    key_norm: nn.Module | None = None
    """Norm of each key head before the rotation; None for none."""
    is_rotated: bool = True
    """Whether queries and keys are rotated by their positions."""
    attention_output_dropout: nn.Module | None = None
    """Dropout after `attention_output`: torch.nn.Dropout, torch.nn.Identity or None."""
    inner_dropout: nn.Module | None = None
    """Dropout before `outer`: torch.nn.Dropout, torch.nn.Identity or None."""
    attention_end_norm: nn.Module | None = None
    """Norm of what attention adds to the hidden states; None for none."""
    outer_norm: nn.Module | None = None
    """Norm of what feed-forward adds to the hidden states; None for none."""
    packed_projections: PackedLinear | None = None
    """`projections` as one product; None until `prenorm` has patched the layer."""
    packed_inner: PackedLinear | None = None
    """`inner` as one product; None until `prenorm` has patched the layer."""
    int8: bool = False
    """Whether products have 8-bit operands while the layer is in training."""
    recomputes: bool = False
    """Whether backward recomputes attention scores and what lies between the products (gradient checkpointing)."""

    @property
    def linears(self) -> list[Any]:
        """The linear layers of attention and feed-forward."""
        return [*self.projections, self.attention_output, *self.inner, self.outer]

    @property
    def norms(self) -> list[nn.Module]:
        """The norms that the layer has."""
        every = (
            self.attention_norm,
            self.feed_forward_norm,
            self.query_norm,
            self.key_norm,
            self.attention_end_norm,
            self.outer_norm,
        )
        return [norm for norm in every if norm is not None]


def _read_llama_layer(layer: Any, is_first: bool, is_last: bool) -> PreNormParts:
    """Return the parts of a layer of Llama's form: also with norms of queries and keys, or norms after both halves."""
    attention, mlp = layer.self_attn, layer.mlp
    config, window = attention.config, getattr(attention, "sliding_window", None)
    reach = -1 if window is None else window - 1
    has_end_norms = hasattr(layer, "pre_feedforward_layernorm")
    return PreNormParts(
        heads=Heads(
            config.num_attention_heads,
            attention.head_dim,
            attention.scaling,
            key_count=config.num_key_value_heads,
            back=reach,
            ahead=0 if attention.is_causal else reach,
        ),
        attention_module=attention,
        attention_norm=layer.input_layernorm,
        projections=[attention.q_proj, attention.k_proj, attention.v_proj],
        attention_dropout=attention.attention_dropout,
        attention_output=attention.o_proj,
        feed_forward_norm=layer.pre_feedforward_layernorm if has_end_norms else layer.post_attention_layernorm,
        inner=[mlp.gate_proj, mlp.up_proj],
        activation=getattr(config, "hidden_act", "") or getattr(config, "hidden_activation", ""),
        outer=mlp.down_proj,
        is_first=is_first,
        is_last=is_last,
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        is_rotated=bool(getattr(attention, "use_rope", True)),
        attention_end_norm=layer.post_attention_layernorm if has_end_norms else None,
        outer_norm=layer.post_feedforward_layernorm if has_end_norms else None,
    )


def _read_modernbert_layer(layer: Any, is_first: bool, is_last: bool) -> PreNormParts:
    attention, mlp, config = layer.attn, layer.mlp, layer.attn.config
    # The module's own sliding_window is larger by one, for a library whose windows end before it.
    reach = -1 if attention.sliding_window is None else attention.sliding_window - 1
    return PreNormParts(
        heads=Heads(config.num_attention_heads, attention.head_dim, attention.head_dim**-0.5, back=reach, ahead=reach),
        attention_module=attention,
        attention_norm=None if type(layer.attn_norm).__name__ == "Identity" else layer.attn_norm,
        projections=[attention.Wqkv],
        attention_dropout=attention.attention_dropout,
        attention_output=attention.Wo,
        feed_forward_norm=layer.mlp_norm,
        inner=[mlp.Wi],
        activation=config.hidden_activation,
        outer=mlp.Wo,
        is_first=is_first,
        is_last=is_last,
        attention_output_dropout=attention.out_drop,
        inner_dropout=mlp.drop,
    )


@dataclass(frozen=True)
class PreNormArchitecture:
    """An architecture that the fast path can replace: pre-norm layers, rotary positions and gated feed-forward."""

    model_type: str
    """As in config.json, such as qwen3; it is the name of the package in transformers.models."""
    title: str
    """As people write it, such as Qwen3."""
    layer_class: str
    """Name of the class of a layer in transformers, such as Qwen3DecoderLayer."""
    read_layer: Callable[[Any, bool, bool], PreNormParts]
    """Return the parts of a layer, given the layer and whether it is the first and the last one. It raises
    AttributeError if the layer has other modules than a layer of `layer_class`."""
    keeps_sequences_apart: bool = True
    """Whether sequences that are packed into one row, which their position ids tell, do not attend to each other."""


@dataclass(frozen=True)
class PositionBias:
    """The relative position bias of an encoder: what all its layers add to the attention scores.

    It depends on the head and on the distance from the query to the key, and on nothing else.
    """

    method: str
    """Name of the encoder's method that returns the bias for all pairs of positions, (batch, heads, length, length).
    Its result is passed to the layers. Where the fast layers run, the method is replaced."""
    by_distance: Callable[[Any, int], Tensor]
    """Return the bias of each distance, given the encoder and the length of the examples: (heads, 2 * length - 1),
    fp32, contiguous. Column key - query + length - 1 is for a key and a query at these positions. Gradients flow to
    the encoder's parameters."""


@dataclass(frozen=True)
class RelativeSize:
    """What relative embeddings add to the size of a model."""

    embeddings: int
    """Number of relative embeddings."""
    layer_parameters: int
    """Number of parameters in the linear modules of each layer which make positions alone."""
    absolute_positions: int
    """Number of positions that have an embedding of their own: 0 or all."""


@dataclass(frozen=True)
class RelativeEmbeddings:
    """The relative embeddings of an encoder, which it passes to layers with disentangled attention."""

    find_distances: Callable[[Any, int], Distances]
    """Return which embedding stands for each distance, given the encoder and the length of the examples."""
    read_size: Callable[[Mapping[str, Any], int, int], RelativeSize | None]
    """Return the sizes of a model, given the content of config.json, the hidden size and the number of positions; None
    if the fast path does not know a part of the model."""


def _read_deberta_size(settings: Mapping[str, Any], hidden: int, positions: int) -> RelativeSize | None:
    kinds = settings.get("pos_att_type") or ()
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    if settings.get("conv_kernel_size") or not settings.get("relative_attention") or not {"c2p", "p2c"} <= {*kinds}:
        return None
    halves = (settings.get(name) for name in ("position_buckets", "max_relative_positions"))
    half = next((one for one in halves if type(one) is int and one > 0), positions)
    own_linears = 0 if settings.get("share_att_key") else 2 * (hidden + 1) * hidden
    return RelativeSize(2 * half, own_linears, positions if settings.get("position_biased_input", True) else 0)


@dataclass(frozen=True)
class SharedLayers:
    """How an encoder is built that runs the same layers several times, in groups."""

    encoder_class: str
    """Name of the encoder's class in transformers."""
    list_groups: Callable[[Any], list[Any]]
    """Return the groups of an encoder in the order in which it runs them, each as often as it does."""
    layers: str
    """Name of a group's list of layers."""
    projection: str
    """Name of the module by which the encoder brings embeddings to the hidden size before the first layer. It stays
    fp32."""
    counts: tuple[str, str]
    """Names in config.json of the number of groups and of the number of layers in a group, both 1 unless given."""


@dataclass(frozen=True)
class Architecture:
    """An architecture with post-norm encoder layers like BERT's, which the fast path can replace."""

    model_type: str
    """As in config.json, such as xlm-roberta. With underscores it is the name of the package in transformers.models."""
    title: str
    """As people write it, such as XLM-RoBERTa."""
    class_prefix: str
    """How the names of its classes in transformers begin, such as XLMRoberta."""
    layer_class: str
    """Name of the class of an encoder layer in transformers, such as XLMRobertaLayer."""
    read_layer: Callable[[Any, bool], LayerParts]
    """Return the parts of a layer, given the layer and whether it is the last one. It raises AttributeError if the
    layer has other modules than a layer of `layer_class`."""
    position_bias: PositionBias | None = None
    """The relative position bias of its encoder; None if attention scores depend on no positions."""
    shared_layers: SharedLayers | None = None
    """How its encoder runs the same layers several times; None if the encoder has a list `layer` and runs each once."""
    relative_embeddings: RelativeEmbeddings | None = None
    """Those of its encoder if the layers have disentangled attention; None for another attention."""
    find_unknown: Callable[[Any], str] = lambda encoder: ""
    """Return what of an encoder the fast path does not know, so that none of its layers can be replaced; else an empty
    string."""

    @property
    def first_token_head(self) -> str:
        """Name of the sequence classifier's class in transformers, such as BertForSequenceClassification.

        Its head reads nothing but the encoder's output for the first token.
        """
        return f"{self.class_prefix}ForSequenceClassification"


ARCHITECTURES = (
    Architecture("bert", "BERT", "Bert", "BertLayer", _read_bert_layer),
    Architecture("roberta", "RoBERTa", "Roberta", "RobertaLayer", _read_bert_layer),
    Architecture("xlm-roberta", "XLM-RoBERTa", "XLMRoberta", "XLMRobertaLayer", _read_bert_layer),
    Architecture("camembert", "CamemBERT", "Camembert", "CamembertLayer", _read_bert_layer),
    Architecture("electra", "ELECTRA", "Electra", "ElectraLayer", _read_bert_layer),
    Architecture("distilbert", "DistilBERT", "DistilBert", "TransformerBlock", _read_distilbert_layer),
    Architecture(
        "mpnet",
        "MPNet",
        "MPNet",
        "MPNetLayer",
        _read_mpnet_layer,
        PositionBias("compute_position_bias", _make_mpnet_bias),
    ),
    Architecture(
        "albert",
        "ALBERT",
        "Albert",
        "AlbertLayer",
        _read_albert_layer,
        shared_layers=SharedLayers(
            "AlbertTransformer",
            _list_albert_groups,
            "albert_layers",
            "embedding_hidden_mapping_in",
            ("num_hidden_groups", "inner_group_num"),
        ),
    ),
    Architecture(
        "deberta-v2",
        "DeBERTa-v2/v3",
        "DebertaV2",
        "DebertaV2Layer",
        _read_deberta_layer,
        relative_embeddings=RelativeEmbeddings(_find_deberta_distances, _read_deberta_size),
        find_unknown=_find_unknown_in_deberta,
    ),
)

PRE_NORM_ARCHITECTURES = (
    PreNormArchitecture("modernbert", "ModernBERT", "ModernBertEncoderLayer", _read_modernbert_layer, False),
    PreNormArchitecture("eurobert", "EuroBERT", "EuroBertDecoderLayer", _read_llama_layer, False),
    PreNormArchitecture("llama", "Llama", "LlamaDecoderLayer", _read_llama_layer),
    PreNormArchitecture("qwen3", "Qwen3", "Qwen3DecoderLayer", _read_llama_layer),
    PreNormArchitecture("smollm3", "SmolLM3", "SmolLM3DecoderLayer", _read_llama_layer),
    PreNormArchitecture("gemma3", "Gemma 3 (text)", "Gemma3DecoderLayer", _read_llama_layer),
)

SIZE_SETTINGS = {
    "layers": ("num_hidden_layers", "n_layers"),
    "hidden": ("hidden_size", "dim"),
    "inner": ("intermediate_size", "hidden_dim"),
    "heads": ("num_attention_heads", "n_heads"),
    "vocab_size": ("vocab_size",),
    "positions": ("max_position_embeddings",),
}
"""The sizes that decide how much memory a model of `ARCHITECTURES` takes: cpuft's name of each size, and the names that
it can have in config.json (BERT's, then DistilBERT's where that differs)."""

ATTENTION_DROPOUT_SETTINGS = ("attention_probs_dropout_prob", "attention_dropout")
"""Names in config.json of the dropout rate on attention probabilities, for models of `ARCHITECTURES`."""

DROPOUT_SETTINGS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "dropout",
    "attention_dropout",
    "seq_classif_dropout",
    "hidden_dropout",
    "embd_pdrop",
    "resid_pdrop",
    "attn_pdrop",
    "summary_last_dropout",
    "classifier_dropout_prob",
    "mlp_dropout",
    "embedding_dropout",
)
"""Names in config.json of all dropout rates, for any encoder of transformers: what --dropout sets."""

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
"""Model types that number positions from the padding token's id + 1 on, so that fewer positions are left for tokens
and the padding token must not change."""

ATTENTION_MODULE_NAMES = ("attention", "attn")
"""One of these is part of the names of attention modules, in the encoders and decoders of transformers."""


_PARALLEL_PARTS = 64
"""Least number of independent parts in the backward pass of disentangled attention, if there are as many pairs of an
example and a head. Each part takes memory for gradients of positions. The number of threads must not decide, because
sums in another order are rounded otherwise."""


def count_position_groups(examples: int, heads: int) -> int:
    """Return into how many groups of examples the backward pass of disentangled attention divides a batch."""
    return min(examples, -(-_PARALLEL_PARTS // heads))


Known = TypeVar("Known", Architecture, PreNormArchitecture)


def find_architecture(layer: object) -> Architecture | None:
    """Return the entry of `ARCHITECTURES` whose class of transformers an encoder layer has, told by the class's name.

    Returns None for any other object: a layer of another architecture, of a class that is defined outside of
    transformers, also a subclass, or one that is patched already.
    """
    return _find(layer, ARCHITECTURES)


def find_pre_norm_architecture(layer: object) -> PreNormArchitecture | None:
    """Return the entry of `PRE_NORM_ARCHITECTURES` for a layer, as `find_architecture` does."""
    return _find(layer, PRE_NORM_ARCHITECTURES)


def _find(layer: object, architectures: Sequence[Known]) -> Known | None:
    module = type(layer).__module__.split(".")
    if module[0] != "transformers":
        return None
    found = (one for one in architectures if one.model_type.replace("-", "_") == module[-2])
    return next((one for one in found if one.layer_class == type(layer).__name__), None)

"""Everything that cpuft knows about a model architecture by its name.

To bring the fast path to another architecture, add an entry to `ARCHITECTURES`, and a function that finds the modules
of one of its layers unless `_read_bert_layer` fits. No other file has to change. Data preparation reads this module,
too, so that it imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cpuft.train.fast.projection import PackedLinear


@dataclass(frozen=True)
class Heads:
    """The attention heads of one layer."""

    count: int
    """Number of heads."""
    size: int
    """Width of a head: the hidden size is count * size."""
    factor: float
    """By which scores are multiplied before softmax: 1 / sqrt(size)."""


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
    has_position_bias: bool = False
    """Whether the encoder passes a position bias to the layer as its third argument, and the layer returns a tuple,
    which begins with its output."""

    @property
    def linears(self) -> list[Any]:
        """The six linear layers: query, key, value, attention output, inner, outer."""
        return [self.query, self.key, self.value, self.attention_output, self.inner, self.outer]


def _read_bert_layer(layer: Any, is_last: bool) -> LayerParts:
    attention, attention_output = layer.attention.self, layer.attention.output
    return LayerParts(
        heads=Heads(attention.num_attention_heads, attention.attention_head_size, attention.attention_head_size**-0.5),
        attention_module=attention,
        query=attention.query,
        key=attention.key,
        value=attention.value,
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
        has_position_bias=True,
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


def _make_mpnet_bias(encoder: Any, length: int) -> Tensor:
    import torch  # not above, because of data preparation

    buckets = encoder.relative_position_bucket(torch.arange(1 - length, length))
    bias: Tensor = encoder.relative_attention_bias(buckets)
    return bias.T.float().contiguous()


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


def find_architecture(layer: object) -> Architecture | None:
    """Return the entry of `ARCHITECTURES` whose class of transformers an encoder layer has, told by the class's name.

    Returns None for any other object: a layer of another architecture, of a class that is defined outside of
    transformers, also a subclass, or one that is patched already.
    """
    module = type(layer).__module__.split(".")
    if module[0] != "transformers":
        return None
    found = (one for one in ARCHITECTURES if one.model_type.replace("-", "_") == module[-2])
    return next((one for one in found if one.layer_class == type(layer).__name__), None)

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
    """Number and size of attention heads, and the factor of their scores (1 / sqrt(size))."""

    count: int
    size: int
    factor: float


@dataclass
class LayerParts:
    """The modules of one encoder layer by their purpose. They stay in the model; this object only refers to them.

    Linear layers are torch's or have LoRA adapters of peft, see `projection.is_adapted`.
    """

    heads: Heads
    attention_module: nn.Module
    query: Any
    key: Any
    value: Any
    attention_dropout: nn.Dropout
    attention_output: Any
    attention_output_dropout: nn.Dropout | None
    attention_norm: nn.LayerNorm
    inner: Any
    """Linear layer from the hidden size to the intermediate size."""
    activation: Callable[[Tensor], Tensor]
    outer: Any
    """Linear layer from the intermediate size back to the hidden size."""
    outer_dropout: nn.Dropout
    outer_norm: nn.LayerNorm
    is_last: bool
    packed: PackedLinear | None = None
    """Query, key and value as one product; set when the layer is patched."""
    int8: bool = False
    """Whether products have 8-bit operands while the layer is in training."""
    recomputes: bool = False
    """Whether backward recomputes attention scores and what lies between the products (gradient checkpointing)."""

    @property
    def linears(self) -> list[Any]:
        """The six linear layers."""
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


@dataclass(frozen=True)
class Architecture:
    """An architecture with post-norm encoder layers like BERT's, which the fast path can replace."""

    model_type: str
    """As in config.json. With underscores it is the name of the package in transformers.models."""
    title: str
    """As people write it."""
    class_prefix: str
    """How the names of its classes in transformers begin."""
    layer_class: str
    """Class of an encoder layer in transformers."""
    read_layer: Callable[[Any, bool], LayerParts]
    """Return the parts of a layer, given the layer and whether it is the last one."""

    @property
    def first_token_head(self) -> str:
        """Class of the model whose head reads nothing but the encoder's output for the first token."""
        return f"{self.class_prefix}ForSequenceClassification"


ARCHITECTURES = (
    Architecture("bert", "BERT", "Bert", "BertLayer", _read_bert_layer),
    Architecture("roberta", "RoBERTa", "Roberta", "RobertaLayer", _read_bert_layer),
    Architecture("xlm-roberta", "XLM-RoBERTa", "XLMRoberta", "XLMRobertaLayer", _read_bert_layer),
    Architecture("camembert", "CamemBERT", "Camembert", "CamembertLayer", _read_bert_layer),
    Architecture("electra", "ELECTRA", "Electra", "ElectraLayer", _read_bert_layer),
    Architecture("distilbert", "DistilBERT", "DistilBert", "TransformerBlock", _read_distilbert_layer),
)

SIZE_SETTINGS = {
    "layers": ("num_hidden_layers", "n_layers"),
    "hidden": ("hidden_size", "dim"),
    "inner": ("intermediate_size", "hidden_dim"),
    "heads": ("num_attention_heads", "n_heads"),
    "vocab_size": ("vocab_size",),
    "positions": ("max_position_embeddings",),
}
"""Names in config.json of the sizes that decide how much memory a model of `ARCHITECTURES` takes."""

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
    """Return the architecture that an encoder layer of transformers is of; None if the fast path does not know it."""
    module = type(layer).__module__.split(".")
    if module[0] != "transformers":
        return None
    found = (one for one in ARCHITECTURES if one.model_type.replace("-", "_") == module[-2])
    return next((one for one in found if one.layer_class == type(layer).__name__), None)

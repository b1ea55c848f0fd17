"""Objectives of embedding models: contrastive learning from pairs, and learning from scores of similarity."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.config.train import TrainConfig
from cpuft.judge.metrics import average_searches, compute_label_metrics
from cpuft.train.data.archive import Tokens, hash_sequences
from cpuft.train.data.order import Indices
from cpuft.train.embedder import finish_embeddings, normalize, pool
from cpuft.train.embedding_form import EmbeddingForm, write_form
from cpuft.train.joint import deal_examples, make_joint_batches, run_joint_batch
from cpuft.train.objective.base import Batch, Objective, Predictions, pad, run_without_cache
from cpuft.train.objective.labels import list_scores
from cpuft.train.passes import Passes
from cpuft.train.retrieval_metrics import measure_queries

if TYPE_CHECKING:
    from cpuft.train.setup import TrainingSetup

_COSENT_SCALE = 20.0
"""By which CoSENT multiplies cosines (Su 2022, https://kexue.fm/archives/8847; sentence-transformers' default)."""


@dataclass(frozen=True)
class EmbeddingObjective(Objective):
    """What objectives of embedding models have in common: they compare the texts of all examples of a batch.

    The loss of an example depends on the other examples, and so on those of other ranks. So `represent` returns what
    the loss needs of each example, which ranks can exchange, and `joint_losses` the losses of all of them.
    """

    form: EmbeddingForm = field(default_factory=EmbeddingForm)
    texts: int = 2
    """Number of texts of a training example."""
    matryoshka: tuple[int, ...] = ()
    """Numbers of dimensions whose losses are added; empty: all dimensions only."""

    model_class = "AutoModel"
    label_type = torch.float32

    def plan_passes(self, setup: TrainingSetup, examples: Indices, epoch: int) -> Passes:
        """Return this rank's passes of an update, whose losses compare the examples of all ranks."""
        joint = make_joint_batches(self, setup, examples, epoch)
        tokens = sum(part.tokens for batch in joint if batch.counts[batch.place] for part in batch.parts)
        return Passes([partial(run_joint_batch, self, setup, batch) for batch in joint], tokens)

    def deal_to_ranks(self, setup: TrainingSetup, examples: Indices) -> list[Indices]:
        """Return for each rank, in their order, the examples of an update whose texts it embeds, at least one."""
        return deal_examples(setup, examples)

    def represent(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Run a forward pass; return what the loss needs, fp32, (examples, numbers). Abstract: NotImplementedError."""
        raise NotImplementedError

    def joint_losses(self, represented: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return losses, fp32, (examples,), from results of `represent` and `make_labels`. NotImplementedError here."""
        raise NotImplementedError

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Run a forward pass; return the losses of the examples, compared with each other only."""
        return self.joint_losses(self.represent(model, batch), batch.labels)

    def load_model(self, config: TrainConfig) -> Any:
        """Load the encoder in fp32, its unused pooler frozen. Raises CpuftError: it cannot be found or read."""
        model = super().load_model(config)
        for name, parameter in model.named_parameters():
            if "pooler" in name.split("."):
                parameter.requires_grad_(False)
        return model

    def make_batch(self, tokens: Tokens, examples: Indices, epoch: int = -1) -> Batch:
        """Return the padded batch of these examples: the first texts of all, then all second texts, and so on."""
        lengths, places, order = self._find_texts(tokens, examples)
        mask = np.arange(lengths.max()) < lengths[:, None]
        ids = pad(tokens.ids[places], mask, self.pad_id)
        inputs = {"input_ids": ids[order], "attention_mask": torch.from_numpy(mask[order]).long()}
        return Batch(inputs, self.make_labels(tokens, examples, mask), int(lengths.sum()))

    def _find_texts(self, tokens: Tokens, examples: Indices) -> tuple[Indices, Indices, Indices]:
        """Return lengths of texts and places of tokens, example by example, and the order of rows, text by text."""
        places, count = tokens.positions(examples), self.texts if len(tokens.types) else 1
        example = np.repeat(np.arange(len(examples)), tokens.lengths[examples])
        number = tokens.types[places].astype(np.int64) if count > 1 else 0
        lengths = np.bincount(example * count + number, minlength=len(examples) * count)
        order = np.arange(len(lengths)).reshape(len(examples), count).T.ravel()
        return lengths, places, order

    def embed(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the embeddings, not normalised or cut yet, fp32, shape (texts of an example, examples, hidden)."""
        hidden = run_without_cache(model, batch).last_hidden_state
        pooled = pool(self.form.pooling, hidden, batch.inputs["attention_mask"])
        return pooled.view(-1, len(batch.labels) if len(batch.labels) else len(pooled), pooled.shape[1])

    def cut(self, embeddings: torch.Tensor) -> list[torch.Tensor]:
        """Return the embeddings, (..., dimensions), cut to each number of `matryoshka`; [embeddings] without any."""
        return [embeddings[..., :dimensions] for dimensions in self.matryoshka] or [embeddings]

    def outputs(self, model: torch.nn.Module, batch: Batch) -> Predictions:
        """Return what `predict` does: an embedding model has no head with other outputs."""
        return self.predict(model, batch)

    def finish_folder(self, folder: Path, model: Any) -> None:
        """Write the files by which sentence-transformers loads the model that is saved in `folder`."""
        write_form(folder, self.form, int(model.config.hidden_size))


@dataclass(frozen=True)
class Pairs(EmbeddingObjective):
    """Contrastive learning: each anchor has to find its positive among the texts of all examples (InfoNCE).

    van den Oord and others 2018, arXiv:1807.03748; MultipleNegativesRankingLoss of sentence-transformers. Texts that
    equal the anchor's own positive are no negatives, nor are positives of examples with the same anchor.
    """

    temperature: float = 0.05

    label_type = torch.int64

    def represent(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the embeddings of each example's texts side by side, fp32, shape (examples, texts * hidden size)."""
        return self.embed(model, batch).transpose(0, 1).flatten(1)

    def make_labels(self, tokens: Tokens, examples: Indices, mask: NDArray[np.bool_]) -> torch.Tensor:
        """Return a key of each text, by which equal texts are found; int64, shape (examples, texts)."""
        lengths, places, _ = self._find_texts(tokens, examples)
        keys = hash_sequences(tokens.ids[places], lengths)
        return torch.from_numpy(keys.view(np.int64).reshape(len(examples), -1))

    def joint_losses(self, represented: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy of each anchor's search among all other texts, fp32, (examples,), summed over
        `matryoshka`, from results of `represent`, (examples, texts * hidden), and `make_labels`, (examples, texts).
        """
        count, texts = labels.shape
        # Candidates are all positives, then all first negatives, and so on.
        hidden = labels[:, 1:2] == labels[:, 1:].T.reshape(1, -1)
        hidden[:, :count] |= labels[:, :1] == labels[:, 0]
        hidden[:, :count] &= ~torch.eye(count, dtype=torch.bool)
        wanted, losses = torch.arange(count), represented.new_zeros(count)
        for embeddings in self.cut(represented.view(count, texts, -1)):
            compared = normalize(embeddings) if self.form.similarity == "cosine" else embeddings
            anchors, candidates = compared[:, 0], compared[:, 1:].transpose(0, 1).flatten(0, 1)
            scores = (anchors @ candidates.T / self.temperature).masked_fill(hidden, -torch.inf)
            losses = losses + torch.nn.functional.cross_entropy(scores, wanted, reduction="none")
        return losses

    def predict(self, model: torch.nn.Module, batch: Batch) -> Predictions:
        """Run a forward pass; return the embedding of each text of a retrieval set, fp32, shape (texts, dimensions)."""
        embeddings: Predictions = finish_embeddings(self.form, self.embed(model, batch)[0]).numpy()
        return embeddings

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        """Return each of `metrics` by name: its mean over the queries with a relevant document. `predictions` are the
        embeddings of a retrieval set, all queries, then all documents.
        """
        return average_searches(measure_queries(self.metrics, *self._split(predictions, tokens))[1])

    def list_predictions(self, predictions: Predictions, tokens: Tokens) -> dict[str, Any]:
        """Return "row", the numbers of the queries with a relevant document, and for each of `metrics` their values."""
        asked, values = measure_queries(self.metrics, *self._split(predictions, tokens))
        return {"row": asked, **values}

    def _split(
        self, predictions: Predictions, tokens: Tokens
    ) -> tuple[Predictions, Predictions, NDArray[np.int32], str]:
        queries = int(tokens.labels[:, 0].max()) + 1
        return predictions[:queries], predictions[queries:], tokens.labels, self.form.similarity


@dataclass(frozen=True)
class ScoredPairs(EmbeddingObjective):
    """Learning from scores of similarity: the cosine of two texts has to follow their score."""

    loss: str = "cosent"
    """cosent (Su 2022, https://kexue.fm/archives/8847) or mse."""

    def represent(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return each example's cosine for each of `matryoshka`, or for all dimensions; fp32, (examples, numbers)."""
        parts = [normalize(one) for one in self.cut(self.embed(model, batch))]
        return torch.stack([(first * second).sum(-1) for first, second in parts], 1)

    def joint_losses(self, represented: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each example's loss, summed over `matryoshka`, fp32, (examples,); with cosent, the same for all."""
        if self.loss == "mse":
            return (represented - labels[:, None]).square().sum(1)
        return torch.stack([_cosent(cosines, labels) for cosines in represented.T]).sum(0)

    def predict(self, model: torch.nn.Module, batch: Batch) -> Predictions:
        """Run a forward pass; return the cosine of each example with all dimensions, fp32, shape (examples, 1)."""
        first, second = normalize(self.embed(model, batch))
        cosines: Predictions = (first * second).sum(-1, keepdim=True).numpy()
        return cosines

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        """Return each of `metrics` by name: the correlations of cosines, shape (examples, 1), with the scores."""
        return compute_label_metrics(self.metrics, predictions[:, 0], tokens.labels)

    def list_predictions(self, predictions: Predictions, tokens: Tokens) -> dict[str, Any]:
        """Return of each example "label" (its score) and "prediction" (the cosine)."""
        return list_scores(predictions, tokens)


def _cosent(cosines: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return log(1 + sum of exp(20 * (cosine - other cosine))), over all pairs whose other one has a higher score."""
    differences = _COSENT_SCALE * (cosines[:, None] - cosines[None, :])
    wrong = differences[labels[:, None] < labels[None, :]]
    # Without pairs of different scores, the loss is 0, but it needs a gradient.
    return torch.logsumexp(torch.cat([cosines[:1] * 0, wrong]), 0).expand(len(labels))

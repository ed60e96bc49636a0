"""The transformers: a decoder that reads up to 64 characters, or words, of Shakespeare and predicts the next after each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sparsync_lab.workloads.base import rise_and_cosine, seeded
from sparsync_lab.workloads.byte_text import ByteText
from sparsync_lab.workloads.language import LanguageJob
from sparsync_lab.workloads.muon import Several
from sparsync_lab.workloads.shakespeare_text import Corpus, characters, corpus

DEVIATION = 0.02  # of the initial weights, as in GPT-2; divided by sqrt(2 layers) at the end of a residual branch
BETAS = (0.9, 0.95)
WARMUP = 0.05  # share of the steps
LOWEST = 0.1  # share of the learning rate at which the cosine ends


def draw(layers: Sequence[nn.Linear], last: Sequence[nn.Linear], branches: int) -> None:
    """Draw the weights of `layers`, and smaller ones for the `last` layers of residual branches; biases are zero."""
    for layer in layers:
        nn.init.normal_(layer.weight, std=DEVIATION / math.sqrt(branches) if layer in last else DEVIATION)
        if layer.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]  # torch's stubs say it never is
            nn.init.zeros_(layer.bias)


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each with normalised input and a residual connection."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        draw([self.query_key_value, self.attended, self.up, self.down], [self.attended, self.down], 2 * layers)

    def forward(self, x: Float[Tensor, "windows length width"]) -> Float[Tensor, "windows length width"]:
        split = self.query_key_value(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [windows, heads, length, width / heads]
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Map characters or bytes to scores of the next one; the embedding also computes the scores."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, layers) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=DEVIATION)
        nn.init.normal_(self.position, std=DEVIATION)

    def forward(self, character: Int[Tensor, "windows length"]) -> Float[Tensor, "windows length vocabulary"]:
        x = self.embedding(character) + self.position[: character.shape[1]]
        for block in self.blocks:
            x = block(x)
        return linear(self.norm(x), self.embedding.weight)


@dataclass(frozen=True)
class Gpt(LanguageJob):
    """Shakespeare's works, character by character.

    A decoder with learned positions, normalised before each layer, without dropout; AdamW with weight decay on matrices only, a
    linear warm-up over 5 % of the steps and a cosine to 10 % of the rate.
    """

    width: int = 128
    layers: int = 5
    heads: int = 4
    context: int = 64  # characters per window
    batch_size: int = 16  # windows in total over all ranks
    windows: int = 320  # for validation, evenly spaced in the held-out text
    learning_rate: float = 3e-3
    weight_decay: float = 0.1  # of two-dimensional weights
    clip_norm: float = 1.0  # of the reduced gradient
    data: str = ""  # a folder of files instead of the package
    # "muon": Muon for the matrices of the blocks, at AdamW's rate, and AdamW for the rest
    optimizer_name: str = "adamw"

    name: ClassVar[str] = "gpt"
    unit: ClassVar[str] = "validation perplexity per character"
    repeats_passes: ClassVar[bool] = True
    items: ClassVar[str] = "characters"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, {self.heads}, got {self.width}")
        if self.optimizer_name not in ("adamw", "muon"):
            raise ValueError(f"optimizer_name must be adamw or muon, got {self.optimizer_name!r}")

    @property
    def window(self) -> int:
        return self.context

    def model(self, seed: int) -> nn.Module:
        return seeded(self.new_model, seed)

    def new_model(self) -> nn.Module:
        """Draw a model; its `blocks` have the matrices for Muon."""
        return Decoder(self.text().vocabulary, self.context, self.width, self.layers, self.heads)

    def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
        others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        muons: list[nn.Parameter] = []
        if self.optimizer_name == "muon":
            assert isinstance(model.blocks, nn.Module)
            muons = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
        by_adamw = [each for each in matrices if not any(each is muon for muon in muons)]
        groups = [{"params": by_adamw, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer: Optimizer = AdamW(groups, lr=self.learning_rate, betas=BETAS)
        if muons:
            muon = Muon(muons, lr=self.learning_rate, weight_decay=self.weight_decay, adjust_lr_fn="match_rms_adamw")
            optimizer = Several(muon, optimizer)
        return optimizer, rise_and_cosine(optimizer, steps, round(WARMUP * steps), LOWEST)

    def text(self) -> Corpus | ByteText:
        return characters(self.data)

    def describe_text(self) -> dict[str, Any]:
        text = self.text()
        assert isinstance(text, Corpus)
        counts = {"training": text.training.numel(), "held_out": text.held_out.numel()}
        return {"sha256": text.sha256, self.items: counts, "types": text.types}


@dataclass(frozen=True)
class Words(Gpt):
    """Shakespeare's works, word by word, trained as `gpt`; punctuation marks and line ends are words, too."""

    vocabulary: int = 4_000  # the commonest words, and one for all others
    width: int = 64
    layers: int = 2
    context: int = 32  # words per window

    name: ClassVar[str] = "words"
    unit: ClassVar[str] = "validation perplexity per word"
    items: ClassVar[str] = "words"

    def text(self) -> Corpus:
        return corpus(self.data, self.vocabulary)

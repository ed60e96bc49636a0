"""A held-out job on code: gated convolutions that read up to 64 bytes of Python source and predict the next after each.

The source is that of SymPy 1.14.0, 26 MB in its wheel (BSD licence). It is read from the cache, not installed.
"""

import io
import math
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import glu, linear, pad

from sparsync_lab.workloads import byte_text
from sparsync_lab.workloads.byte_level import Code
from sparsync_lab.workloads.byte_text import ByteText
from sparsync_lab.workloads.gpt import DEVIATION, draw
from sparsync_lab.workloads.store import Package

PACKAGE = Package(
    "the source of SymPy",
    "sympy==1.14.0",
    "sympy-1.14.0-py3-none-any.whl",
    "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
    "6.3 MB",
    "--data FOLDER, with .py files",
)
SUFFIX = ".py"
ONE_OF = 50  # one of so many files is held out
TAPS = 3  # of a convolution


class GatedConvolution(nn.Module):
    """A causal, dilated convolution with a gate and normalised input, and a residual connection (arXiv 1612.08083)."""

    def __init__(self, width: int, dilation: int, layers: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.norm = nn.LayerNorm(width)
        self.taps, self.mixed = nn.Linear(TAPS * width, 2 * width), nn.Linear(width, width)
        draw([self.taps, self.mixed], [self.mixed], layers)

    def forward(self, x: Float[Tensor, "windows length width"]) -> Float[Tensor, "windows length width"]:
        length, reach = x.shape[1], self.dilation * (TAPS - 1)
        before = pad(self.norm(x), (0, 0, reach, 0))  # [windows, reach + length, width]
        seen = torch.cat([before[:, start : start + length] for start in range(0, reach + 1, self.dilation)], -1)
        return x + self.mixed(glu(self.taps(seen)))


class GatedConvolutions(nn.Module):
    """Map bytes to scores of the next one; the embedding also computes the scores. Dilations double up to the context."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        doublings = max(1, math.ceil(math.log2(context / 4)))
        self.blocks = nn.ModuleList(
            GatedConvolution(width, 2 ** (layer % doublings), layers) for layer in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=DEVIATION)

    def forward(self, byte: Int[Tensor, "windows length"]) -> Float[Tensor, "windows length vocabulary"]:
        x = self.embedding(byte)
        for block in self.blocks:
            x = block(x)
        return linear(self.norm(x), self.embedding.weight)


@dataclass(frozen=True)
class PythonSource(Code):
    """The source of SymPy, byte by byte, trained as `gpt`; a window may extend from one file into the next. It has no heads."""

    width: int = 128
    layers: int = 8

    name: ClassVar[str] = "sympy"
    held_out: ClassVar[bool] = True

    def new_model(self) -> nn.Module:
        return GatedConvolutions(self.text().vocabulary, self.context, self.width, self.layers)

    def text(self) -> ByteText:
        return python_text(self.data)


@lru_cache(maxsize=2)
def python_text(data: str) -> ByteText:
    """Read the .py files below folder `data`, or in the package if `data` is empty; about one file in 50 is held out.

    Raises DataMissingError if the package cannot be fetched, and ValueError if the folder has no such file.
    """
    if not data:
        return byte_text.split(package_files(PACKAGE.read()), PACKAGE.requirement, ONE_OF)
    files = byte_text.folder_files(Path(data), (SUFFIX,))
    if not files:
        raise ValueError(f"--data must name a folder with {SUFFIX} files, {data} has none")
    return byte_text.split(files, data, ONE_OF)


def package_files(content: bytes) -> dict[str, bytes]:
    """Read the .py files in the wheel, by their paths."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.endswith(SUFFIX)}

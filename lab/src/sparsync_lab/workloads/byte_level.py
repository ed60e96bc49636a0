"""Byte-level language models: gpt's decoder and training on C source; the quality is bits per byte."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from sparsync_lab.workloads.byte_text import ByteText
from sparsync_lab.workloads.gpt import Gpt
from sparsync_lab.workloads.linux_source import source_text


@dataclass(frozen=True)
class Code(Gpt):
    """The C source of Linux, byte by byte; a window may extend from one file into the next."""

    windows: int = 512  # of the validation, evenly over the held-out files
    learning_rate: float = 2e-3

    name: ClassVar[str] = "code"
    metric: ClassVar[str] = "bits per byte"
    unit: ClassVar[str] = "validation bits per byte"
    items: ClassVar[str] = "bytes"

    def quality(self, total: float, count: int) -> float:
        """Compute the bits per byte: the mean negative log-likelihood in nats divided by ln 2."""
        return total / count / math.log(2)

    def text(self) -> ByteText:
        return source_text(self.data)

    def describe_text(self) -> dict[str, Any]:
        return dict(self.text().described)

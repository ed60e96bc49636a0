"""Byte-level language models: gpt's decoder and training on C source, with bits per byte as the quality."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from sparsync_lab.workloads.base import require_positive
from sparsync_lab.workloads.byte_text import ByteText
from sparsync_lab.workloads.gpt import Gpt
from sparsync_lab.workloads.linux_source import source_text


@dataclass(frozen=True)
class Code(Gpt):
    """The C source of Linux, byte by byte. A sample is a window of the training text that starts anywhere, across ends of files too."""

    windows: int = 512  # of the validation, evenly over the held-out files
    learning_rate: float = 2e-3

    name: ClassVar[str] = "code"
    metric: ClassVar[str] = "bits per byte"
    unit: ClassVar[str] = "validation bits per byte"
    items: ClassVar[str] = "bytes"

    def quality(self, total: float, count: int) -> float:
        """Return the bits per byte, the mean negative log-likelihood in nats by ln 2."""
        require_positive(count=count)
        return total / count / math.log(2)

    def _per_nat(self, quality: float) -> float:
        return 1 / math.log(2)

    def _corpus(self) -> ByteText:
        return source_text(self.data)

    def _described_data(self) -> dict[str, Any]:
        return dict(self._corpus().described)

"""What tests of the Triton kernels share: a GPU where there is one, else Triton's interpreter, and awkward inputs."""

import os

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="triton is not installed here; it comes with torch on machines with CUDA")

DEVICE = "cuda" if CUDA else "cpu"
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-40, 3e38, -3e38, torch.inf, -torch.inf, torch.nan, -torch.nan]
KINDS = ("normal", "special", "ties", "equal", "zero", "non-finite", "tiny", "two-valued")


def made(kind: str, n: int, seed: int = 0) -> Tensor:
    """A vector of `n` elements."""
    source = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, generator=source)
    if kind == "special":
        return torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (n,), generator=source)].to(DEVICE)
    spoilt = normal.clone()
    if n:
        spoilt[n // 2], spoilt[-1], spoilt[0] = torch.nan, torch.inf, -torch.inf
    zero = torch.zeros(n)
    zero[::2] = -0.0
    return {
        "normal": normal,
        "ties": normal.mul(2).round(),
        "equal": torch.full((n,), -2.0),
        "zero": zero,
        "non-finite": spoilt,
        "tiny": normal * 1e-40,  # denormal
        "two-valued": torch.where(normal > 2, 2.0, 1.0),
    }[kind].to(DEVICE)

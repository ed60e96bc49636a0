"""A GPU for the Triton kernels if there is one, else Triton's interpreter."""

import pytest
import torch

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="triton is not installed here; it comes with torch on machines with CUDA")

DEVICE = "cuda" if CUDA else "cpu"

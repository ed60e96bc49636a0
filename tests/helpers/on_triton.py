"""A GPU for the Triton kernels where there is one, else Triton's interpreter."""

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="triton is not installed here; it comes with torch on machines with CUDA")

DEVICE = "cuda" if CUDA else "cpu"

"""What every test runs under: executed annotations, one torch thread, and the same hypothesis examples each time."""

import sys
from typing import runtime_checkable

import hypothesis
import jaxtyping
import torch

import annotations

assert "sparsync" not in sys.modules, "sparsync was imported before its annotations could be made to check"
jaxtyping.jaxtyped = annotations.executed

# An annotation that names a protocol can be checked only once the protocol is runtime-checkable, so these two become it before any other
# module is loaded. Their own module stays outside the hook; its methods are never run.
with jaxtyping.install_import_hook("sparsync.core", "annotations.checked"):
    from sparsync import protocols
runtime_checkable(protocols.Comm)
runtime_checkable(protocols.Scheme)
jaxtyping.install_import_hook("sparsync", "annotations.checked")

torch.set_num_threads(1)
hypothesis.settings.register_profile("sparsync", deadline=None, derandomize=True)
hypothesis.settings.load_profile("sparsync")

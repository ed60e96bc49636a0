"""Which backend the kernels run on: the C++ one at the best instruction set of this machine, else the reference in plain torch."""

import os
import warnings
from functools import cache
from importlib import import_module
from types import ModuleType, TracebackType

import torch
from torch import Tensor

try:
    from sparsync.kernels import _cpu  # type: ignore[attr-defined]  # built from csrc/
except ImportError as missing:
    _cpu = None
    _why_missing = str(missing)
else:
    _why_missing = ""

REFERENCE = "reference"
TRITON = "triton"


class set_backend:  # noqa: N801  # called as a function, or in a with statement
    """Runs all kernels on the named backend from now on, or in a with statement until its end: for tests and measurements.

    Names are those of `backends()`; "cpp" is the fastest of the C++ ones. Results do not depend on it, bit for bit.
    Raises ValueError for a name that is none, and RuntimeError for a backend that this installation or machine lacks.
    """

    def __init__(self, name: str) -> None:
        self._before = _choice.name
        _choice.name = _resolved(name)

    def __enter__(self) -> "set_backend":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _choice.name = self._before


class _Choice:
    """The backend in use; None until the first kernel runs or one is asked for."""

    name: str | None = None


_choice = _Choice()
_NAMES = (REFERENCE, TRITON, "cpp", "cpp/scalar", "cpp/avx2", "cpp/avx512")


def backends() -> list[str]:
    """The backends that can run here, the fastest first."""
    return [*(f"cpp/{level}" for level in (_cpu.levels() if _cpu else [])), *([TRITON] if _triton() else []), REFERENCE]


def backend() -> str:
    """The backend that kernels run on, for tensors in this machine's memory: "cpp/avx512", "cpp/avx2", "cpp/scalar" or "reference"."""
    if _choice.name is None:
        _choice.name = backends()[0]
        if _cpu is None:
            warnings.warn(
                f"sparsync runs on its slow reference kernels, because the C++ ones are missing ({_why_missing}); "
                "install a C++ compiler such as g++ and install sparsync again",
                RuntimeWarning,
                stacklevel=3,
            )
    return _choice.name


def native(*tensors: Tensor) -> tuple[ModuleType, str] | None:
    """The C++ module and the instruction set to call it with, or None where the reference has to do it.

    The C++ kernels take one-dimensional contiguous tensors in this machine's memory, of fewer than 2^31 elements.
    """
    name = backend()
    if name in (REFERENCE, TRITON) or _cpu is None:
        return None
    for each in tensors:
        if each.device.type != "cpu" or each.dim() != 1 or not each.is_contiguous() or each.numel() >= 2**31:
            return None
    return _cpu, name.removeprefix("cpp/")


def on_triton(*tensors: Tensor) -> ModuleType | None:
    """The Triton kernels, where these tensors are on a GPU, or where they were asked for and Triton's interpreter is on; else None."""
    device = tensors[0].device
    wanted = device.type == "cuda" or (backend() == TRITON and os.environ.get("TRITON_INTERPRET") == "1")
    if backend() == REFERENCE or not wanted or any(each.device != device for each in tensors):
        return None
    if any(each.dim() != 1 or not each.is_contiguous() or each.numel() >= 2**31 for each in tensors):
        return None
    return _triton()


def _triton() -> ModuleType | None:
    """None where Triton is not installed, or there is nothing it could run on: asked anew each time, as interpreters get turned on."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    return _triton_kernels()


@cache
def _triton_kernels() -> ModuleType | None:
    try:
        return import_module("sparsync.kernels.cuda")
    except ImportError:
        return None


def _resolved(name: str) -> str:
    if name not in _NAMES:
        raise ValueError(f"a backend is one of {', '.join(_NAMES)}, got {name!r}")
    if name == TRITON and _triton() is None:
        raise RuntimeError(
            "the backend 'triton' needs triton and a GPU, or TRITON_INTERPRET=1 in the environment of the process for its interpreter"
        )
    if name in (REFERENCE, TRITON):
        return name
    if _cpu is None:
        raise RuntimeError(
            f"the backend {name!r} is not there, because the C++ kernels are missing ({_why_missing}); "
            "install a C++ compiler such as g++ and install sparsync again"
        )
    if name != "cpp" and name not in backends():
        raise RuntimeError(
            f"the backend {name!r} needs instructions that this processor lacks; here there are {', '.join(backends())}"
        )
    return backends()[0] if name == "cpp" else name

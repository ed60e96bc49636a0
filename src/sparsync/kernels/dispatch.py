"""The registry of kernels and codecs: which functions do an operation, and in which order they are asked.

A backend is a table from the name of an operation to a function. `run` asks the backend in use, then the one for GPUs, then the
reference. A function that does not take the types, the device or the shape of its tensors returns NotImplemented, and the next one is
asked. The reference takes everything.

    backend     where                           operations
    cpp         csrc/, at one instruction set   all
    triton      kernels/cuda/                   the passes, top-k, rows, steps, digests, values, reading and writing at positions
    reference   *reference.py, in torch         all

Besides, the first two do some loops over several vectors in one call. `fused` asks for these; the loop stands where it is called.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from inspect import isfunction
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor

from sparsync.kernels import candidates, codec_reference, reference, share_reference, step_reference, value_reference


def _reason(error: ImportError, folder: Path) -> str:
    """Return why the C++ kernels in `folder` could not be imported, in words; `error` is what Python says."""
    there = sorted(path.name for path in folder.glob("_cpu.*so"))
    if any(f"_cpu{suffix}" in there for suffix in EXTENSION_SUFFIXES):
        return f"they cannot be loaded: {error}"
    if there:
        return f"they were built for another Python: {', '.join(there)}"
    return "they were not built when sparsync was installed"


_why_missing = ""
try:
    from sparsync.kernels import _cpu  # type: ignore[attr-defined]  # built from csrc/
except ImportError as missing:
    _cpu, _why_missing = None, _reason(missing, Path(__file__).parent)

# Any: each operation has its own signature, that of `sparsync.kernels` with all arguments given.
Kernel = Callable[..., Any]

CPP = "cpp"
REFERENCE = "reference"
TRITON = "triton"
_NAMES = (REFERENCE, TRITON, CPP, "cpp/scalar", "cpp/avx2", "cpp/avx512")

# Some operations have a faster function in `candidates`, beside that of their specification.
_REFERENCE: Mapping[str, Kernel] = {
    name: function
    for module in (value_reference, share_reference, step_reference, codec_reference, reference, candidates)
    for name, function in vars(module).items()
    if isfunction(function)
}


class _Chosen:
    """The backend in use, and for each operation the functions to ask in order; None until the first kernel runs."""

    name: str | None = None
    kernels: Mapping[str, tuple[Kernel, ...]] | None = None
    tables: tuple[Mapping[str, Any], ...] = ()  # of the C++ ones and of those for GPUs, where these are asked


_chosen = _Chosen()


def run(operation: str, *arguments: Any) -> Any:  # Any: as for Kernel
    """Return what the first function for `operation` that takes `arguments`, which have been checked, returns."""
    for kernel in (_chosen.kernels or _default())[operation]:
        result = kernel(*arguments)
        if result is not NotImplemented:
            return result
    raise AssertionError(f"the reference does not take the arguments of {operation}")


def fused(operation: str, *arguments: Any) -> Any:  # Any: as for Kernel
    """Return what the C++ backend, or the one for GPUs, does for several vectors in one call.

    Returns NotImplemented where the reference is in use, or none takes `arguments`, or would raise: then loop over them.
    """
    if _chosen.kernels is None:
        _default()
    for table in _chosen.tables:
        if operation in table and (result := table[operation](*arguments)) is not NotImplemented:
            return result
    return NotImplemented


def plain_(a: Tensor, b: Tensor) -> None:
    """Add `a` to `b` [n], float32: the pass over 12 bytes an element that benchmarks compare others with."""
    if not backend().startswith(CPP) or _cpu is None or _cpu.plain_(a, b) is NotImplemented:
        b.add_(a)


class set_backend:  # noqa: N801  # called as a function, or in a with statement
    """Run all kernels and codecs on the named backend from now on, or in a with statement until its end: for tests and measurements.

    Names are those of `backends()`; "cpp" is the fastest of the C++ ones. Results do not depend on it, bit for bit.
    Raises ValueError for an unknown name, and RuntimeError for a backend that this installation or machine lacks.
    """

    def __init__(self, name: str) -> None:
        self._before = _chosen.name
        _choose(_resolved(name))

    def __enter__(self) -> "set_backend":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _choose(self._before)


def backends() -> list[str]:
    """Return the backends that can run here, the fastest first."""
    return [*(f"cpp/{level}" for level in (_cpu.levels() if _cpu else [])), *([TRITON] if _triton() else []), REFERENCE]


def why_missing() -> str | None:
    """Return why the C++ kernels cannot be loaded; None where they are there."""
    return None if _cpu else _why_missing


def backend() -> str:
    """Return the backend for tensors in this machine's memory: "cpp/avx512", "cpp/avx2", "cpp/scalar" or "reference"."""
    if _chosen.name is None:
        _default()
    assert _chosen.name is not None
    return _chosen.name


def _default() -> Mapping[str, tuple[Kernel, ...]]:
    """Choose the fastest backend, and return its functions."""
    _choose(backends()[0])
    if _cpu is None:
        warnings.warn(
            f"sparsync runs on its slow reference kernels, because the C++ ones are missing ({_why_missing}); "
            "install a C++ compiler such as g++ and install sparsync again",
            RuntimeWarning,
            stacklevel=4,
        )
    assert _chosen.kernels is not None
    return _chosen.kernels


def _choose(name: str | None) -> None:
    """Make `name` the backend in use, or none for None. The one place that sets the instruction set of the C++ kernels and codecs."""
    if name is not None and name.startswith(CPP) and _cpu is not None:
        _cpu.set_level(name.removeprefix("cpp/"))
    _chosen.name = name
    triton = name is not None and name != REFERENCE and _triton() is not None
    _chosen.tables = () if name is None else _tables(name, triton)
    _chosen.kernels = None if name is None else _in_order(name, triton)
    if _triton() is not None:
        from sparsync.kernels.cuda import launch  # loads Triton

        launch.take_tensors_of_any_device(name == TRITON)


@cache
def _in_order(name: str, triton: bool) -> Mapping[str, tuple[Kernel, ...]]:
    """Return for each operation the functions to ask under the backend `name`."""
    tables = [*_tables(name, triton), _REFERENCE]
    return {operation: tuple(table[operation] for table in tables if operation in table) for operation in _REFERENCE}


def _tables(name: str, triton: bool) -> tuple[Mapping[str, Any], ...]:  # Any: the names of a module
    """Return the functions of the C++ backend, if `name` is one, and those for GPUs, if `triton`."""
    return (*([vars(_cpu)] if name.startswith(CPP) else []), *([vars(_triton())] if triton else []))


def _triton() -> ModuleType | None:
    """Return the Triton kernels; None where Triton is missing or has no GPU. Asked each time: its interpreter may be turned on."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    return _triton_kernels()


@cache
def _triton_kernels() -> ModuleType | None:
    try:
        from sparsync.kernels import cuda
    except ImportError:
        return None
    return cuda


def _resolved(name: str) -> str:
    """Return the full name of a backend that can run here."""
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
    if name != CPP and name not in backends():
        raise RuntimeError(
            f"the backend {name!r} needs instructions that this processor lacks; here there are {', '.join(backends())}"
        )
    return backends()[0] if name == CPP else name

"""Dispatch of operations to the backends of the kernels.

The specification of an operation is a function in plain torch, decorated by `operation`. A backend is a table from names of operations to
functions. `run` tries the backend in use, then the one for GPUs. A function that does not support the types, the device or the shape of
its tensors returns NotImplemented, and `run` tries the next; the specification supports everything.

    backend     where                           operations
    cpp         csrc/, at one instruction set   all
    triton      kernels/cuda/                   the passes, top-k, rows, steps, digests, values, reading and writing at positions
    reference   the specification               all
"""

import os
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from types import ModuleType, TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")


why_missing: str | None = None  # why the C++ kernels cannot be loaded; None if they are loaded
try:
    from sparsync.kernels import _cpu  # type: ignore[attr-defined]  # built from csrc/
except ImportError as missing:
    _cpu, why_missing = None, str(missing)

CPP = "cpp"
REFERENCE = "reference"
TRITON = "triton"
# Any: an operation has the signature of its specification, with all arguments given.
Table = Mapping[str, Any]


class _Chosen:
    """The backend in use, and its tables in order; None until the first kernel runs."""

    name: str | None = None
    tables: tuple[Table, ...] | None = None


_chosen = _Chosen()


def operation(specification: Callable[Given, Result]) -> Callable[Given, Result]:
    """Decorate a specification: call the first backend that supports the arguments, else the specification."""
    name, parameters = specification.__name__, signature(specification)
    defaults = [entry.default for entry in parameters.parameters.values() if entry.default is not entry.empty]
    count = len(parameters.parameters)

    @wraps(specification)
    def asked(*arguments: Any, **named: Any) -> Any:  # Any: as of the specification
        if named:
            bound = parameters.bind(*arguments, **named)
            bound.apply_defaults()
            arguments = bound.args
        elif len(arguments) < count:
            arguments = *arguments, *defaults[len(arguments) - count :]
        return run(name, specification, *arguments)

    return asked


def run(name: str, specification: Callable[..., Any], *arguments: Any) -> Any:  # Any: as of the specification
    """Call the first function for the operation `name` that supports `arguments`, else its specification."""
    for table in _default() if _chosen.tables is None else _chosen.tables:
        if (kernel := table.get(name)) is not None and (result := kernel(*arguments)) is not NotImplemented:
            return result
    return specification(*arguments)


class set_backend:  # noqa: N801  # called as a function, or in a with statement
    """Run all kernels and codecs on the named backend, from now on or inside a with statement, for tests and measurements.

    `backends()` lists the names; "cpp" is the fastest C++ backend. Results are bit-identical on all backends.
    Raises ValueError for any other name.
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
    """List the backends that can run here, the fastest first."""
    return [*(f"cpp/{level}" for level in (_cpu.levels() if _cpu else [])), *([TRITON] if _triton() else []), REFERENCE]


def backend() -> str:
    """Return the backend for tensors in host memory: "cpp/avx512", "cpp/avx2", "cpp/scalar" or "reference"."""
    if _chosen.name is None:
        _default()
    assert _chosen.name is not None
    return _chosen.name


def _default() -> tuple[Table, ...]:
    """Choose the fastest backend, and return its tables."""
    _choose(backends()[0])
    if _cpu is None:
        warnings.warn(
            f"sparsync runs on its slow reference kernels, because the C++ ones are missing ({why_missing}); "
            "install a C++ compiler such as g++ and install sparsync again",
            RuntimeWarning,
            stacklevel=4,
        )
    assert _chosen.tables is not None
    return _chosen.tables


def _choose(name: str | None) -> None:
    """Set the backend in use; None: none. Only this function sets the instruction set of the C++ kernels and codecs."""
    compiled = name is not None and name.startswith(CPP)
    if compiled and _cpu is not None and name is not None:
        _cpu.set_level(name.removeprefix("cpp/"))
    triton = _triton()
    on_gpu = [] if triton is None or name in (None, REFERENCE) else [vars(triton)]
    _chosen.name = name
    _chosen.tables = None if name is None else (*([vars(_cpu)] if compiled else []), *on_gpu)
    if triton is not None:
        from sparsync.kernels.cuda import launch  # loads Triton

        launch.take_tensors_of_any_device(name == TRITON)


def _triton() -> ModuleType | None:
    """Return the Triton kernels; None without Triton or without a GPU. Not cached, because its interpreter may be turned on."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    try:
        from sparsync.kernels import cuda
    except ImportError:
        return None
    return cuda


def _resolved(name: str) -> str:
    """Resolve the name of a backend, which must be able to run here."""
    here = backends()
    if name == CPP and _cpu is not None:
        return here[0]
    if name not in here:
        raise ValueError(
            f"a backend is one that runs here, {', '.join(here)}, got {name!r}; triton needs a GPU or TRITON_INTERPRET=1 in the "
            f"environment, and cpp what a C++ compiler makes when sparsync is installed"
        )
    return name

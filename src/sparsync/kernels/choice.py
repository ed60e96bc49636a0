"""Which backend the kernels run on: the C++ one at the best instruction set of this machine, else the reference in plain torch."""

import warnings
from types import ModuleType, TracebackType

from torch import Tensor

try:
    from sparsync.kernels import _cpu  # type: ignore[attr-defined]  # built from csrc/
except ImportError as missing:
    _cpu = None
    _why_missing = str(missing)
else:
    _why_missing = ""

REFERENCE = "reference"


class use:  # noqa: N801  # called as a function, or in a with statement
    """Runs all kernels on the named backend from now on, or in a with statement until its end: for tests and measurements.

    Names are those of `backends()`; "cpp" is the fastest of the C++ ones. Results do not depend on it, bit for bit.
    Raises ValueError for a name that is none, and RuntimeError for a backend that this installation or machine lacks.
    """

    def __init__(self, name: str) -> None:
        self._before = _choice.name
        _choice.name = _resolved(name)

    def __enter__(self) -> "use":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _choice.name = self._before


class _Choice:
    """The backend in use; None until the first kernel runs or one is asked for."""

    name: str | None = None


_choice = _Choice()
_NAMES = (REFERENCE, "cpp", "cpp/scalar", "cpp/avx2", "cpp/avx512")


def backends() -> list[str]:
    """The backends that can run here, the fastest first."""
    return [*(f"cpp/{level}" for level in (_cpu.levels() if _cpu else [])), REFERENCE]


def backend() -> str:
    """The backend that kernels run on: "cpp/avx512", "cpp/avx2", "cpp/scalar" or "reference"."""
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
    if name == REFERENCE or _cpu is None:
        return None
    for each in tensors:
        if each.device.type != "cpu" or each.dim() != 1 or not each.is_contiguous() or each.numel() >= 2**31:
            return None
    return _cpu, name.removeprefix("cpp/")


def _resolved(name: str) -> str:
    if name not in _NAMES:
        raise ValueError(f"a backend is one of {', '.join(_NAMES)}, got {name!r}")
    if name == REFERENCE:
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

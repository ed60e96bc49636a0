"""The specification of the kernels, for comparison with backends: `reference.top_k(x, 5)` runs it, whatever backend is in use."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any  # Any: as of an operation

from sparsync.kernels import codec_reference, operations, set_backend, value_reference


def named(operation: str) -> Callable[..., Any]:
    """Look up the operation of this name."""
    return next(
        vars(each)[operation] for each in (operations, value_reference, codec_reference) if operation in vars(each)
    )


def filled(operation: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Complete an operation's arguments with its defaults, as backends receive them."""
    bound = signature(named(operation)).bind(*arguments)
    bound.apply_defaults()
    return bound.args


class _Reference:
    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def called(*arguments: Any, **more: Any) -> Any:
            with set_backend("reference"):
                return named(operation)(*arguments, **more)

        return called


reference = _Reference()

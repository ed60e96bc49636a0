"""How FSDP2's all-gather sends parameters."""

from dataclasses import dataclass

from sparsync.wire import Values, check_values


@dataclass(frozen=True)
class ParameterFormat:
    """The format of parameters on their way from their owners to all ranks.

    With `differences`, an owner sends the rounded difference between its shard and what all ranks hold of it: errors do not pile up, and
    the gather of the backward pass sends nothing, but every rank always holds all parameters, as with reshard_after_forward=False.
    Without, each gather sends the rounded shard itself, as ZeRO++ does (arXiv:2306.10209): no memory, twice the bytes, and the rounding
    is that of the parameters instead of their latest change.
    """

    values: Values = "int8"
    differences: bool = True

    def __post_init__(self) -> None:
        check_values(self.values)


def parameter_format(given: ParameterFormat | Values) -> ParameterFormat:
    """Return the format of what `attach` was given. Raises ValueError for an unknown one."""
    return given if isinstance(given, ParameterFormat) else ParameterFormat(given)

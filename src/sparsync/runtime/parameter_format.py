"""How FSDP2's all-gather sends parameters."""

from dataclasses import dataclass

from sparsync.wire import Values, check_values


@dataclass(frozen=True)
class ParameterFormat:
    """How FSDP2's all-gather sends parameters.

    With `differences`, an owner sends the rounded difference between its shard and the one that all ranks hold. Errors do not pile up, and
    the gather of the backward pass sends nothing, but every rank always holds all parameters, as with reshard_after_forward=False.
    Without, each gather sends the rounded shard, as ZeRO++ does (arXiv:2306.10209): no memory, twice the bytes, and parameters are rounded
    instead of their latest change.
    """

    values: Values = "int8"
    differences: bool = True

    def __post_init__(self) -> None:
        check_values(self.values)

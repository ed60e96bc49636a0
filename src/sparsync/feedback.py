"""Error feedback: what was not sent is kept, by parameter, and joins the next gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.core import Bucket, ParameterSpan, Report
from sparsync.phases import phase

Residuals = Literal["float32", "bfloat16"]  # what residuals are kept in


@dataclass(frozen=True)
class Terms:
    """What is to be added: `acc`, which may be the memory of `wide`, becomes wide + narrow, where `narrow` may be of 16 bits."""

    residual: Tensor
    wide: Tensor
    narrow: Tensor
    acc: Tensor


@dataclass(frozen=True)
class Accumulated:
    """What came in and was kept back before, together."""

    acc: Tensor  # [n], float32, or float64 for float64 gradients; perhaps the memory of the gradient
    residual: Tensor  # [n], as it was; for writing
    finite: bool  # whether acc holds neither NaN nor Inf

    def keep(self, bucket: Bucket) -> None:
        """Ends the step: the residual becomes `acc` and the gradient zero, and what was sent is yet to go from one to the other."""
        if self.acc is bucket.grad and self.acc.dtype == self.residual.dtype:
            kernels.move_(self.residual, bucket.grad)
        else:
            self.residual.copy_(self.acc)
            bucket.grad.zero_()


@dataclass
class ErrorFeedback:
    """The residual of one rank, keyed by parameter name: a new bucket layout lays it out anew and loses nothing.

    The residual is float32, or float64 for float64 gradients, in units of the gradient (the learning rate is not in it). As "bfloat16" it
    takes half the memory, and what rounding to 8 bits takes away is lost.
    """

    precision: Residuals = "float32"

    by_name: dict[str, Tensor] = field(
        default_factory=dict
    )  # flat; views of the buckets' residuals, which stay adjacent
    _flat: dict[tuple[ParameterSpan, ...], Tensor] = field(default_factory=dict)
    _rank: int | None = None

    def residual(self, bucket: Bucket, rank: int) -> Tensor:
        """The residual of this bucket's parameters, [n], for writing; zero for parameters not seen before.

        Raises RuntimeError when this object already serves another rank, and ValueError when a parameter's size has changed.
        """
        self.serve(rank)
        flat = self._flat.get(bucket.layout)
        if flat is None or flat.device != bucket.grad.device:
            flat = self._lay_out(bucket)
        return flat

    def accumulate(self, bucket: Bucket, rank: int) -> "Accumulated":
        """The residual of this bucket's parameters plus its gradient; the residual itself is not changed.

        The sum takes the place of the gradient in `bucket.grad` where that has the residual's type, so that no memory is needed for it.
        Raises as `residual` does.
        """
        terms = self.terms(bucket, rank)
        with phase("accumulate"):
            finite = kernels.accumulate(terms.wide, terms.narrow, out=terms.acc)
        return Accumulated(terms.acc, terms.residual, finite)

    def terms(self, bucket: Bucket, rank: int) -> Terms:
        """What `accumulate` adds, for a kernel that does more than adding in the same pass. Raises as `residual` does."""
        residual, grad = self.residual(bucket, rank), bucket.grad
        if residual.dtype == torch.bfloat16:
            wide = grad if grad.dtype == torch.float32 else grad.float()
            return Terms(residual, wide, residual, wide)
        return Terms(residual, residual, grad, grad if grad.dtype == residual.dtype else torch.empty_like(residual))

    def put_back(self, bucket: Bucket) -> None:
        """Adds what was written to `bucket.grad`, P times the same over all ranks, so that together they keep again all that came in."""
        if self._rank is not None:
            self.residual(bucket, self._rank).add_(bucket.grad)

    def serve(self, rank: int) -> None:
        """Takes the first rank that calls for the one whose state this is; raises RuntimeError when another one calls."""
        if self._rank is None:
            self._rank = rank
        if self._rank != rank:
            raise RuntimeError(
                f"this scheme keeps the state of rank {self._rank} and was called by rank {rank}; make one scheme per rank"
            )

    def rescale(self, factors: Mapping[str, float]) -> None:
        """Multiplies the residual of each named parameter, in place."""
        for name, factor in factors.items():
            if name in self.by_name and factor != 1.0:
                self.by_name[name].mul_(factor)

    def state_dict(self) -> dict[str, Tensor]:
        """The residual of each parameter, copied: flat, in its own precision."""
        return {name: part.clone() for name, part in self.by_name.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.by_name = {name: part.clone() for name, part in state.items()}
        self._flat.clear()
        self._rank = None

    def _lay_out(self, bucket: Bucket) -> Tensor:
        dtype = torch.promote_types(bucket.grad.dtype, torch.float32)
        if dtype == torch.float32 and self.precision == "bfloat16":
            dtype = torch.bfloat16
        flat = torch.zeros(bucket.grad.numel(), dtype=dtype, device=bucket.grad.device)
        names = {slot.name for slot in bucket.layout}
        for layout in [old for old in self._flat if any(slot.name in names for slot in old)]:
            del self._flat[layout]  # its parameters move; the others keep their views and move when their bucket comes
        for slot in bucket.layout:
            kept = self.by_name.get(slot.name)
            if kept is not None and kept.numel() != len(slot.span):
                raise ValueError(
                    f"the residual of {slot.name!r} has {kept.numel()} elements, its gradient {len(slot.span)}; "
                    "load the state of the same model, or start without"
                )
            if kept is not None:
                slot.span.of(flat).copy_(kept)
            self.by_name[slot.name] = slot.span.of(flat)
        self._flat[bucket.layout] = flat
        return flat


def overflowed(report: Report, grad: Tensor) -> bool:
    """Whether what was written to `grad` holds NaN or Inf, alike on all ranks; what the report tells about it counts."""
    told = report.details.get("overflow")
    return not kernels.all_finite(grad) if told is None else bool(told)  # a host sync


def check_residuals(residuals: str) -> None:
    """Raises ValueError for what residuals cannot be kept in."""
    if residuals not in get_args(Residuals):
        raise ValueError(f"residuals must be one of {', '.join(get_args(Residuals))}, got {residuals!r}")


def redistributed(states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    """The residuals of a world of `size` ranks, made from those of all ranks of another one, without losing mass.

    New rank r gets the sum of the old ranks r, r + size, r + 2 size, ...; ranks beyond the old world start with nothing. The sum over
    ranks of every element stays the same, up to the rounding of the additions (none when the world grows).
    """
    if size < 1:
        raise ValueError(f"a world has at least 1 rank, got {size}")
    dealt: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for rank, state in enumerate(states):
        mine = dealt[rank % size]
        for name, part in state.items():
            mine[name] = mine[name] + part if name in mine else part.clone()
    return dealt


def state_from(state: Mapping[str, Any], key: str, scheme: str) -> Any:  # Any: what state_dict put under this key
    """`state[key]`, or a ValueError that tells what the state dict lacks."""
    if key not in state:
        raise ValueError(
            f"the state of {scheme} needs {key!r}, this one has {sorted(state)}; load what its state_dict returned"
        )
    return state[key]

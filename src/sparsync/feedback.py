"""Error feedback: a residual per parameter holds what was not sent, and joins the next gradient (arXiv 1704.05021)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sparsync.core import Bucket, ParameterSpan, Rows, Span, Sparse, exact_divisor, phase
from sparsync.kernels import operations as kernels
from sparsync.kernels.operations import smallest_magnitude

Residuals = Literal["float32", "bfloat16"]

# A selection starts at this factor times the smallest magnitude of the last one. A hint that changes no result.
_WARM = 0.97


class Accumulator:
    """acc = decay * residual + gradient of one bucket at one step, and selections from it.

    The sum is computed once, when `values` is first read or in the same pass as the first selection. It overwrites `bucket.grad` if
    that has the residual's type. The residual changes only in `keep`.
    """

    def __init__(self, bucket: Bucket, residual: Tensor, hints: dict[str, float], decay: float = 1.0) -> None:
        self.residual = residual  # [n]
        self._bucket = bucket
        self._hints = hints
        self._decay, self.skip = decay, bucket.skip
        self._finite: bool | Tensor | None = None  # None: not added yet
        grad = bucket.grad
        if residual.dtype == torch.bfloat16:
            self._wide, self._narrow = (grad if grad.dtype == torch.float32 else grad.float()), residual
            self._sum = self._wide
        else:
            self._wide, self._narrow = residual, grad
            self._sum = grad if grad.dtype == residual.dtype else torch.empty_like(residual)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the sum."""
        return self._sum.dtype

    @property
    def values(self) -> Tensor:
        """The sum, [n]: float32, or float64 for float64 gradients."""
        self._add()
        return self._sum

    @property
    def finite(self) -> bool:
        """Whether the sum is finite. A host sync on a GPU."""
        finite = self._finite = bool(self._add())
        return finite

    @property
    def is_finite(self) -> bool | Tensor:
        """Whether the sum is finite; on a GPU a tensor [], without a host sync."""
        return self._add()

    def top_k(self, k: int) -> Sparse:
        """Select the `k` elements of largest magnitude; of equal ones the first. NaN counts as infinity."""
        with phase("select"):
            if self._added:
                return self._noted(kernels.top_k(self._sum, k, self._hint()))
            part, self._finite = kernels.accumulate_top_k(self._wide, self._narrow, k, self._sum, self._hint())
            return self._noted(part)

    def top_k_nonzero(self, k: int, skip: Span) -> Sparse:
        """Select as `top_k` does outside the span `skip`, without zeros; fewer than `k` elements if fewer are non-zero."""
        with phase("select"):
            if self._added:
                return self._noted(kernels.top_k_nonzero(self._sum, k, skip, self._hint()))
            part, self._finite = kernels.accumulate_top_k_nonzero(
                self._wide, self._narrow, k, self._sum, skip, self._hint()
            )
            return self._noted(part)

    def top_k_nonzero_of(self, part: Tensor, k: int, kind: str) -> Sparse:
        """Select the `k` largest elements of `part`, a part of the sum, without zeros. Parts of a `kind` are expected to be similar."""
        with phase("select"):
            return self._noted(kernels.top_k_nonzero(part, k, None, self._hint(kind)), kind)

    def above(self, threshold: float, span: Span) -> Sparse:
        """Select the non-zero elements in `span` of magnitude `threshold` or more, NaN as infinity. Positions are those in the sum."""
        with phase("select"):
            if self._added:
                part = kernels.select_ge(span.of(self._sum), threshold)
                return Sparse(part.index + span.start, part.value, self._sum.numel())
            part, self._finite = kernels.accumulate_select_ge(self._wide, self._narrow, threshold, self._sum, span)
            return part

    def top_k_of_rows(self, regions: Sequence[Rows], counts: Sequence[int], kind: str) -> list[Sparse]:
        """Select the largest `counts[i]` elements of region i of the sum, as `top_k` does; positions are places in its rows.

        Regions of a `kind` are expected to be like the last step's.
        """
        with phase("select"):
            kinds = [f"{kind}{number}" for number in range(len(regions))]
            bounds = [self._hint(kind) for kind in kinds]
            if self._added:
                parts = kernels.top_k_of_each(self._sum, regions, counts, bounds)
            else:
                parts, self._finite = kernels.accumulate_top_k_of_rows(
                    self._wide, self._narrow, regions, counts, self._sum, bounds
                )
            for its_kind, part in zip(kinds, parts, strict=True):
                self._noted(part, its_kind)
            return parts

    def top_k_of(self, chunk: Tensor, k: int, kind: str = "") -> Sparse:
        """Select the `k` elements of `chunk` of largest magnitude, as `top_k` does. Chunks of a `kind` are expected to be similar."""
        with phase("select"):
            return self._noted(kernels.top_k(chunk, k, self._hint(kind)), kind)

    def keep(self, kept: Sequence[Sparse] = (), written: Sequence[Sparse] = ()) -> None:
        """Write the sum, with `kept` at its positions, to the residual, and `written` to the gradient, which is zero elsewhere.

        Values of `written` may lie in the gradient's memory.
        """
        grad = self._bucket.grad
        if self._sum is grad and self._sum.dtype == self.residual.dtype:
            kernels.move_put_(self.residual, grad, kept, written, self.skip)
            return
        written = [Sparse(part.index, part.value.clone(), part.length) for part in written]
        for part in kept:
            kernels.put_(self._sum, part.index, part.value)
        self.keep_error(self._sum)
        grad.zero_()
        for part in written:
            kernels.put_(grad, part.index, part.value)

    def keep_if(self, finite: Tensor, kept: Sequence[Sparse], cleared: Tensor | None, errors: Sequence[Sparse]) -> None:
        """Update the residual as `keep` does if `finite` [], a tensor, is true; then clear and add errors. Overwrites the sum."""
        after = self._sum if self._sum.dtype == self.residual.dtype else self._sum.to(self.residual.dtype)
        for part in kept:
            kernels.put_(after, part.index, part.value)
        if cleared is not None:
            kernels.clear_(after, cleared)
        for part in errors:
            kernels.scatter_add_(after, part)
        torch.where(finite, after, self.residual, out=self.residual)

    def keep_error(self, error: Tensor) -> None:
        """Copy `error` [n], which may lie in the sum's memory, to the residual. Does not write the gradient."""
        if self.skip is None or error.dtype != self.residual.dtype:
            self.residual.copy_(error if self.skip is None else torch.where(self.skip == 0, error, self.residual))
        else:
            torch.where(self.skip == 0, error, self.residual, out=self.residual)

    @property
    def _added(self) -> bool:
        """Whether the sum is computed. A decaying residual is added here, others in the pass of the first selection."""
        if self._decay != 1.0 or self.skip is not None:
            self._add()
        return self._finite is not None

    def _hint(self, kind: str = "") -> float | None:
        return self._hints.get(f"{self._bucket.key}/{kind}")

    @property
    def _hinted(self) -> bool:
        """Whether to keep hints: a GPU does not use them, and the host would have to wait for them."""
        return self._sum.device.type == "cpu"

    def _noted(self, selected: Sparse, kind: str = "") -> Sparse:
        if self._hinted:
            self._hints[f"{self._bucket.key}/{kind}"] = _WARM * smallest_magnitude(selected.value)
        return selected

    def _add(self) -> bool | Tensor:
        if self._finite is None:
            with phase("accumulate"):
                if self._decay == 1.0 and self.skip is None:
                    self._finite = kernels.accumulate(self._wide, self._narrow, self._sum)
                else:  # out of place: the residual does not change if the step fails
                    grad = self._narrow if self._wide is self.residual else self._wide
                    torch.add(grad, self.residual, alpha=self._decay, out=self._sum)
                    self._finite = self.skip is not None or kernels.all_finite(self._sum)
        return self._finite


@dataclass
class ByParameter:
    """A vector per parameter name, which moves when the bucket layout changes."""

    by_name: dict[str, Tensor] = field(default_factory=dict)  # flat views of the buckets' vectors
    flat: dict[tuple[ParameterSpan, ...], Tensor] = field(default_factory=dict)  # the buckets' vectors, by layout
    held: dict[str, Tensor] = field(default_factory=dict)  # by parameter name, as they were at the last `Vectors.hold`

    def of(self, bucket: Bucket, dtype: torch.dtype) -> Tensor:
        """Return the vector of this bucket's parameters, [n], for writing; zero and of `dtype` for new parameters.

        Raises ValueError if a parameter's size has changed.
        """
        flat = self.flat.get(bucket.layout)
        if flat is None or flat.device != bucket.grad.device:
            flat = self._lay_out(bucket, dtype)
        return flat

    def _lay_out(self, bucket: Bucket, dtype: torch.dtype) -> Tensor:
        flat = torch.zeros(bucket.grad.numel(), dtype=dtype, device=bucket.grad.device)
        names = {entry.name for entry in bucket.layout}
        for layout in [old for old in self.flat if any(entry.name in names for entry in old)]:
            del self.flat[layout]  # shared parameters move now, the others when `of` is called for their bucket
        for entry in bucket.layout:
            known = self.by_name.get(entry.name)
            if known is not None and known.numel() != len(entry.span):
                raise ValueError(
                    f"the residual of {entry.name!r} has {known.numel()} elements, its gradient {len(entry.span)}; "
                    "load the state of the same model, or start without a state"
                )
            if known is not None:
                entry.span.of(flat).copy_(known)
            self.by_name[entry.name] = entry.span.of(flat)
        self.flat[bucket.layout] = flat
        return flat


class Vectors:
    """The vectors that one rank holds back, by kind, such as "residual" or "velocity", and by parameter name. In units of the gradient."""

    def __init__(self) -> None:
        self._kinds: dict[str, ByParameter] = {}

    def by_kind(self, kind: str) -> ByParameter:
        """Return the vectors of a kind, perhaps empty."""
        return self._kinds.setdefault(kind, ByParameter())

    @property
    def hold_anything(self) -> bool:
        """Whether there is any vector: the same on all ranks after the same steps."""
        return any(vectors.by_name for vectors in self._kinds.values())

    def rescale(self, factors: Mapping[str, float]) -> None:
        """Multiply the vectors of every named parameter, and their copies of `hold`, by its factor, in place."""
        for kept in self._kinds.values():
            for name, factor in factors.items():
                for vectors in (kept.by_name, kept.held):
                    if name in vectors and factor != 1.0:
                        vectors[name].mul_(factor)

    def hold(self) -> None:
        """Copy the vectors before a step, for `weigh`."""
        for kept in self._kinds.values():
            for name, vector in kept.by_name.items():
                if name in kept.held:
                    kept.held[name].copy_(vector)
                else:
                    kept.held[name] = vector.clone()

    def weigh(self, factors: Mapping[str, float]) -> None:
        """Scale the change since `hold` by the factor in [0, 1] of a parameter, because only that share of the step was applied.

        With factor c, a vector becomes c times its present value + (1 - c) times its value before the step; one that did not exist at
        `hold` counts as zero then.
        """
        for kept in self._kinds.values():
            for name, factor in factors.items():
                if name in kept.by_name:
                    # Not lerp_, which overflows for large numbers of opposite signs.
                    vector = kept.by_name[name].mul_(factor) if factor else kept.by_name[name].zero_()
                    if name in kept.held:
                        vector.add_(kept.held[name].to(vector.device), alpha=1 - factor)

    def lay_out_again(self) -> None:
        """Move the vectors when `ByParameter.of` is next called, to the type that it requests."""
        for kept in self._kinds.values():
            kept.flat.clear()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return flat copies of the vectors by kind and parameter name, in their precision."""
        return {
            kind: {name: vector.clone() for name, vector in vectors.by_name.items()}
            for kind, vectors in self._kinds.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load a result of `state_dict`."""
        self._kinds = {
            kind: ByParameter({name: vector.clone() for name, vector in by_name.items()})
            for kind, by_name in state.items()
        }


def redistributed(states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    """Redistribute the residuals of all ranks of one world to `size` ranks, keeping the mean of every element.

    A reduction divides by the number of ranks, so residuals with the same mean move the weights as far as before. New rank r gets
    size / len(states) times the sum of the old ranks r, r + size, r + 2 size, ...; ranks beyond the old world start with nothing. The
    result is rounded, but an exact copy for a world of the same size.
    """
    if size < 1:
        raise ValueError(f"a world has at least 1 rank, got {size}")
    dealt = [summed(states[rank::size]) for rank in range(size)]
    for mine in dealt if size != len(states) else ():
        for residual in mine.values():
            # Exact for whole numbers with a whole result.
            residual.mul_(size).div_(exact_divisor(residual, len(states)))
    return dealt


def summed(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sum the residuals of several ranks by name."""
    total: dict[str, Tensor] = {}
    for state in states:
        for name, residual in state.items():
            total[name] = total[name] + residual if name in total else residual.clone()
    return total

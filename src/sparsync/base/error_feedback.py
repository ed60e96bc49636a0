"""The driver of all schemes with error feedback: everything around a scheme's `step`.

A scheme selects elements and sends them. This module does the rest for all of them: it accumulates, handles NaN and Inf, writes the mean,
clears the residual, rolls back, and reports.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from sparsync.base.scheme import Scheme
from sparsync.base.state import State
from sparsync.collectives.values import ArrivedMean, QuantizedMean, quantized_all_reduce_
from sparsync.comm.metered import MeteredComm
from sparsync.core import (
    Arriving,
    Bucket,
    Comm,
    Detail,
    NonFiniteError,
    Report,
    Rows,
    Sparse,
    check_one_of,
    exact_divisor,
    phase,
    spans,
)
from sparsync.feedback import Accumulator, Residuals
from sparsync.kernels import operations as kernels
from sparsync.wire import ValueCodec, Values


@dataclass(frozen=True)
class Update:
    """The result of one step. `mean` is the same on every rank; the rest is local. `errors` share no memory with acc.

    acc is the sum of residual and gradient on one rank. Invariant: for every element the sum over ranks of acc is P * mean + the residuals,
    which hold acc where it was not cleared, and the errors. A step may also write the new residual into `acc.values`, or return some
    of it as `replaced`, which is cheaper because all of acc is moved anyway. The rounding error of a mean in the gradient's type joins the
    residuals; every rank takes its share of the elements.
    """

    # Written to the gradient, which is zero elsewhere; several parts must be disjoint.
    mean: Sparse | Sequence[Sparse]
    cleared: Tensor | None  # [c] positions at which the residual becomes zero, int32 or int64; None: nowhere
    selected: int  # k: how many elements this rank selected
    errors: Sequence[Sparse] = ()  # what rounding dropped; added to the residual after clearing
    details: Mapping[str, Detail] = field(default_factory=dict)
    # Changes the scheme's shared state. Called when the mean is finite, and when only the device knows whether it is.
    commit: Callable[[], None] = lambda: None
    replaced: Sequence[Sparse] = ()  # the residual at these positions in place of acc; parts must be disjoint
    lost: Sparse | None = None  # what a rollback adds to this rank's residual; None: the mean


@dataclass(frozen=True)
class DenseUpdate:
    """The result of one step whose mean is a dense vector. `mean` is the same on every rank; the rest is local.

    Invariant: for every element the sum over ranks of acc is P * mean + the sum of the errors. The rounding error of a mean in the
    gradient's type joins the residuals; every rank takes its share of the elements.
    """

    mean: Tensor | ArrivedMean  # [n] written to the gradient
    error: Tensor  # [n] becomes the residual; may share the memory of acc, which a step may change in place
    selected: int | None = None  # k: how many elements this rank selected; None: all
    union: int | None = None  # K: how many elements any rank selected; None: all
    details: Mapping[str, Detail] = field(default_factory=dict)
    commit: Callable[[], None] = lambda: None  # as in Update


class ErrorFeedbackScheme(Scheme):
    """A scheme that adds what it did not send to the next gradient. Subclass it as a dataclass and implement `step`.

    A subclass may have the fields `residuals`, the precision of the residual ("float32" or "bfloat16"), and `decay`, the share of
    the residual that joins the next gradient. If it defines `__post_init__`, that must call `super().__post_init__()`.
    """

    residuals: Residuals = "float32"
    decay: float = 1.0
    has_residual = True
    may_forget = True

    def __post_init__(self) -> None:
        check_one_of("residuals", self.residuals, Residuals)
        if not 0 <= self.decay <= 1:
            raise ValueError(
                f"decay must be in [0, 1], the share of the residual that stays each step, got {self.decay}"
            )

    @abstractmethod
    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update | DenseUpdate:
        """Exchange a selection of `acc`, and return its mean and the changes to this rank's residual.

        `state` is this rank's state: change it in `commit`, which is not called if the mean is non-finite. `bucket` gives key,
        step and layout; its `grad` belongs to `acc`. If any rank has NaN or Inf, raise NonFiniteError on all ranks, or let it show in the
        mean. `comm` counts the traffic for the report.
        """

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        """Replace `bucket.grad` by the mean of `step`. NaN or Inf on any rank shows on all ranks, and no state changes."""
        return self._reduced(state, bucket, comm, whole=False)

    def send_all(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        return self._reduced(state, bucket, comm, whole=True)

    def _reduced(self, state: State, bucket: Bucket, comm: Comm, whole: bool) -> Report:
        if not bucket.grad.numel():
            return self.report(bucket, selected=0, union=0)
        state.undo.pop(bucket.key, None)
        comm = MeteredComm(comm)
        if not whole and bucket.skip is None and (form := state.whole_form(bucket)) is not None:
            return self._reduce_in_passes(state, bucket, comm, *form)
        acc = state.accumulate(bucket)
        try:
            update = everything(acc, comm) if whole else self.step(state, acc, bucket, comm)
        except NonFiniteError:
            bucket.grad.fill_(torch.nan)
            return self.report(bucket, comm.sent, selected=0, union=0, details={"overflow": True})
        if isinstance(update, DenseUpdate):
            overflow, union = self._write_dense(update, acc, bucket, comm)
        else:
            overflow, union = self._write_sparse(state, update, acc, bucket, comm)
        if isinstance(overflow, Tensor) or not overflow:
            update.commit()
        elif kernels.all_finite(bucket.grad):
            # The mean is finite and P times the mean is not: a loss scaler must still see it.
            bucket.grad.fill_(torch.nan)
        details = {**update.details, "overflow": overflow}
        return self.report(bucket, comm.sent, selected=update.selected, union=union, details=details)

    def _reduce_in_passes(
        self, state: State, bucket: Bucket, comm: MeteredComm, values: tuple[Values, Values], residual: Tensor
    ) -> Report:
        """Send every element in three passes without a host sync: add the gradient and encode; sum; write.

        On a GPU the whole gradient becomes NaN if any element of the mean is non-finite.
        """
        grad, P, (up, down) = bucket.grad, comm.size, map(ValueCodec, values)
        error = grad if grad.dtype == residual.dtype else torch.empty_like(residual)
        mean = quantized_all_reduce_(error, comm, up, down, (residual, grad))
        lengths, bits = [len(chunk) for chunk in spans(grad.numel(), P)], mean.kernel_bits
        assert bits is not None
        # All ranks received the same mean, so all decide the same. The residuals lose P times the mean, which must be finite too.
        fits = kernels.packets_fit(mean.packets, lengths, bits, P, grad.dtype)
        skip, overflow = (fits.logical_not().view(1), False) if isinstance(fits, Tensor) else (None, not fits)
        with phase("apply"):
            if not overflow:
                kernels.write_mean_(grad, error, residual, mean.packets, bits, comm.rank, skip)
            else:
                grad.copy_(mean.decoded())
                if kernels.all_finite(grad):  # only P times the mean is non-finite: a loss scaler must still see it
                    grad.fill_(torch.nan)
        details: dict[str, Detail] = {"overflow": overflow}
        if skip is not None:
            state.undo[bucket.key], details["overflow"] = partial(_return_mean, residual, mean), Arriving(skip)
        return self.report(bucket, comm.sent, details=details)

    def _write_dense(
        self, update: DenseUpdate, acc: Accumulator, bucket: Bucket, comm: Comm
    ) -> tuple[bool, int | None]:
        """Write the mean, and the residual unless the mean overflows. Return whether it overflows, and K."""
        mean = update.mean
        if not isinstance(mean, Tensor) and mean.dtype != bucket.grad.dtype:
            mean = mean.decoded()
        # Host syncs. All ranks received the same mean, so all decide the same. P times the mean, which the residuals lose, must be finite.
        if isinstance(mean, Tensor):
            written = mean.to(bucket.grad.dtype)
            overflow = not (kernels.all_finite(written) and _fits(mean, comm.size))
        else:
            written, overflow = mean, bucket.skip is None and not mean.fits(comm.size)
        self._check_found(overflow, acc)
        with phase("apply"):
            if not overflow:
                acc.keep_error(update.error)
            if isinstance(written, Tensor):
                if not overflow and isinstance(mean, Tensor):
                    add_dropped_(acc.residual, mean, written, comm)
                bucket.grad.copy_(written)
            else:
                written.write_(bucket.grad)
        return overflow, update.union

    def _write_sparse(
        self, state: State, update: Update, acc: Accumulator, bucket: Bucket, comm: Comm
    ) -> tuple[bool | Tensor, int]:
        """Write the mean of some elements as `_write_dense` does for all."""
        grad, means = bucket.grad, [update.mean] if isinstance(update.mean, Sparse) else update.mean
        finite, parts = bucket.skip is not None or kernels.finite_each(means, comm.size), means
        if any(part.value.dtype != grad.dtype for part in means):
            parts = [Sparse(part.index, part.value.to(grad.dtype), part.length) for part in means]
            finite = finite & kernels.finite_each(parts, 1)
        if isinstance(finite, Tensor):
            self._write_on_device(state, update, finite, means, parts, acc, bucket, comm)
            return finite.logical_not(), sum(part.index.numel() for part in parts)
        overflow = not finite
        self._check_found(overflow, acc)
        with phase("apply"):
            if overflow:
                # Copied: at P = 1 a step may return a view of the gradient's memory.
                parts = [Sparse(part.index, part.value.clone(), part.length) for part in parts]
                grad.zero_()
                for part in parts:
                    kernels.put_(grad, part.index, part.value)
            else:
                acc.keep(update.replaced, parts)
                if update.cleared is not None:
                    kernels.clear_(acc.residual, update.cleared)
                for error in update.errors:
                    kernels.scatter_add_(acc.residual, error)
                for mean, part in zip(means, parts, strict=True) if parts is not means else ():
                    kernels.scatter_add_(acc.residual, _dropped(mean, part, comm))
                if update.lost is not None:
                    state.undo[bucket.key] = partial(_return_lost, state, update.lost)
        return overflow, sum(part.index.numel() for part in parts)

    def _write_on_device(
        self,
        state: State,
        update: Update,
        finite: Tensor,
        means: Sequence[Sparse],
        parts: Sequence[Sparse],
        acc: Accumulator,
        bucket: Bucket,
        comm: Comm,
    ) -> None:
        """Write as `_write_sparse` does, if only the device knows whether the mean is finite; if not, write NaN at its positions."""
        with phase("apply"):
            written = _joined(parts)
            shown = torch.where(finite, written.value, torch.nan)  # a copy: values may lie in the gradient
            errors = list(update.errors)
            if parts is not means:
                errors += [_dropped(mean, part, comm) for mean, part in zip(means, parts, strict=True)]
            acc.keep_if(finite, update.replaced, update.cleared, errors)
            kernels.put_(bucket.grad.zero_(), written.index, shown)
            if update.lost is not None:
                lost = torch.where(finite, update.lost.value, 0.0)
                state.undo[bucket.key] = partial(_return_lost, state, replace(update.lost, value=lost))

    def _check_found(self, overflow: bool, acc: Accumulator) -> None:
        """Raise RuntimeError if the mean is finite although this rank's gradient is not."""
        if not overflow and not acc.finite:
            raise RuntimeError(
                f"{type(self).__name__}.step returned a finite mean, although this rank's gradient holds NaN or Inf, which would stay in "
                "its residual; send acc.finite with the first message, see sparsync.core.raise_if_found_inf"
            )

    @property
    def leaves_out(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        """Whether a step's mean lacks elements: true if the scheme has a field `density` below 1."""
        return getattr(self, "density", 1.0) < 1.0

    @property
    def share_sent(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        """The field `density`, or 1 without one."""
        return float(getattr(self, "density", 1.0))


def _return_lost(state: State, lost: Sparse, bucket: Bucket) -> None:
    """Add to the residual what it lost in a step."""
    kernels.scatter_add_(state.residual(bucket), lost)


def _return_mean(residual: Tensor, mean: QuantizedMean, bucket: Bucket) -> None:
    """Add the decoded mean to the residual; the gradient may have changed since."""
    residual.add_(mean.decoded().to(bucket.grad.dtype))


def _fits(mean: Tensor, P: int) -> bool:
    """Return whether P times `mean` is finite everywhere."""
    # At least in float32, as the residuals are.
    return kernels.all_finite(mean.to(torch.promote_types(mean.dtype, torch.float32)) * P)


def _joined(parts: Sequence[Sparse]) -> Sparse:
    """Join disjoint `parts` into one vector; its positions need not ascend."""
    if len(parts) == 1:
        return parts[0]
    index, value = torch.cat([part.index for part in parts]), torch.cat([part.value for part in parts])
    return Sparse(index, value, parts[0].length)


def everything(acc: Accumulator, comm: Comm) -> DenseUpdate:
    """Send all of `acc`, and leave no residual."""
    mean = comm.all_reduce(acc.values) / exact_divisor(acc.values, comm.size) if comm.size > 1 else acc.values.clone()
    return DenseUpdate(mean, torch.zeros_like(mean), details={"dense": True})


def own_chunk(residual: Tensor, comm: Comm) -> Rows | None:
    """Return this rank's chunk of a residual cut into P near-equal chunks; None for one rank."""
    if comm.size == 1:
        return None
    chunk = spans(residual.numel(), comm.size)[comm.rank]
    return Rows(torch.tensor([chunk.start], dtype=torch.int32, device=residual.device), max(1, len(chunk)), len(chunk))


def add_dropped_(residual: Tensor, mean: Tensor, written: Tensor, comm: Comm) -> None:
    """Add the rounding error of P times `mean` [n] to `residual` [n], for this rank's share of the elements."""
    if written.dtype != mean.dtype:
        mine = spans(mean.numel(), comm.size)[comm.rank]
        mine.of(residual).add_(comm.size * (mine.of(mean) - mine.of(written).to(mean.dtype)))


def _dropped(mean: Sparse, written: Sparse, comm: Comm) -> Sparse:
    """Return the rounding error that `add_dropped_` adds, for the mean of some elements; empty if the type does not change."""
    mine = spans(mean.index.numel() if written.value.dtype != mean.value.dtype else 0, comm.size)[comm.rank]
    value = comm.size * (mine.of(mean.value) - mine.of(written.value).to(mean.value.dtype))
    return Sparse(mine.of(mean.index), value, mean.length)

"""Checks of steps that have run. A failure names the world, the step, the rank and both values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.testing.subject import SchemeUnderTest
from sparsync.testing.world import Step, fail, integer_sum, same_bits

_SCALE = 2.0**-16


def check_replicas(steps: Sequence[Step]) -> None:
    """Check that every rank has written the same bits, in the type and length of its gradient."""
    for step in steps:
        for rank, (written, grad) in enumerate(zip(step.written, step.grads, strict=True)):
            if written.dtype != grad.dtype or written.shape != grad.shape:
                fail(step.where(rank), f"the gradient became {described(written)}, it was {described(grad)}")
            _check_bits(step.where(rank), "element {} is", written, "rank 0 has written", step.written[0])


def check_traffic(steps: Sequence[Step]) -> None:
    """Check that every report gives the traffic that the rank's communicator counted, and possible numbers of elements."""
    for step in steps:
        n = step.grads[0].numel()
        for rank, (counted, report) in enumerate(zip(step.counted, step.reports, strict=True)):
            where = step.where(rank)
            if counted != report.cost:
                fail(
                    where,
                    f"counted {counted}, communicate through a MeteredComm around comm and pass what it sent to report(); "
                    f"the report's cost is {report.cost}",
                )
            if report.elements != n:
                fail(where, f"the report's elements are {report.elements}, the bucket has {n}")
            for name, number in (("selected", report.selected), ("union", report.union)):
                if not 0 <= number <= n:
                    fail(where, f"the report's {name} is {number}, allowed is at most {n}")


def check_conservation(steps: Sequence[Step], before: Tensor, tolerance: float = 0.0, decay: float = 1.0) -> None:
    """Check that at every step residuals after it + P x result == decay x residuals before it + gradients, summed over ranks.

    `before`: float64 [n], the sum over ranks of the residuals before the first step. The sums are exact for small integers and a
    `decay` that is a power of two.
    """
    decayed = "" if decay == 1.0 else f"{decay:g} x "
    for step in steps:
        came_in = decay * before + integer_sum(step.grads)
        before = integer_sum(step.residuals)
        total = before + step.size * step.written[0].double()
        kept, given = "residuals after the step + P x written", f"{decayed}residuals before it + gradients"
        check_equal(step.where(), kept, total, given, came_in, tolerance)


def check_rounding(
    steps: Sequence[Step], tolerance: float = 0.0, decay: float = 1.0, in_gradient_type: bool = False
) -> None:
    """Check that any finite gradients are conserved, element by element, up to rounding, and that residuals are finite.

    Let u be the unit roundoff of the residual's type, and M the sum over ranks of the magnitudes of residuals before and after, gradients
    and results. An element may be off by u M per rounding of an addend. There are at most P + 6 of them:

        2      decay x residual + gradient
        P - 1  the sum over ranks
        2      division by P, and multiplication by P
        1      the error of a rounded value
        2      adding that error, and the error of the gradient's type, to the residual

    Errors of types with fewer bits than the residual's are exact in it, so the gradient's type does not matter; with `in_gradient_type`, u
    belongs to the coarser of both types. `tolerance` times the largest M is added for schemes that mix elements. A step with an
    infinite mean does not change the residuals, or adds the gradients to them. Elements whose partial sums overflow the residual's
    type are not checked.
    """
    P = steps[0].size
    before = [torch.zeros_like(residual).double() for residual in steps[0].residuals]
    for step in steps:
        check_finite_residuals(step)
        after, grads = ([_scaled(part) for part in parts] for parts in (step.residuals, step.grads))
        kept, came_in = integer_sum(after), decay * integer_sum(before) + integer_sum(grads)
        finite = step.written[0].isfinite()
        written = P * _scaled(step.written[0].where(finite, 0.0))
        magnitude = sum((part.abs() for part in (*before, *after, *grads)), written.abs())
        kinds = [torch.finfo(step.residuals[0].dtype)] + [torch.finfo(step.grads[0].dtype)] * in_gradient_type
        # The last addends allow for the rounding of the sums here, and of quotients below the smallest normal number.
        allowed = ((P + 6) * max(kind.eps for kind in kinds) / 2 + (3 * P + 3) * 2.0**-53) * magnitude
        allowed += tolerance * magnitude.max() + P * max(kind.smallest_normal * kind.eps for kind in kinds)
        off = (kept + written - came_in).abs()
        if not finite.all():
            off = torch.minimum((kept - integer_sum(before)).abs(), (kept - came_in).abs())
        sums = torch.stack([decay * old + new for old, new in zip(before, grads, strict=True)])
        most = torch.maximum(sums.clamp(min=0).sum(0), -sums.clamp(max=0).sum(0))
        held = most <= kinds[0].max * _SCALE * (1 + kinds[0].eps)
        if (off > allowed)[held].any():
            at = int((off / allowed).where(held, 0.0).argmax())
            fail(
                step.where(),
                f"element {at}: residuals after the step + P x written, less what came in, is {off[at] / _SCALE}, "
                f"the rounding of additions allows {allowed[at] / _SCALE}",
            )
        before = after


def _scaled(x: Tensor) -> Tensor:
    """Convert `x` to float64, scaled so that sums of the largest numbers are finite."""
    return x.double() * _SCALE


def check_equal(where: str, what: str, x: Tensor, reference: str, y: Tensor, tolerance: float = 0.0) -> None:
    """Check that two tensors with these names are equal, or differ by at most `tolerance` times the largest magnitude in `y`."""
    allowed = tolerance * float(y.abs().max()) if y.numel() else 0.0
    apart = (x != y) & ~((x - y).abs() <= allowed)
    if apart.any():
        at = int(apart.nonzero()[0])
        fail(where, f"element {at}: {what} is {x[at]}, {reference} is {y[at]}")


def check_same(found: Sequence[Step], expected: Sequence[Step], what: str) -> None:
    """Check that two runs have the same bits in gradients and residuals, and the same reports."""
    for one, other in zip(found, expected, strict=True):
        for rank in range(one.size):
            for name in ("written", "residuals"):
                mine, theirs = getattr(one, name)[rank], getattr(other, name)[rank]
                _check_bits(one.where(rank), f"element {{}} of {name} is", mine, what, theirs)
            if one.reports[rank] != other.reports[rank]:
                fail(one.where(rank), f"the report is {one.reports[rank]}, {what} {other.reports[rank]}")


def check_finite(where: str, what: str, x: Tensor) -> None:
    """Check that a named tensor holds neither NaN nor Inf."""
    if not x.isfinite().all():
        at = int((~x.isfinite()).nonzero()[0])
        fail(where, f"element {at} of {what} is {x[at]}, it must be finite")


def check_finite_residuals(step: Step) -> None:
    """Check that no rank's residual holds NaN or Inf."""
    for rank, residual in enumerate(step.residuals):
        check_finite(step.where(rank), "the residual", residual)


def described(x: Tensor) -> str:
    """Describe the type and shape of a tensor."""
    return f"{x.dtype} of shape {tuple(x.shape)}"


def check_step_invariants(subject: SchemeUnderTest, steps: Sequence[Step], before: Tensor | None = None) -> None:
    """Check replicas, traffic and conservation, which hold at every step of finite integers."""
    check_replicas(steps)
    check_traffic(steps)
    conserved(subject, steps, before)


def conserved(subject: SchemeUnderTest, steps: Sequence[Step], before: Tensor | None = None) -> None:
    """Check conservation from a sum of residuals `before` (None: zero), if the scheme promises it."""
    if not subject.unaccounted:
        before = torch.zeros_like(steps[0].grads[0], dtype=torch.float64) if before is None else before
        check_conservation(steps, before, subject.tolerance, subject.decay)


def check_dense_mean(steps: Sequence[Step]) -> None:
    """Check that the exact mean of integers is written, and that nothing is left in the residuals."""
    for step in steps:
        mean = integer_sum(step.grads) / step.size
        check_equal(step.where(), "what is written", step.written[0].double(), "the dense mean", mean)
        for rank, residual in enumerate(step.residuals):
            check_equal(step.where(rank), "the residual", residual, "it must be", torch.zeros_like(residual))


def check_nothing_lost(step: Step, before: Tensor) -> None:
    """Check that a step that will not be applied does not change the sum of the residuals, or adds the gradients to it.

    A scheme of several parts adds them where it has rolled back finite parts.
    """
    after = integer_sum(step.residuals)
    rolled_back = before + integer_sum(step.grads)
    left = torch.where(after == rolled_back, before, after)
    check_equal(step.where(), "the sum of the residuals after a step with NaN or Inf", left, "before it", before)


def _check_bits(where: str, what: str, x: Tensor, reference: str, y: Tensor) -> None:
    """Check that two tensors of one type and length have the same bits; `what` is a format string for the element's number."""
    if not same_bits(x, y):
        at = int((x.view(torch.uint8) != y.view(torch.uint8)).nonzero()[0]) // x.element_size()
        fail(where, f"{what.format(at)} {x[at]}, {reference} {y[at]}")

"""Invariants between ranks: all ranks' elements are examined, means have the right size, shares add up, and traffic is balanced.

The functions return None, or why they do not apply to the scheme.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.base.state import State
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Bucket
from sparsync.testing.checks import described
from sparsync.testing.subject import SchemeUnderTest
from sparsync.testing.world import COUNT, fail, flat_residual, layout, run

PATIENCE = 4  # the allowed steps, relative to sending all elements of all ranks one after the other
OFF = 1.2  # the largest allowed factor between the written and the expected total
UNEVEN = 1.5  # the largest allowed ratio of the busiest rank's bytes to the mean
LEAST = 8  # elements per rank per step, so that counts can be even
LARGEST = 1 << 13  # elements of a bucket


def examination(subject: SchemeUnderTest) -> str | None:
    """Check that an element that only one rank has is written within 4 P n / k steps, wherever it is; k = density * n.

    The first rank, and then the last, has the same gradient at every step, whose elements differ by at most a factor of 2. All other ranks
    have zeros. If ranks take turns, and a step sends k elements of one rank, it takes P n / k steps.
    """
    if subject.decay != 1.0:
        return "the residual decays, so what stays small is never written"
    P = subject.world(3)
    n = P + 1
    most = PATIENCE * P * -(-n // max(1, int(subject.share * n)))
    for source in sorted({0, P - 1}):
        grads = [(r == source) * 16.0 * P * torch.linspace(1, 2, n) for r in range(P)]
        waits = never_written(subject.start(P), grads, subject.warmup, most)
        if waits.any():
            fail(
                f"P = {P}, n = {n}",
                f"within {most} steps, which is 4 P n / k, of the elements that rank {source} alone has, nothing was written at "
                f"{waits.nonzero().flatten().tolist()}, what is left there at the end must be no element",
            )
    return None


def never_written(states: Sequence[State], grads: Sequence[Tensor], warmup: int, most: int) -> Tensor:
    """Return where nothing was written in `most` steps of the same gradients after the warm-up, bool [n]."""

    def body(comm: LocalComm) -> Tensor:
        waits = torch.ones_like(grads[0], dtype=torch.bool)
        for step in range(warmup + most):
            bucket = Bucket("bucket0", grads[comm.rank].clone(), step, layout(waits.numel()))
            states[comm.rank].reduce(bucket, comm)
            if step >= warmup:
                waits &= bucket.grad == 0
            if not waits.any():
                break
        return waits

    return LocalWorld(len(states)).run(body)[0]


def scale(subject: SchemeUnderTest) -> str | None:
    """Check that if all ranks have the same gradient, the written elements sum to the gradient's, within a factor of 1.2.

    It checks the first step after the warm-up, when residuals are still empty; a rank sends 16 elements.
    """
    P = subject.world(3)
    source = torch.Generator().manual_seed(0)
    grad = 16.0 * torch.randn(_length(subject, P, 2 * LEAST), generator=source).abs()
    step = run(subject.start(P), [[grad] * P] * (subject.warmup + 1))[-1]
    there = step.written[0] != 0
    found, expected = float(step.written[0].sum()), float(grad[there].sum())
    if not there.any():
        return "nothing is written at the first step"
    if not expected / OFF <= found <= expected * OFF:
        what = f"where all ranks have the same gradient, {int(there.sum())} elements were written"
        fail(step.where(), f"{what}, whose sum is {found}, the gradient's is {expected}")
    return None


def shares(subject: SchemeUnderTest) -> str | None:
    """Check that the shares of `unsent` add up to the residuals, as its definition says.

    An element's share is 1/m of the residual, for a whole number m, and summed over the ranks m - 1 is at most P - 1.
    The last rank has no gradients: its residual of elements that were never written came from others, so m must not be 1 there.
    (A residual below the largest written mean may be the rounding error of a sum that was sent.)
    """
    if not subject.has_residual:
        return subject.unaccounted
    P = subject.world(4)
    source = torch.Generator().manual_seed(1)
    states, never, largest = subject.start(P), torch.ones(COUNT, dtype=torch.bool), 0.0
    for number in range(subject.warmup + 2):
        grads = [P * torch.randint(-4, 5, (COUNT,), generator=source).bfloat16() for _ in range(P)]
        if P > 1:
            grads[-1].zero_()
        step = run(states, [grads], first_step=number)[0]
        never &= step.written[0] == 0
        largest = max(largest, float(step.written[0].abs().max()))
        found = shares_of(states, number + 1)
        pairs = enumerate(zip(found, step.residuals, strict=True))
        held_for = torch.stack([_held_for(step.where(rank), *pair, P) for rank, pair in pairs])  # m, [P, n]
        too_many = (held_for - 1).sum(0) > P - 1
        if too_many.any():
            at = int(too_many.nonzero()[0])
            what = f"element {at} of unsent is this part of the residual, by rank: 1 / {held_for[:, at].tolist()}"
            fail(step.where(), f"{what}, less 1 they may add up to P - 1, {P - 1}")
        for_others = never & (step.residuals[-1].abs() > largest) & (held_for[-1] == 1)
        if P > 1 and for_others.any():
            at = int(for_others.nonzero()[0])
            held = step.residuals[-1][at]
            what = f"this rank had no gradients and holds, for others, {held} at element {at}"
            fail(step.where(P - 1), f"{what}; unsent is {found[-1][at]}, its share is, for all ranks, {held / P}")
    return None


def shares_of(states: Sequence[State], step: int) -> list[Tensor]:
    """Return `unsent` by rank for the bucket of `run`, zeros for None."""

    def body(comm: LocalComm) -> Tensor:
        bucket = Bucket("bucket0", torch.zeros(COUNT, dtype=torch.bfloat16), step, layout(COUNT))
        share = states[comm.rank].unsent(bucket, comm)
        residual = flat_residual(states[comm.rank], bucket.layout, bucket.grad)
        return torch.zeros_like(residual) if share is None else share.clone()

    return LocalWorld(len(states)).run(body)


def _held_for(where: str, share: Tensor, residual: Tensor, P: int) -> Tensor:
    """Compute m, with `share` = residual / m, by element. Raises InvariantError if there is no such m."""
    if share.shape != residual.shape:
        fail(where, f"unsent is {described(share)}, the residual is {described(residual)}")
    m = torch.where((residual == 0) & (share == 0), 1.0, residual / share).round()
    is_part = torch.isclose(m * share, residual, rtol=4 * torch.finfo(residual.dtype).eps, atol=0)
    wrong = ~((m >= 1) & (m <= P) & is_part)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        fail(where, f"element {at} of unsent is {share[at]}, for m of {P} ranks it must be an m-th of {residual[at]}")
    return m.long()


def _length(subject: SchemeUnderTest, P: int, count: int) -> int:
    """Compute a number of elements, at least 256, of which a rank sends `count` per step."""
    return max(256, math.ceil(count * P / subject.share))


def balance(subject: SchemeUnderTest) -> str | None:
    """Check that no rank sends more than 1.5 times the mean of all ranks if 1/P of the bucket has gradients 100 times as large.

    It counts the bytes of P steps, so that all ranks have had their turn, after 3 steps in which a scheme may adapt.
    """
    P = subject.world(4)
    n = _length(subject, P, LEAST)
    if P == 1 or n > LARGEST:
        return f"of {LARGEST} elements, ranks send fewer than {LEAST} each" if P > 1 else "there is one rank"
    source = torch.Generator().manual_seed(0)
    size = torch.ones(n)
    size[: n // P] = 100.0
    grads = [[size * torch.randn(n, generator=source) for _ in range(P)] for _ in range(subject.warmup + 3 + P)]
    steps = run(subject.start(P), grads)[-P:]
    sent = [sum(step.counted[rank].nbytes for step in steps) for rank in range(P)]
    if max(sent) * P > UNEVEN * sum(sent):
        what = f"in {P} steps rank {sent.index(max(sent))} sends the most, of bytes by rank {sent}"
        fail(steps[-1].where(), f"{what}, the most may be {UNEVEN * sum(sent) / P}")
    return None

"""The invariants, by name: functions that raise InvariantError if the scheme under test breaks them.

They return None, or why they do not apply to the scheme: conservation needs a residual, identity a complete form.
"""

import io
import math
from collections.abc import Callable
from typing import Any

import torch

from sparsync.base.scheme import Scheme
from sparsync.core import Bucket, Cost, add_note, laid_out
from sparsync.feedback import redistributed
from sparsync.testing.checks import (
    check_dense_mean,
    check_equal,
    check_finite,
    check_finite_residuals,
    check_nothing_lost,
    check_replicas,
    check_rounding,
    check_same,
    check_step_invariants,
    check_traffic,
    conserved,
)
from sparsync.testing.fairness import balance, examination, scale, shares
from sparsync.testing.layouts import SIZES, check_layouts
from sparsync.testing.momentum import undeclared
from sparsync.testing.subject import SchemeUnderTest
from sparsync.testing.world import COUNT, InvariantError, extremes, fail, integer_sum, integers, reals, run, started

WHOLE = laid_out([("whole", COUNT)])
HOLDS = "holds"
SMALL = 8  # the most ranks whose sums of small integers are exact in 16 bits


def check(invariant: str, scheme: SchemeUnderTest | Callable[[], Scheme], **promises: Any) -> str | None:
    """Check one invariant, by its name in INVARIANTS. Return None if it holds, or why it was not checked.

    `scheme` creates a new scheme at every call; `promises` are the fields of SchemeUnderTest, for instance
    `complete=lambda: MyScheme(density=1.0)` or `worlds=(2, 4, 8)`.
    Raises AssertionError that names the invariant, the numbers of ranks P and of elements n, the step, the rank and the two values.
    Exceptions of the scheme get a note that names the invariant.
    """
    subject = scheme if isinstance(scheme, SchemeUnderTest) else SchemeUnderTest(scheme, **promises)
    if invariant not in INVARIANTS:
        raise ValueError(f"unknown invariant {invariant!r}; there are {', '.join(INVARIANTS)}")
    if invariant in subject.without:
        return f"left out: {subject.without[invariant]}"
    if subject.unaccounted and INVARIANTS[invariant] in (conservation, rounding, rollback, clipping):
        return subject.unaccounted
    try:
        return INVARIANTS[invariant](subject)
    except InvariantError as error:
        error.args = (f"{invariant}: {error}",)
        raise
    except Exception as error:
        add_note(error, f"(while checking the invariant {invariant!r})")
        raise


def check_scheme(
    make: Callable[[], Scheme],
    *,
    worlds: tuple[int, ...] = (1, 2, 4),
    complete: Callable[[], Scheme] | None = None,
    **promises: Any,  # Any: the other fields of SchemeUnderTest
) -> dict[str, str]:
    """Check all invariants of the scheme that `make` creates, in worlds of these numbers of ranks. Raises as `check` does.

    Returns by invariant that it holds, or why it was not checked, such as the reason in `without`.
    """
    subject = SchemeUnderTest(make, complete, worlds, **promises)
    return {invariant: check(invariant, subject) or HOLDS for invariant in INVARIANTS}


def momentum(subject: SchemeUnderTest) -> None:
    """Check that a scheme that keeps a momentum says so by `has_momentum`: an optimizer with momentum would apply it a second time."""
    if missing := undeclared(subject.make):
        fail(f"P = 1, n = {COUNT}", missing)


def conservation(subject: SchemeUnderTest) -> None:
    """Check that gradients that are not written stay in the residuals, element by element, except the share that decays."""
    for P in subject.worlds:
        conserved(subject, subject.trace(P)[: subject.exact_steps])


def rounding(subject: SchemeUnderTest) -> None:
    """Check that gradients of any type and size lose no more than the rounding of additions in the residual's type."""
    P = subject.world(5)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        steps = run(subject.start(P), extremes(P, COUNT, dtype))
        check_replicas(steps)
        check_rounding(steps, subject.tolerance, subject.decay, subject.sums_in_gradient_type)


def replicas(subject: SchemeUnderTest) -> None:
    """Check that all ranks end with the same bits."""
    for P in subject.worlds:
        check_replicas(subject.trace(P))


def identity(subject: SchemeUnderTest) -> str | None:
    """Check that the complete form of the scheme is the dense mean, with an empty residual."""
    if subject.complete is None:
        return "no setting leaves nothing out: complete=None"
    for P in (P for P in subject.worlds if P <= SMALL):
        check_dense_mean(run(started(subject.complete(), P), integers(P, COUNT, subject.warmup + 1)))
    return None


def one_rank(subject: SchemeUnderTest) -> str | None:
    """Check that one rank sends nothing, keeps its gradient if there is no residual or momentum, and conserves with a residual."""
    if 1 not in subject.worlds:
        return "no world has one rank"
    steps = subject.trace(1)
    for step in steps:
        for name, cost in (("counted", step.counted[0]), ("the report's cost is", step.reports[0].cost)):
            if cost != Cost():
                fail(step.where(0), f"{name} {cost}, it must be {Cost()}")
        if not subject.has_residual and not subject.make().has_momentum:
            check_equal(step.where(0), "what is written", step.written[0], "the gradient", step.grads[0])
    conserved(subject, steps[: subject.exact_steps])
    return None


def determinism(subject: SchemeUnderTest) -> None:
    """Check that the same gradients give the same bits again, and that nothing draws from torch's global generator."""
    P = subject.world(4)
    first, before = subject.trace(P), torch.get_rng_state()
    again = run(subject.start(P), [step.grads for step in first])
    check_same(again, first, "the first time it was")
    if not torch.equal(torch.get_rng_state(), before):
        fail(again[0].where(), "torch's global generator has moved, it must stay where it is")


def traffic(subject: SchemeUnderTest) -> None:
    """Check that reports give the counted traffic."""
    for P in subject.worlds:
        check_traffic(subject.trace(P))


def resume(subject: SchemeUnderTest) -> None:
    """Check that a saved state continues without a difference, and does not change when its source continues."""
    P = subject.world(3)
    grads = reals(P, COUNT, subject.warmup + 3)
    whole = run(subject.start(P), grads)
    for cut in sorted({1, subject.warmup + 1}):  # during the warm-up, if any, and after it
        old, new = subject.start(P), subject.start(P)
        run(old, grads[:cut])
        saved = [state.state_dict() for state in old]
        files = [file_of(state) for state in saved]
        run(old, grads[cut:], first_step=cut)
        if files != [file_of(state) for state in saved]:
            fail(whole[cut].where(), "a saved state has changed, state_dict must return a copy")
        for state, file in zip(new, files, strict=True):
            state.load_state_dict(read(file))
        continued = run(new, grads[cut:], first_step=cut)
        check_same(continued, whole[cut:], "without interruption it is")


def another_world(subject: SchemeUnderTest) -> str | None:
    """Check that residuals redistributed to a world of another size keep their mean, and that replicas agree there."""
    if not subject.has_residual:
        return subject.unaccounted
    old, sizes = subject.world(4), [P for P in subject.worlds if P <= SMALL]
    unit = old * math.lcm(old, *sizes)  # so that dividing by any world's size is exact
    states = subject.start(old)
    last = run(states, integers(old, COUNT, subject.exact_steps, unit, subject.exact))[-1]
    saved = [read(file_of(state.state_dict())) for state in states]
    for P in sizes:
        new = subject.start(P)
        for state, residual in zip(new, redistributed([kept["residual"] for kept in saved], P), strict=True):
            state.load_state_dict({**saved[0], "residual": residual})
        steps = run(new, integers(P, COUNT, 2, unit, subject.exact), first_step=subject.exact_steps)
        conserved(subject, steps, integer_sum(last.residuals) * P / old)
        check_replicas(steps)
    return None


def layouts(subject: SchemeUnderTest) -> None:
    """Check that a bucket can be one parameter, and that parameters that move to other buckets and back lose nothing."""
    P = subject.world(2)
    states = subject.start(P)
    steps = run(states, integers(P, COUNT, 1, dtype=subject.exact), parameters=WHOLE, key="whole")
    check_step_invariants(subject, steps)
    if not subject.has_residual:
        return
    by_name = states[0].state_dict().get("residual", {})
    if list(by_name) != ["whole"]:
        fail(steps[0].where(0), f"the residual has the names {list(by_name)}, the layout has ['whole']")
    whole = [list(SIZES)]
    split = [["e", "a"], ["c"], ["d", "b"]]
    single = [[name] for name in SIZES]
    check_layouts(subject, [whole, split, whole, split, single, whole])


def rollback(subject: SchemeUnderTest) -> None:
    """Check that a rollback adds the result to the residuals again, so that they account for all gradients."""
    P = subject.world(3)
    states = subject.start(P)
    *_, previous, step = run(states, integers(P, COUNT, subject.exact_steps, dtype=subject.exact), parameters=WHOLE)
    for state, written in zip(states, step.written, strict=True):
        state.rollback(Bucket("bucket0", written, step.number, WHOLE))
    found = integer_sum([state.state_dict()["residual"]["whole"] for state in states])
    came_in = subject.decay * integer_sum(previous.residuals) + integer_sum(step.grads)
    given = "residuals before the step, decayed, + gradients"
    check_equal(step.where(), "residuals after the rollback", found, given, came_in, subject.tolerance)


def clipping(subject: SchemeUnderTest) -> None:
    """Check that for a step that counts half, residuals account for half of the gradients and half of the result."""
    P = subject.world(3)
    *earlier, last = integers(P, COUNT, subject.exact_steps, 2 * P, subject.exact)
    states = subject.start(P)
    before = integer_sum(run(states, earlier, parameters=WHOLE)[-1].residuals)
    for state in states:
        state.vectors.hold()
    (step,) = run(states, [last], first_step=len(earlier), parameters=WHOLE)
    for state in states:
        state.weigh({"whole": 0.5})
    residuals = integer_sum([state.state_dict()["residual"]["whole"] for state in states])
    came_in = before / 2 + (subject.decay * before + integer_sum(last)) / 2
    kept, given = "residuals after the step + half of P x written", "residuals before the step + half of the gradients"
    check_equal(step.where(), kept, residuals + P * step.written[0].double() / 2, given, came_in, subject.tolerance)


def reset(subject: SchemeUnderTest) -> None:
    """Check that after `reset_shared_state` on all ranks replicas agree, and the residuals are kept."""
    P = subject.world(3)
    grads = integers(P, COUNT, subject.exact_steps, dtype=subject.exact)
    states = subject.start(P)
    last = run(states, grads)[-1]
    for state in states:
        state.reset_shared_state()
    steps = run(states, grads, first_step=len(grads))
    check_step_invariants(subject, steps, integer_sum(last.residuals))


def sizes(subject: SchemeUnderTest) -> None:
    """Check buckets of any number of elements: one, fewer than ranks, fewer than 1/density, many, and none, which sends no message."""
    P = subject.world(5)
    for n in (0, 1, max(P - 1, 2), 1000):
        steps = run(subject.start(P), integers(P, n, subject.exact_steps, dtype=subject.exact))
        check_step_invariants(subject, steps)
        for step in steps if n == 0 and not subject.warmup else []:
            for rank, cost in enumerate(step.counted):
                if cost.messages or cost.nbytes:
                    fail(step.where(rank), f"counted {cost}, an empty bucket sends nothing")


def values(subject: SchemeUnderTest) -> None:
    """Check that zeros, equal values, ties and the largest finite numbers are reduced, and that zeros remain zero."""
    P = subject.world(3)
    zero, equal = torch.zeros(COUNT), torch.full((COUNT,), 3.0 * P)
    ties = equal * torch.tensor([1.0, -1.0, 0.0, -0.0, 1.0]).repeat(COUNT)[:COUNT]
    grads = [[zero] * P, [equal] * P, [ties] * P, [equal] * (P - 1) + [zero]] * (1 + subject.warmup // 2)
    steps = run(subject.start(P), [[grad.to(subject.exact) for grad in ranks] for ranks in grads])
    check_step_invariants(subject, steps)
    check_equal(steps[0].where(), "what is written", steps[0].written[0], "the gradient", zero)
    for residual in steps[0].residuals:
        check_equal(steps[0].where(), "the residual", residual, "the gradient", zero)
    largest = torch.full((COUNT,), torch.finfo(torch.float32).max)
    for ranks in ([largest] + [zero] * (P - 1), [largest] * P):  # the sum overflows only in the second case
        steps = run(subject.start(P), [ranks, *integers(P, COUNT, subject.warmup + 1)])
        check_replicas(steps)
        check_traffic(steps)
        for step in steps:
            check_finite_residuals(step)


def types(subject: SchemeUnderTest) -> None:
    """Check that 64-bit and 16-bit gradients are reduced, and keep their type."""
    P = subject.world(2)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        steps = run(subject.start(P), integers(P, COUNT, subject.exact_steps, dtype=dtype))
        check_step_invariants(subject, steps)
        if subject.complete is not None:
            check_dense_mean(run(started(subject.complete(), P), integers(P, COUNT, 1, dtype=dtype)))


def nonfinite(subject: SchemeUnderTest) -> None:
    """Check that NaN and Inf on one rank show on every rank, change no residual, and are gone at the next step."""
    P = subject.world(3)
    cases: list[dict[int, float]] = [{P - 1: math.nan}, {P - 1: math.inf}, {P - 1: math.inf, 0: -math.inf}]
    failing = {1, subject.warmup + 1}
    for numbers in cases:
        grads = integers(P, COUNT, subject.warmup + 4, dtype=subject.exact)
        for rank, number in numbers.items():
            for step in failing:
                grads[step][rank][[3, 50, 96]] = number
        steps = run(subject.start(P), grads)
        check_replicas(steps)
        check_traffic(steps)
        before = torch.zeros(COUNT, dtype=torch.float64)
        for step in steps:
            check_finite_residuals(step)
            if step.number not in failing:
                if step.number > max(failing):
                    check_finite(step.where(), "what is written", step.written[0])
            elif not subject.skips_ranks:
                if step.written[0].isfinite().all():
                    given = f"{[*numbers.values()]} of ranks {[*numbers]}"
                    fail(step.where(), f"{given} gave a finite result, every rank must see NaN or Inf")
                check_nothing_lost(step, before)
            before = integer_sum(step.residuals)


INVARIANTS: dict[str, Callable[[SchemeUnderTest], str | None]] = {
    invariant.__name__: invariant
    for invariant in (
        momentum,
        conservation,
        rounding,
        replicas,
        identity,
        one_rank,
        determinism,
        traffic,
        resume,
        another_world,
        layouts,
        rollback,
        clipping,
        reset,
        sizes,
        values,
        types,
        nonfinite,
        examination,
        scale,
        shares,
        balance,
    )
}


def file_of(state: dict[str, Any]) -> bytes:  # Any: as Scheme.state_dict
    """Save a state as `torch.save` does, in memory."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def read(file: bytes) -> dict[str, Any]:
    """Load a state, which must contain only tensors and plain types."""
    return torch.load(io.BytesIO(file), weights_only=True)

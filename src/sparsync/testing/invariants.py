"""The invariants, by name: functions of the scheme under test that raise InvariantError where the scheme breaks them.

They return None, or why they say nothing about the scheme: conservation is for schemes with a residual, identity for those with a
complete form.
"""

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsync.base.scheme import Scheme
from sparsync.base.state import State
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Bucket, Cost, add_note, laid_out
from sparsync.feedback import redistributed
from sparsync.testing.checks import (
    check_conservation,
    check_equal,
    check_finite,
    check_finite_residuals,
    check_replicas,
    check_rounding,
    check_same,
    check_traffic,
)
from sparsync.testing.fairness import balance, examination, scale, shares
from sparsync.testing.momentum import undeclared
from sparsync.testing.subject import SchemeUnderTest
from sparsync.testing.world import (
    COUNT,
    InvariantError,
    Step,
    extremes,
    fail,
    integer_sum,
    integers,
    reals,
    residual_of,
    run,
    started,
)

SIZES = {"a": 5, "b": 1, "c": 12, "d": 0, "e": 7}  # parameters that lie in one bucket or another
WHOLE = laid_out([("whole", COUNT)])
HOLDS = "holds"
SMALL = 8  # elements; and the most ranks whose sums of small integers a 16-bit message holds


def check(invariant: str, scheme: SchemeUnderTest | Callable[[], Scheme], **promises: Any) -> str | None:
    """Check one invariant, by its name in INVARIANTS. Return None where it holds, or why it was not checked.

    `scheme` makes a new scheme at each call; `promises` are the fields of SchemeUnderTest, for instance
    `complete=lambda: MyScheme(density=1.0)` or `worlds=(2, 4, 8)`.
    Raises AssertionError that says which invariant, the number of ranks P and of elements n, the step, the rank and the two values;
    and what the scheme itself raises, with a note that names the invariant.
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
    """Check all invariants of the scheme that `make` makes, in worlds of these numbers of ranks. Raises as `check` does.

    Returns what was found of each: that it holds, or why it was not checked, those that were left out by `without` with their reason.
    """
    subject = SchemeUnderTest(make, complete, worlds, **promises)
    return {invariant: check(invariant, subject) or HOLDS for invariant in INVARIANTS}


def momentum(subject: SchemeUnderTest) -> None:
    """Check that a scheme that keeps a momentum says so by `has_momentum`: an optimizer with momentum would apply it a second time."""
    if missing := undeclared(subject.make):
        fail(f"P = 1, n = {COUNT}", missing)


def conservation(subject: SchemeUnderTest) -> None:
    """Check that what is not written stays in the residuals, element by element, but for the share that decays."""
    for P in subject.worlds:
        conserved(subject, subject.trace(P)[: subject.exact_steps])


def rounding(subject: SchemeUnderTest) -> None:
    """Check that of gradients of any type, the largest numbers too, no more is lost than additions in the residual's type round."""
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
    """Check that with nothing left out the scheme is the dense mean, and has an empty residual."""
    if subject.complete is None:
        return "no setting leaves nothing out: complete=None"
    for P in (P for P in subject.worlds if P <= SMALL):
        check_dense_mean(run(started(subject.complete(), P), integers(P, COUNT, subject.warmup + 1)))
    return None


def one_rank(subject: SchemeUnderTest) -> str | None:
    """Check that one rank sends nothing: without residual and momentum its gradient does not change, with a residual nothing is lost."""
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
    """Check that the same gradients give the same bits again, and that torch's global generator is not drawn from."""
    P = subject.world(4)
    first, before = subject.trace(P), torch.get_rng_state()
    again = run(subject.start(P), [step.grads for step in first])
    check_same(again, first, "the first time it was")
    if not torch.equal(torch.get_rng_state(), before):
        fail(again[0].where(), "torch's global generator has moved, it must stay where it is")


def traffic(subject: SchemeUnderTest) -> None:
    """Check that reports give what is counted."""
    for P in subject.worlds:
        check_traffic(subject.trace(P))


def resume(subject: SchemeUnderTest) -> None:
    """Check that a saved state continues as if nothing had happened, and does not change with the scheme it came from."""
    P = subject.world(3)
    grads = reals(P, COUNT, subject.warmup + 3)
    whole = run(subject.start(P), grads)
    for cut in sorted({1, subject.warmup + 1}):  # in the middle of the warm-up, where there is one, and after it
        old, new = subject.start(P), subject.start(P)
        run(old, grads[:cut])
        saved = [state.state_dict() for state in old]
        read = [through_a_file(state) for state in saved]
        run(old, grads[cut:], first_step=cut)
        if flattened(saved) != flattened(read):
            fail(whole[cut].where(), "a saved state has changed, state_dict must return a copy")
        for state, each in zip(new, read, strict=True):
            state.load_state_dict(each)
        continued = run(new, grads[cut:], first_step=cut)
        check_same(continued, whole[cut:], "without interruption it is")


def another_world(subject: SchemeUnderTest) -> str | None:
    """Check that residuals which are redistributed to a world of another size keep their mean, and that replicas agree there."""
    if not subject.has_residual:
        return subject.unaccounted
    old, sizes = subject.world(4), [P for P in subject.worlds if P <= SMALL]
    unit = old * math.lcm(old, *sizes)  # so that dividing by each world's size is exact
    states = subject.start(old)
    last = run(states, integers(old, COUNT, subject.exact_steps, unit, subject.exact))[-1]
    saved = [through_a_file(state.state_dict()) for state in states]
    for P in sizes:
        new = subject.start(P)
        for state, residual in zip(new, redistributed([each["residual"] for each in saved], P), strict=True):
            state.load_state_dict({**saved[0], "residual": residual})
        steps = run(new, integers(P, COUNT, 2, unit, subject.exact), first_step=subject.exact_steps)
        conserved(subject, steps, integer_sum(last.residuals) * P / old)
        check_replicas(steps)
    return None


def layouts(subject: SchemeUnderTest) -> None:
    """Check that a bucket can be one parameter, and that parameters which move to other buckets, and back, lose no mass."""
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
    """Check that a rollback adds what was written to the residuals again, so that all that came in is there."""
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
    """Check that of a step which counts half, half of what came in and half of what was written is in the account of the residuals."""
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
    """Check that after `reset_shared_state` on all ranks replicas agree, and the residuals are still there."""
    P = subject.world(3)
    grads = integers(P, COUNT, subject.exact_steps, dtype=subject.exact)
    states = subject.start(P)
    last = run(states, grads)[-1]
    for state in states:
        state.reset_shared_state()
    steps = run(states, grads, first_step=len(grads))
    check_step_invariants(subject, steps, integer_sum(last.residuals))


def delivery(subject: SchemeUnderTest) -> str | None:
    """Check that the residual is sent once gradients are zero: at least one element at each step."""
    if not subject.has_residual or not subject.delivers:
        return "the scheme does not promise it: delivers=False" if subject.has_residual else subject.unaccounted
    if subject.decay != 1.0:
        return "the residual decays"
    P = subject.world(4)
    states = subject.start(P)
    steps = run(states, integers(P, SMALL, subject.warmup + 1))
    steps += silence(states, SMALL, first_step=len(steps), at_most=P * SMALL)
    written = integer_sum([step.written[0] for step in steps])
    came_in = torch.stack([integer_sum(step.grads) for step in steps]).sum(dim=0)
    check_equal(steps[-1].where(), "P x all that was written", P * written, "all that came in", came_in)
    return None


def sizes(subject: SchemeUnderTest) -> None:
    """Check that any number of elements is reduced: one, fewer than ranks, fewer than 1/density, many; none without a message."""
    P = subject.world(5)
    for n in (0, 1, max(P - 1, 2), 1000):
        steps = run(subject.start(P), integers(P, n, subject.exact_steps, dtype=subject.exact))
        check_step_invariants(subject, steps)
        for step in steps if n == 0 and not subject.warmup else []:
            for rank, cost in enumerate(step.counted):
                if cost.messages or cost.nbytes:
                    fail(step.where(rank), f"counted {cost}, an empty bucket sends nothing")


def values(subject: SchemeUnderTest) -> None:
    """Check that zeros, equal values, ties and the largest finite numbers are reduced, and that zeros stay zero."""
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
    for ranks in ([largest] + [zero] * (P - 1), [largest] * P):  # one overflows nothing, all of them overflow the sum
        steps = run(subject.start(P), [ranks, *integers(P, COUNT, subject.warmup + 1)])
        check_replicas(steps)
        check_traffic(steps)
        for step in steps:
            check_finite_residuals(step)


def types(subject: SchemeUnderTest) -> None:
    """Check that gradients of 64 and of 16 bits are reduced, and keep their type."""
    P = subject.world(2)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        steps = run(subject.start(P), integers(P, COUNT, subject.exact_steps, dtype=dtype))
        check_step_invariants(subject, steps)
        if subject.complete is not None:
            check_dense_mean(run(started(subject.complete(), P), integers(P, COUNT, 1, dtype=dtype)))


def nonfinite(subject: SchemeUnderTest) -> None:
    """Check that NaN and Inf of one rank show on every rank, change no residual, and are gone at the next step."""
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
    each.__name__: each
    for each in (
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
        delivery,
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


def check_step_invariants(subject: SchemeUnderTest, steps: Sequence[Step], before: Tensor | None = None) -> None:
    """Check what holds at every step of finite integers: replicas, traffic and conservation."""
    check_replicas(steps)
    check_traffic(steps)
    conserved(subject, steps, before)


def conserved(subject: SchemeUnderTest, steps: Sequence[Step], before: Tensor | None = None) -> None:
    """Check conservation from a sum of residuals `before` (None: zero), where the scheme promises it."""
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
    """Check that a step which will not be applied leaves the sum of the residuals as it was, or adds the gradients to it.

    The latter is so where a scheme of several parts has rolled back those that were finite.
    """
    after = integer_sum(step.residuals)
    rolled_back = before + integer_sum(step.grads)
    left = torch.where(after == rolled_back, before, after)
    check_equal(step.where(), "the sum of the residuals after a step with NaN or Inf", left, "before it", before)


def check_layouts(subject: SchemeUnderTest, plan: Sequence[Sequence[Sequence[str]]]) -> None:
    """Check that no parameter loses mass at any step, where `plan[step]` are the names in each bucket, and that replicas agree."""
    P = subject.world(2)
    source = torch.Generator().manual_seed(1)
    states = subject.start(P)
    for step, buckets in enumerate(plan):
        before = residual_sums(states)
        grads: list[dict[str, Tensor]] = [{} for _ in range(P)]
        for grad in grads:
            for name, size in SIZES.items():
                grad[name] = P * torch.randint(-4, 5, (size,), generator=source).to(subject.exact)
        written = reduce_by_name(states, grads, buckets, step)
        after = residual_sums(states)
        for name in SIZES:
            where = f"P = {P}, parameter {name!r} in buckets {[list(names) for names in buckets]}, step {step}"
            came_in = subject.decay * before[name] + integer_sum([grad[name] for grad in grads])
            found = after[name] + P * written[0][name].double()
            kept, given = "residuals after the step + P x written", "residuals before it, decayed, + gradients"
            if subject.conserves:
                check_equal(where, kept, found, given, came_in, subject.tolerance)
            for rank, mine in enumerate(written):
                place = f"{where}, rank {rank}"
                check_equal(place, "what is written", mine[name], "rank 0 has written", written[0][name])


def reduce_by_name(
    states: Sequence[State], grads: Sequence[dict[str, Tensor]], buckets: Sequence[Sequence[str]], step: int
) -> list[dict[str, Tensor]]:
    """Return what was written for each parameter of SIZES on each rank, when the parameters lie in these buckets."""

    def body(comm: LocalComm) -> dict[str, Tensor]:
        written: dict[str, Tensor] = {}
        for number, names in enumerate(buckets):
            parameters = laid_out((name, SIZES[name]) for name in names)
            flat = torch.cat([grads[comm.rank][name] for name in names])
            bucket = Bucket(f"bucket{number}", flat, step, parameters)
            states[comm.rank].reduce(bucket, comm)
            written |= {each.name: each.span.of(bucket.grad) for each in parameters}
        return written

    return LocalWorld(len(states)).run(body)


def residual_sums(states: Sequence[State]) -> dict[str, Tensor]:
    """Return the sum over ranks of the residual of each parameter of SIZES, float64."""
    by_rank = [state.state_dict()["residual"] for state in states]
    return {name: integer_sum([residual_of(each, name, n) for each in by_rank]) for name, n in SIZES.items()}


def silence(states: Sequence[State], n: int, first_step: int, at_most: int) -> list[Step]:
    """Return the steps of zero gradients after which no residual is left. Raises AssertionError after `at_most`."""
    steps: list[Step] = []
    while not steps or any(residual.any() for residual in steps[-1].residuals):
        if len(steps) >= at_most:
            left = integer_sum([residual.abs() for residual in steps[-1].residuals])
            place = f"after {at_most} steps without gradients"
            fail(steps[-1].where(), f"{place} the residuals are {left.tolist()}, they must be 0")
        nothing = [torch.zeros(n) for _ in states]
        steps += run(states, [nothing] * min(4, at_most - len(steps)), first_step=first_step + len(steps))
    return steps


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:  # Any: as Scheme.state_dict
    """Return the state as `torch.load` reads what `torch.save` wrote, with nothing but tensors and plain types."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def flattened(state: object) -> object:
    """Return the state with each tensor as a list, so that == compares it."""
    if isinstance(state, Tensor):
        return state.tolist()
    if isinstance(state, list):
        return [flattened(part) for part in state]
    return {key: flattened(part) for key, part in state.items()} if isinstance(state, dict) else state

"""Closed-form plans of schemes and the steps around them, for any number of elements and ranks.

`schemes` has the closed forms of schemes. This file adds the extra exchanges of integrations.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sparsync import Scheme
from sparsync.core import ParameterSpan
from sparsync_lab.predict.exchanges import (
    Exchange,
    Given,
    Plan,
    all_reduce_exchange,
    announcement_exchange,
    counts_exchange,
)
from sparsync_lab.predict.schemes import plan_of

_AGREEMENT_NBYTES = 24  # LocalSteps sends three float64 numbers before the buckets of an exchange
_RATIO_NBYTES = 2  # AdamWSteps sends one bfloat16 number per block


def plan(scheme: Scheme, n: int, P: int, *, itemsize: int = 4, layout: Sequence[ParameterSpan] = ()) -> Plan:
    """Plan a settled step of `scheme` for a DDP bucket of `n` elements of `itemsize` bytes on `P` ranks.

    `layout`: the bucket's parameters, for schemes that treat layers or names; without one the bucket counts as one parameter.
    Use `plan_of(scheme, Given(..., figures=...))` for figures of a measured step. Raises ValueError if the scheme has no closed form.
    """
    made = plan_of(scheme, Given(n, P, itemsize, tuple(layout)))
    return replace(made, beside=(*made.beside, announcement_exchange(P))) if P > 1 else made


def local_steps(scheme: Scheme, buckets: Iterable[int], P: int, every: int, fragments: int = 1) -> Plan:
    """Plan the mean step of `sparsync.LocalSteps` with buckets of these sizes, in float32 elements.

    Each fragment's exchange begins with an agreement. Shared buffers and a measured clip factor are not included.
    """
    return averaged(sum([plan(scheme, n, P) for n in buckets] + [agreement(P)] * fragments, Plan()), every)


def agreement(P: int) -> Plan:
    """Plan what `sparsync.LocalSteps` exchanges before the buckets of a fragment."""
    return Plan((counts_exchange(P, _AGREEMENT_NBYTES),), beside=(announcement_exchange(P),)) if P > 1 else Plan()


def adamw_steps(scheme: Scheme, buckets: Iterable[int], P: int, block: int = 64, measure_every: int = 8) -> Plan:
    """Plan the mean step of `sparsync.AdamWSteps` with buckets of these sizes, in float32 elements.

    The state is the scheme's plus common weights, momentum, second moments and two numbers per block. The first 8 steps, which all
    measure the ratio, are not included.
    """
    sizes = list(buckets)
    blocks = [-(-n // block) for n in sizes]
    state = 4 * sum(2 * n + each * block + 2 * each for n, each in zip(sizes, blocks, strict=True))
    # Second moments and steps are read and written, the gradient is read; likewise momentum and weights.
    own = Plan(passes=4 * 10 * sum(sizes), state_nbytes=state)
    return sum([plan(scheme, n, P) for n in sizes], own) + averaged(ratio(sizes, P, block), measure_every)


def ratio(buckets: Iterable[int], P: int, block: int = 64) -> Plan:
    """Plan one ratio measurement of `sparsync.AdamWSteps` for buckets of these sizes: one number per block, from all ranks."""
    if P == 1:
        return Plan()
    blocks = sum(-(-n // block) for n in buckets)
    return Plan((all_reduce_exchange(blocks, _RATIO_NBYTES, P),), beside=(announcement_exchange(P),))


def averaged(made: Plan, steps: int) -> Plan:
    """Average a plan that runs every `steps` steps; the state kept between steps stays.

    For counts, not for times: an exchange of an eighth of the bytes does not take an eighth of the time. Time the whole plan and divide.
    """

    def mean(exchange: Exchange) -> Exchange:
        parts = {name: getattr(exchange, name) / steps for name in ("nbytes", "messages", "rounds", "received")}
        return replace(exchange, **parts)

    return Plan(
        tuple(map(mean, made.exchanges)),
        made.passes / steps,
        {kind: elements / steps for kind, elements in made.kernels.items()},
        {kind: calls / steps for kind, calls in made.calls.items()},
        tuple(map(mean, made.beside)),
        made.state_nbytes,
    )

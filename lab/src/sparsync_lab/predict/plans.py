"""Plans of schemes and of the steps around them: closed forms, at any number of elements and of ranks.

`schemes` has the forms of schemes. This file adds what an integration sends beside them.
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

_AGREEMENT_NBYTES = 24  # of LocalSteps: three numbers in float64, before the buckets of an exchange
_RATIO_NBYTES = 2  # of AdamWSteps, for each block: in bfloat16


def plan(scheme: Scheme, n: int, P: int, *, itemsize: int = 4, layout: Sequence[ParameterSpan] = ()) -> Plan:
    """Return what `scheme` does in a settled step with a DDP bucket of `n` elements of `itemsize` bytes on `P` ranks.

    `layout`: the bucket's parameters, for schemes that treat layers or names; without one the bucket counts as one parameter.
    `plan_of(scheme, Given(..., figures=...))` takes figures of a measured step. Raises ValueError if the scheme has no closed form.
    """
    made = plan_of(scheme, Given(n, P, itemsize, tuple(layout)))
    return replace(made, beside=(*made.beside, announcement_exchange(P))) if P > 1 else made


def local_steps(scheme: Scheme, buckets: Iterable[int], P: int, every: int, fragments: int = 1) -> Plan:
    """Return the mean over steps of what `sparsync.LocalSteps` does with buckets of these sizes, in elements of float32.

    An exchange begins with an agreement for each fragment. Shared buffers and a measured clip factor are not included.
    """
    return averaged(sum([plan(scheme, n, P) for n in buckets] + [agreement(P)] * fragments, Plan()), every)


def agreement(P: int) -> Plan:
    """Return what `sparsync.LocalSteps` exchanges before the buckets of a fragment."""
    return Plan((counts_exchange(P, _AGREEMENT_NBYTES),), beside=(announcement_exchange(P),)) if P > 1 else Plan()


def adamw_steps(scheme: Scheme, buckets: Iterable[int], P: int, block: int = 64, measure_every: int = 8) -> Plan:
    """Return the mean over steps of what `sparsync.AdamWSteps` does with buckets of these sizes, in elements of float32.

    It adds common weights, momentum, second moments, and two numbers per block to the state of the scheme. The first 8 steps, which all
    measure the ratio, are not included.
    """
    sizes = list(buckets)
    blocks = [-(-n // block) for n in sizes]
    state = 4 * sum(2 * n + each * block + 2 * each for n, each in zip(sizes, blocks, strict=True))
    # Second moments and steps are read and written, and the gradient is read; then momentum and weights.
    own = Plan(passes=4 * 10 * sum(sizes), state_nbytes=state)
    return sum([plan(scheme, n, P) for n in sizes], own) + averaged(ratio(sizes, P, block), measure_every)


def ratio(buckets: Iterable[int], P: int, block: int = 64) -> Plan:
    """Return one measurement of the ratio of `sparsync.AdamWSteps` for buckets of these sizes: a number per block, from all ranks."""
    if P == 1:
        return Plan()
    blocks = sum(-(-n // block) for n in buckets)
    return Plan((all_reduce_exchange(blocks, _RATIO_NBYTES, P),), beside=(announcement_exchange(P),))


def averaged(made: Plan, steps: int) -> Plan:
    """Return the mean step of a plan that takes place every `steps` steps; what is kept between steps stays.

    For counts, not for times: an exchange of an eighth of the bytes does not take an eighth of the time. Time the whole one, and divide.
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

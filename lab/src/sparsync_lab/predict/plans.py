"""Plans of schemes and of the steps around them: closed forms, at any number of elements and of ranks.

The forms of schemes are in `schemes` and `rivals`. Here is what an integration adds to them.
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


def plan(
    scheme: Scheme,
    n: int,
    P: int,
    *,
    itemsize: int = 4,
    union: int | float | None = None,
    layout: Sequence[ParameterSpan] = (),
) -> Plan:
    """Return what `scheme` does with a bucket of `n` elements of `itemsize` bytes on `P` ranks, as DDP hands it one, in a settled step.

    `union`: K, where the gradients decide on it and it is known; the form estimates it otherwise. `layout`: the bucket's parameters, for
    schemes that treat matrices, layers or names; without one it counts as one parameter of no known shape.
    `plan_of(scheme, Given(..., figures=...))` takes more figures of a step. Raises ValueError where the scheme has no closed form, for a
    class in place of a scheme, and for figures that are no whole numbers.
    """
    if not isinstance(scheme, Scheme):
        cure = f"make one: {scheme.__name__}(...)" if isinstance(scheme, type) else 'make one: schemes.get("topk")'
        raise ValueError(f"a plan needs a scheme, got {scheme!r}; {cure}")
    if union is not None and not 0 <= union <= n:
        raise ValueError(f"union must be in [0, {n}], the elements of the bucket, got {union}")
    figures = {} if union is None else {"union": round(union)}
    given = Given(n, P, itemsize, tuple(layout), figures=figures)
    made = plan_of(scheme, given)
    return replace(made, beside=(*made.beside, announcement_exchange(P))) if P > 1 else made


def local_steps(scheme: Scheme, buckets: Iterable[int], P: int, every: int, fragments: int = 1) -> Plan:
    """Return the mean over steps of what `sparsync.LocalSteps` does with buckets of these sizes, in elements of float32.

    An exchange begins with an agreement for each fragment. Buffers that are shared and a clip factor that is measured are not in it.
    """
    return averaged(sum([plan(scheme, n, P) for n in buckets] + [agreement(P)] * fragments, Plan()), every)


def agreement(P: int) -> Plan:
    """Return what `sparsync.LocalSteps` exchanges before the buckets of a fragment."""
    return Plan((counts_exchange(P, _AGREEMENT_NBYTES),), beside=(announcement_exchange(P),)) if P > 1 else Plan()


def adamw_steps(scheme: Scheme, buckets: Iterable[int], P: int, block: int = 64, measure_every: int = 8) -> Plan:
    """Return the mean over steps of what `sparsync.AdamWSteps` does with buckets of these sizes, in elements of float32.

    To the state of the scheme it adds common weights, momentum, second moments, and two numbers a block. The first 8 steps, which all
    measure the ratio, are not in it.
    """
    sizes = list(buckets)
    blocks = [-(-n // block) for n in sizes]
    state = 4 * sum(2 * n + each * block + 2 * each for n, each in zip(sizes, blocks, strict=True))
    # Second moments and steps: both are read and written, and the gradient is read; then momentum and weights.
    own = Plan(passes=4 * 10 * sum(sizes), state_nbytes=state)
    return sum([plan(scheme, n, P) for n in sizes], own) + averaged(ratio(sizes, P, block), measure_every)


def ratio(buckets: Iterable[int], P: int, block: int = 64) -> Plan:
    """Return one measurement of the ratio of `sparsync.AdamWSteps` for buckets of these sizes: a number per block, from all ranks."""
    if P == 1:
        return Plan()
    blocks = sum(-(-n // block) for n in buckets)
    return Plan((all_reduce_exchange(blocks, _RATIO_NBYTES, P),), beside=(announcement_exchange(P),))


def averaged(made: Plan, steps: int) -> Plan:
    """Return a plan of every `steps` steps as the mean of one; what is kept between steps stays.

    For counts, not for times: an exchange of an eighth of the bytes does not take an eighth of the time. Time the whole one, and divide.
    """
    if not steps >= 1:  # so that nan is none
        raise ValueError(f"an exchange takes place every 1 or more steps, got {steps}")

    def each(exchange: Exchange) -> Exchange:
        return replace(
            exchange,
            nbytes=exchange.nbytes / steps,
            messages=exchange.messages / steps,
            rounds=exchange.rounds / steps,
            received=exchange.received / steps,
        )

    return Plan(
        tuple(map(each, made.exchanges)),
        made.passes / steps,
        {kind: elements / steps for kind, elements in made.kernels.items()},
        {kind: calls / steps for kind, calls in made.calls.items()},
        tuple(map(each, made.beside)),
        made.state_nbytes,
    )

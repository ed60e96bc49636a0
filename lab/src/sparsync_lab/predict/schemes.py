"""Closed-form plans of the library's schemes, of the steps around them, and of 1-bit Adam. Register your scheme's with `@form.register`.

Other rivals have none: `sparsync compare` and `traffic` count what they send.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import singledispatch

import torch

from sparsync import ErrorFeedbackScheme, Scheme, Steps
from sparsync.collectives.skipping import skip_count
from sparsync.core import ParameterSpan, count_for, laid_out, matches, spans
from sparsync.schemes.auto_protect import AutoProtect
from sparsync.schemes.dense import Dense
from sparsync.schemes.exact_exdyna import ExactExDyna
from sparsync.schemes.exact_micro import LEVEL_NBYTES, ROW, SAMPLE_POINTS, ExactMiCRO
from sparsync.schemes.exact_oktopk import ExactOkTopk
from sparsync.schemes.exdyna import ExDyna
from sparsync.schemes.in_turn import InTurn
from sparsync.schemes.micro import MiCRO
from sparsync.schemes.oktopk import OkTopk
from sparsync.schemes.per_parameter import PerParameter
from sparsync.schemes.quantized import Quantized
from sparsync.schemes.skip_reduce import SkipReduce
from sparsync.schemes.topk_allgather import TopK
from sparsync.schemes.two_shot import TwoShot
from sparsync.selection.exclusive import BlockCyclic, budget, by_rank
from sparsync.selection.shares import equal_shares
from sparsync.selection.turns import Turns
from sparsync.wire import Elements, Raw, ValueCodec, Values, fixed_length_nbytes
from sparsync_lab.predict.collectives import (
    direct_exchanges,
    even_split_exchanges,
    gather_elements_exchange,
    gather_survivors_exchange,
    hierarchical_exchanges,
    mean_at_plan,
    quantized_all_reduce_plan,
    ring_exchanges,
)
from sparsync_lab.predict.exchanges import (
    NOTHING,
    Exchange,
    Given,
    Plan,
    Tally,
    all_gather_exchange,
    all_reduce_exchange,
    announcement_exchange,
    counts_exchange,
    near_equal,
    packet_tally,
    planned,
    plus,
    tally,
    to_owners_exchange,
)
from sparsync_lab.rivals.onebit_adam import OneBitAdam

# Share of the selected elements in the fullest of equal spans, if one threshold selects from layers that differ in scale, as `sparsync
# traffic` draws them.
PEAK = 0.6
_AGREEMENT_NBYTES = 24  # LocalSteps sends three float64 numbers before the buckets of an exchange
_MEASURED_NBYTES = 2  # AdamWSteps sends bfloat16 numbers


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


def adamw_steps(scheme: Scheme, buckets: Sequence[int], P: int, options: Steps, muon: bool = False) -> Plan:
    """Plan the mean step of `sparsync.AdamWSteps` with buckets of these sizes, in float32 elements.

    The state is the scheme's plus momentum, second moments, two or four numbers per block, and common weights unless `options.keep` is
    0. The first 8 steps, which all measure, are not included.
    """
    blocks, sent = [-(-n // options.block) for n in buckets], _measured_numbers(scheme, options, muon)
    state = 4 * ((2 - (options.keep == 0)) * sum(buckets) + (options.block + 2 * sent) * sum(blocks))
    # Second moments and steps are read and written, the gradient is read; likewise momentum and weights.
    own = Plan(passes=4 * 10 * sum(buckets), state_nbytes=state)
    measured = averaged(measurement(scheme, buckets, P, options, muon), options.measure_every)
    return sum([plan(scheme, n, P) for n in buckets], own) + measured


def measurement(scheme: Scheme, buckets: Iterable[int], P: int, options: Steps, muon: bool = False) -> Plan:
    """Plan one measurement of `sparsync.AdamWSteps` for buckets of these sizes, in float32 elements.

    One number per parameter, where second moments are averaged, is not included.
    """
    if P == 1:
        return Plan()
    count = _measured_numbers(scheme, options, muon) * sum(-(-n // options.block) for n in buckets)
    return Plan((all_reduce_exchange(count, _MEASURED_NBYTES, P),), beside=(announcement_exchange(P),))


def _measured_numbers(scheme: Scheme, options: Steps, muon: bool) -> int:
    """Count the numbers that a measurement sends per block: another one if second moments are averaged."""
    return 1 if muon or options.common_for(scheme, muon) else 2


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


def plan_of(scheme: Scheme, given: Given) -> Plan:
    """Plan a settled step of `scheme` for a bucket. Raises ValueError if the scheme has no closed form."""
    return Plan() if isinstance(scheme, ErrorFeedbackScheme) and not given.n else form(scheme, given)


@singledispatch
def form(scheme: Scheme, given: Given) -> Plan:
    """Plan a step; `given.n` is at least 1 for a scheme with error feedback."""
    raise ValueError(
        f"{scheme.name} has no closed form of its cost; leave it out, or write one: @sparsync_lab.predict.form.register\n"
        f"def _(scheme: {type(scheme).__name__}, given: Given) -> Plan"
    )


def residual_nbytes(scheme: ErrorFeedbackScheme, given: Given) -> int:
    """Compute the bytes of a bucket's residual on one rank."""
    return given.n * (2 if scheme.residuals == "bfloat16" and given.value_nbytes == 4 else given.value_nbytes)


@form.register
def _(scheme: Dense, given: Given) -> Plan:
    nbytes = {"gradient": given.itemsize, "float32": 4}.get(scheme.wire, 2)
    ring = scheme.form == "ring"
    reduced = ring_exchanges(given.n, nbytes, given.P) if ring else [all_reduce_exchange(given.n, nbytes, given.P)]
    return planned(given, reduced, accumulate=False)


@form.register
def _(scheme: SkipReduce, given: Given) -> Plan:
    """Plan a step. Figure: the number of "protected" elements.

    The direct form, which draws sets of offsets, is planned with a ring's. If P divides both the protected elements and the others, all
    sets send the same amount.
    """
    n, P, nbytes = given.n, given.P, given.itemsize
    named = sum(len(entry.span) for entry in given.layout if matches(entry.name, scheme.protect))
    always = given.figures.get("protected", named)
    skip = skip_count(scheme.skip, max(1, P // scheme.node_size))
    if scheme.node_size > 1 and P > 1:
        if P % scheme.node_size:
            raise ValueError(f"node_size must divide the {P} ranks, got {scheme.node_size}")
        exchanges = hierarchical_exchanges(n, nbytes, P, scheme.node_size, scheme.form, skip, always)
    elif scheme.form == "ring":
        exchanges = ring_exchanges(n, nbytes, P, skip, always)
    else:
        exchanges = direct_exchanges(n, nbytes, P, skip, always)
    return planned(given, exchanges, n * given.value_nbytes * scheme.feedback, accumulate=scheme.feedback)


@form.register
def _(scheme: AutoProtect, given: Given) -> Plan:
    """Plan a step after the observing ones. Figure: the number of "protected" elements, by default the maximum."""
    protected = given.figures.get("protected", int(scheme.share * given.n))
    return form(scheme.scheme, replace(given, figures={**given.figures, "protected": protected}))


@form.register
def _(scheme: PerParameter, given: Given) -> Plan:
    """Plan all schemes in sequence, each for its parameters. It takes no figures."""
    total, left = Plan(), list(given.parameters)
    for pattern, inner in [*scheme.patterns.items(), ("*", scheme.default)]:
        own = [entry for entry in left if matches(entry.name, [pattern])]
        left = [entry for entry in left if entry not in own]
        layout = laid_out((entry.name, entry.shape or len(entry.span)) for entry in own)
        if layout and layout[-1].span.stop:
            total += plan_of(inner, Given(layout[-1].span.stop, given.P, given.itemsize, layout, given.step))
    # Each bucket is copied out of the gradient and back again.
    return replace(total, passes=total.passes + 4 * given.n * given.itemsize)


@form.register
def _(scheme: Quantized, given: Given) -> Plan:
    return quantized_form(given, scheme.values, residual_nbytes(scheme, given))


def quantized_form(given: Given, values: Values, state_nbytes: int, down: Values | None = None) -> Plan:
    """Plan a quantized all-reduce of all elements with error feedback; `down`: the format that owners send to all."""
    mean = quantized_all_reduce_plan(given.n, given.dtype, given.P, ValueCodec(values), ValueCodec(down or values))
    return planned(given, mean.exchanges, state_nbytes, encode=mean.encode, decode=mean.decode)


@form.register
def _(scheme: OneBitAdam, given: Given) -> Plan:
    """Plan a step after the warm-up; warm-up steps are Dense's."""
    wide = replace(given, itemsize=given.value_nbytes)
    made = quantized_form(wide, "sign", 2 * given.n * given.value_nbytes + residual_nbytes(scheme, given))
    # The momentum is computed, copied and divided by the root of the second moments.
    return replace(made, passes=made.passes + 10 * given.n * given.value_nbytes)


@form.register
def _(scheme: InTurn, given: Given) -> Plan:
    K = Turns(given.n, given.P, scheme.every).length(given.step or 0)
    codecs = ValueCodec(scheme.values), ValueCodec(scheme.values_down)
    mean = quantized_all_reduce_plan(K, given.dtype, given.P, *codecs)
    return planned(
        given,
        mean.exchanges,
        residual_nbytes(scheme, given),
        select=(K, 1),
        passes_to_select=K,
        encode=mean.encode,
        decode=mean.decode,
    )


@form.register
def _(scheme: TopK, given: Given) -> Plan:
    """Plan a step in which all ranks send the same number of elements."""
    codec, n, P, k = Elements(scheme.values), given.n, given.P, count_for(scheme.density, given.n)
    return planned(
        given,
        [all_gather_exchange({codec.nbytes(k, n, given.dtype): P})],
        residual_nbytes(scheme, given),
        select=(n, 1),
        encode=(k, 1),
        decode=plus((k * P, P), NOTHING if codec.exact else (k, 1)),
    )


@form.register
def _(scheme: TwoShot, given: Given) -> Plan:
    P, state = given.P, residual_nbytes(scheme, given)
    values_down = scheme.values if scheme.values_down is None else scheme.values_down
    if not scheme.leaves_out:
        return quantized_form(given, scheme.values, state, values_down)
    lengths = _lengths(BlockCyclic(given.n, P))
    density_down = scheme.density if scheme.density_down is None else scheme.density_down
    up, own_up, total_up = _packets_of(scheme.density, scheme.values, lengths, given.dtype)
    down, own_down, total_down = _packets_of(density_down, values_down, lengths, given.dtype)
    sent = (total_up - own_up, P - 1)
    return planned(
        given,
        [to_owners_exchange(up), all_gather_exchange(down)],
        state,
        select=(given.n, P),
        passes_to_select=max(lengths),  # the sums of this rank's region
        encode=plus(sent, (own_down, 1)),
        decode=plus(NOTHING if Elements(scheme.values).exact else sent, ((P - 1) * own_up, P - 1), (total_down, P)),
    )


def _lengths(partition: BlockCyclic) -> Tally:
    """Count the partitions of each length."""
    whole = partition.groups * partition.row
    return {whole + rest: ranks for rest, ranks in near_equal(partition.n - whole * partition.P, partition.P).items()}


def _packets_of(density: float, values: Values, lengths: Tally, dtype: torch.dtype) -> tuple[Tally, int, int]:
    """Compute the packet sizes of regions of these lengths, and the elements in the largest region and in all regions."""
    codec, counts = Elements(values), tally(lengths, lambda length: count_for(density, length))
    sizes = tally(lengths, lambda length: codec.nbytes(count_for(density, length), length, dtype))
    return sizes, max(counts), sum(count * ranks for count, ranks in counts.items())


@form.register
def _(scheme: ExactMiCRO, given: Given) -> Plan:
    """Plan a step of ExactMiCRO or ExactExDyna."""
    n, P, t = given.n, given.P, given.step or 0
    # Assume equal counts: partitions of mixed rows hold the same number of elements, and adjacent ones have the same length.
    total = budget(scheme.density, n, t)
    if isinstance(scheme, ExactExDyna):
        levels = 1
        lengths = by_rank([len(span) for span in spans(n, P)], t)
        selected = equal_shares(lengths, total, t // P)
    else:
        levels = len(SAMPLE_POINTS)
        lengths = by_rank(BlockCyclic(n, P, ROW).lengths(), t)
        selected = [len(span) for span in spans(total, P)]
    head = LEVEL_NBYTES * levels
    sizes = packet_tally(selected, lengths, lambda k, length: head + fixed_length_nbytes(k, length))
    return _at_union(scheme, given, [all_gather_exchange(sizes)], total, max(lengths))


@form.register
def _(scheme: MiCRO, given: Given) -> Plan:
    """Plan a step of MiCRO or ExDyna with a settled threshold. Figure: the numbers "selected", by rank."""
    n, P = given.n, given.P
    selected = given.figures.get("selected")
    examined = max(near_equal(n, P))
    if selected is None:
        union = count_for(scheme.density, n)
        # Estimate the fullest partition. Partitions that follow the loads hold equal numbers.
        peak = 0.0 if isinstance(scheme, ExDyna) else PEAK
        most = min(examined, round(max(1 / P, peak) * union))
    else:
        union, most = sum(selected), max(selected)
    padded = all_gather_exchange({(8 if scheme.bug_compatible else 4) * most: P})
    return _at_union(scheme, given, [counts_exchange(P), padded], union, examined)


def _at_union(
    scheme: MiCRO | ExactMiCRO, given: Given, exchanges: Sequence[Exchange], union: int, examined: int
) -> Plan:
    """Plan `exchanges` of positions, then of values at the union; the busiest rank examines `examined` elements."""
    exact = isinstance(scheme, ExactMiCRO)
    mean = mean_at_plan(union, given.dtype, given.P, ValueCodec(scheme.values if exact else "float32"), exact)
    return planned(
        given,
        [*exchanges, *mean.exchanges],
        residual_nbytes(scheme, given),
        select=(examined, 1),
        encode=mean.encode,
        decode=mean.decode,
    )


@form.register
def _(scheme: OkTopk | ExactOkTopk, given: Given) -> Plan:
    """Plan a step; for OkTopk one between two evaluations of the thresholds.

    Each rank selects k elements, spread evenly over regions of equal length, and the same number of sums survives in each region.
    """
    n, P, k, dtype = given.n, given.P, count_for(scheme.density, given.n), given.dtype
    exact = isinstance(scheme, ExactOkTopk)
    codec = Elements(scheme.values) if exact else Raw()
    lengths = [len(span) for span in spans(n, P)]
    sent = k - k // P
    split = even_split_exchanges(sent, n, P, dtype, codec, counts_first=not exact)
    if exact:
        held = equal_shares(lengths, k, given.step or 0)
        exchanges = [*split, gather_survivors_exchange(held, lengths, dtype, codec)]
    else:
        held = [len(span) for span in spans(k, P)]
        exchanges = [*split, counts_exchange(P, 4), gather_elements_exchange(held, lengths, dtype, codec)]
    rounding = NOTHING if codec.exact else plus((sent, P), (max(held), 1))
    return planned(
        given,
        exchanges,
        residual_nbytes(scheme, given),
        select=(n + max(lengths), 2),
        passes_to_select=max(lengths),
        encode=plus((sent, P), (max(held), 1)),
        decode=plus((sent, P), (sum(held), P), rounding),
    )

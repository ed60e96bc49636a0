"""The plan of each rival in closed form."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from sparsync.collectives.sparse_allreduce import ElementCodec
from sparsync.collectives.values import Quantizer
from sparsync.core import count_for, spans
from sparsync.wire import Elements, ValueCodec, fixed_length_nbytes
from sparsync_lab.predict.collectives import (
    even_split_exchanges,
    gather_elements_exchange,
    mean_at_plan,
    split_and_reduce_exchanges,
)
from sparsync_lab.predict.exchanges import (
    NOTHING,
    Exchange,
    Given,
    Plan,
    all_gather_exchange,
    counts_exchange,
    planned,
    plus,
    tally,
)
from sparsync_lab.predict.schemes import PEAK, form, quantized_form, residual_nbytes, top_k_form
from sparsync_lab.rivals.demo import DeMo
from sparsync_lab.rivals.dgc import DGC
from sparsync_lab.rivals.gtopk import GTopK
from sparsync_lab.rivals.loco import LoCo
from sparsync_lab.rivals.onebit_adam import OneBitAdam
from sparsync_lab.rivals.powersgd import PowerSGD, factored
from sparsync_lab.rivals.sparse_loco import SparseLoCo
from sparsync_lab.rivals.tiles import selected_in_tiles
from sparsync_lab.rivals.topk_dsa import TopKDSA
from sparsync_lab.rivals.tree_top_k import rounds

# Of k elements on each of P ranks, drawn as `sparsync traffic` does, the union has about k P^0.6.
_UNION_EXPONENT = 0.6


@form.register
def _(scheme: DGC, given: Given) -> Plan:
    plan = top_k_form(scheme, given)
    # The momentum: read, multiplied and written, and copied.
    passes = plan.passes + 5 * given.n * given.value_nbytes
    return replace(plan, passes=passes, state_nbytes=2 * plan.state_nbytes)


@form.register
def _(scheme: GTopK, given: Given) -> Plan:
    n, P, k, codec = given.n, given.P, count_for(scheme.density, given.n), Elements(scheme.values)
    merges = rounds(P)  # on rank 0, which also sends the result to as many others
    rounding = NOTHING if codec.exact else (k, 1)
    return planned(
        given,
        tree_top_k_exchanges(k, n, given.dtype, P, codec),
        residual_nbytes(scheme, given),
        select=(n + 2 * k * merges, 1 + merges),
        encode=(k, 1),
        decode=plus((k * merges, merges), (k, 1), rounding),
    )


def tree_top_k_exchanges(k: int, n: int, dtype: torch.dtype, P: int, codec: ElementCodec) -> list[Exchange]:
    """Return the exchanges of `tree_top_k`, one for each round: a packet from those that send to those that receive."""
    nbytes = codec.nbytes(k, n, dtype)
    return [Exchange("send_recv", nbytes, 1 if nbytes else 0, 1, nbytes, "pair")] * (2 * rounds(P))


@form.register
def _(scheme: LoCo, given: Given) -> Plan:
    return quantized_form(given, scheme.values, residual_nbytes(scheme, given), scheme.values_down)


@form.register
def _(scheme: OneBitAdam, given: Given) -> Plan:
    """Return the plan of a step after the warm-up; one of the warm-up is that of Dense."""
    wide = replace(given, itemsize=given.value_nbytes)
    plan = quantized_form(wide, "sign", 2 * given.n * given.value_nbytes + residual_nbytes(scheme, given))
    # The momentum: made, copied, and divided by the root of the second moments.
    return replace(plan, passes=plan.passes + 10 * given.n * given.value_nbytes)


@form.register
def _(scheme: PowerSGD, given: Given) -> Plan:
    plan = factored(given.parameters, scheme.rank, scheme.least_saving)
    shapes = [(len(group.names), group.rows, group.columns, group.rank) for group in plan.groups]
    whole, P = len(plan.whole), given.P
    left = whole + sum(count * a * r for count, a, _, r in shapes)
    right = sum(count * b * r for count, _, b, r in shapes)
    means = [
        mean_at_plan(count, given.dtype, P, ValueCodec(scheme.factors))
        for count in ([left, right] if shapes else [left])
    ]
    matrices = sum(count * a * b for count, a, b, _ in shapes)
    made = planned(
        given,
        [exchange for mean in means for exchange in mean.exchanges],
        residual_nbytes(scheme, given) + right * given.value_nbytes,
        encode=plus(*(mean.encode for mean in means)),
        decode=plus(*(mean.decode for mean in means)),
    )
    # Four products with each matrix: two read it, one writes, one reads and writes.
    kernels = {**made.kernels, "multiply": sum(4 * count * a * b * r for count, a, b, r in shapes)}
    calls = {**made.calls, "multiply": 4 * len(shapes)}
    passes = made.passes + 5 * matrices * given.value_nbytes
    return replace(made, passes=passes, kernels=kernels, calls=calls) if shapes else made


@form.register
def _(scheme: DeMo, given: Given) -> Plan:
    k = sum(selected_in_tiles(given.parameters, scheme.per_tile))
    plan = in_tiles_form(given, k, ValueCodec(scheme.values), residual_nbytes(scheme, given))
    # Three transforms of all tiles, each a product from the left and one from the right.
    transformed = {"transform": 3 * given.n}
    return replace(
        plan,
        passes=plan.passes + 12 * given.n * given.value_nbytes,
        kernels={**plan.kernels, **transformed},
        calls={**plan.calls, "transform": 3},
    )


@form.register
def _(scheme: SparseLoCo, given: Given) -> Plan:
    counts = selected_in_tiles(given.parameters, scheme.per_tile)
    return in_tiles_form(given, sum(counts), scheme.codec(counts), residual_nbytes(scheme, given))


def in_tiles_form(given: Given, k: int, codec: Quantizer, state_nbytes: int) -> Plan:
    """Return the plan of a step that selects `k` of n elements in tiles and exchanges them by `mean_of_selections`."""
    nbytes = fixed_length_nbytes(k, given.n) + codec.nbytes(k, given.dtype)
    return planned(
        given,
        [all_gather_exchange({nbytes: given.P})],
        state_nbytes,
        select=(given.n, 1),
        passes_to_select=3 * given.n,  # tiles are copied
        encode=(k, 1),
        decode=((given.P + 1) * k, given.P + 1),
    )


@form.register
def _(scheme: TopKDSA, given: Given) -> Plan:
    """Return the plan where selections spread evenly over the regions, and sums do not; figures: "outgoing", "held"."""
    n, P, codec, dtype = given.n, given.P, Elements(scheme.values), given.dtype
    k, regions = count_for(scheme.density, n), spans(n, P)
    lengths = [len(region) for region in regions]
    outgoing = given.by_rank("outgoing")
    if outgoing is not None:
        split = split_and_reduce_exchanges(outgoing, lengths, dtype, codec, counts_first=True)
    else:
        split = even_split_exchanges(k - k // P, n, P, dtype, codec, counts_first=True)
    held = given.by_rank("held") or _uneven(_union_of(given, k), lengths)
    if scheme.gathers_dense(held, regions, dtype):
        gathered = all_gather_exchange(tally(lengths, lambda m: ValueCodec(scheme.values).nbytes(m, dtype)))
    else:
        gathered = gather_elements_exchange(held, lengths, dtype, codec)
    rounding = NOTHING if codec.exact else plus((k, P), (max(held), 1))
    return planned(
        given,
        [*split, counts_exchange(P), gathered],
        residual_nbytes(scheme, given),
        select=(n + lengths[0], 2),
        passes_to_select=lengths[0],
        encode=plus((k, P), (max(held), 1)),
        decode=plus((k, P), (sum(held), P), rounding),
    )


def _uneven(total: int, lengths: Sequence[int]) -> list[int]:
    """Return how many of `total` elements lie in each of adjacent spans of layers that differ in scale: PEAK of them in the first."""
    P = len(lengths)
    first = min(lengths[0], max(-(-total // P), round(PEAK * total)))
    each, more = divmod(total - first, max(1, P - 1))
    return [first, *(min(length, each + (p < more)) for p, length in enumerate(lengths[1:]))]


def _union_of(given: Given, k: int) -> int:
    """Return K where each rank selects `k` elements of all n by itself: as given, or estimated."""
    return given.figures.get("union", min(given.n, round(k * given.P**_UNION_EXPONENT)))

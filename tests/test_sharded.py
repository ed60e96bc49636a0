"""Reduce-scatters with fixed owners: who is in which sum, what is kept, and what it costs."""

from collections.abc import Callable
from functools import partial
from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from sparsync import Bucket, Report
from sparsync.attached.fsdp2 import ReduceScatterInto
from sparsync.attached.fsdp2_units import ShardedParameter
from sparsync.base.scheme import Scheme, own_shard_layout, shard_layout, shard_name
from sparsync.base.state import Rollback
from sparsync.collectives.skipping import SkipPlan, reduce_scatter, rotating_offsets
from sparsync.comm import Cost, LocalWorld, MeteredComm
from sparsync.core import Comm, generator
from sparsync.schemes import Dense, ExactOkTopk, SkipReduce, Span, TwoShot
from sparsync.wire import Values

WORLDS = (1, 3, *(pytest.param(P, marks=pytest.mark.slow) for P in (2, 5, 8)))
LENGTHS = (("weight", 3), ("empty", 0), ("bias", 2))  # of a piece


@pytest.mark.parametrize("P", WORLDS)
def test_each_chunk_has_the_sum_of_its_contributors_and_of_everybody_where_nobody_is_left_out(P: int) -> None:
    for m, always in ((0, ()), (4, ()), (4, (Span(1, 3),))):
        for skip in range(min(P, 4)):
            for offsets in combinations(range(1, P), skip):
                for owner, out in enumerate(summed(P, m, SkipPlan(offsets), always)):
                    wanted = torch.full((m,), sum(2.0**r for r in range(P) if (r - owner) % P not in offsets))
                    for span in always:
                        span.of(wanted).fill_(2.0**P - 1)
                    assert torch.equal(out, wanted)


def summed(P: int, m: int, plan: SkipPlan, always: tuple[Span, ...]) -> list[Tensor]:
    """What each owner gets when rank r has 2^r everywhere."""

    def program(comm: MeteredComm) -> Tensor:
        x, out = torch.full((P * m,), 2.0**comm.rank), torch.full((m,), torch.nan)
        reduce_scatter(x, out, comm, plan, always)
        kept = sum(map(len, always))
        sent = 4 * ((P - 1 - plan.skip) * m + plan.skip * kept)
        assert comm.take()[0] == Cost(min(1, P - 1), (P - 1 - plan.skip) * (m > 0) + plan.skip * (kept > 0), sent)
        return out

    return LocalWorld(P).run(lambda comm: program(MeteredComm(comm)))


@pytest.mark.parametrize("P", WORLDS[1:])
def test_in_every_turn_each_offset_is_left_out_equally_often(P: int) -> None:
    for skip in range(P):
        for turn in range(3):
            steps = range(turn * (P - 1), (turn + 1) * (P - 1))
            drawn = [rotating_offsets(skip, P, 7, "layer", step) for step in steps]
            assert all(len(set(each)) == skip for each in drawn)
            assert sorted(offset for each in drawn for offset in each) == sorted(list(range(1, P)) * skip)


def world(
    scheme: Scheme, P: int, steps: int, average: bool, dtype: torch.dtype, gradient: Callable[[int, int], Tensor]
) -> list[tuple[list[Tensor], list[Report], Tensor]]:
    """For each rank: its chunk at each step, the reports, and what it keeps, in the order of the chunks."""
    slots = shard_layout(LENGTHS, P)

    def program(comm: MeteredComm) -> tuple[list[Tensor], list[Report], Tensor]:
        ours = scheme.reduce_scatter_form().start()
        chunks, reports = [], []
        for step in range(steps):
            bucket = Bucket("layer", gradient(comm.rank, step).to(dtype), step, slots)
            chunks.append(torch.full((5,), torch.nan, dtype=dtype))
            reports.append(ours.reduce_scatter(bucket, chunks[-1], comm, average))
            assert comm.take()[0] == reports[-1].cost
        kept = ours.state_dict().get("residual", {})
        again = scheme.reduce_scatter_form().start()
        again.load_state_dict(ours.state_dict())
        assert all(torch.equal(again.state_dict()["residual"][name], kept[name]) for name in kept)
        zero = torch.zeros(0)
        return chunks, reports, torch.cat([zero, *(kept[slot.name] for slot in slots if slot.name in kept)])

    return LocalWorld(P).run(lambda comm: program(MeteredComm(comm)))


def whole(P: int) -> Callable[[int, int], Tensor]:
    return lambda rank, step: torch.randint(-4, 5, (5 * P,), generator=generator(rank, "gradient", step)).float()


KEEPING = (
    SkipReduce(skip=0.5, feedback=True),
    SkipReduce(skip=0.5, feedback=True, protect=["bias"]),
    SkipReduce(skip=0.99, feedback=True, mode="naive"),
    ExactOkTopk(density=0.2),
    ExactOkTopk(density=0.01),
    ExactOkTopk(density=1.0),
    ExactOkTopk(density=0.2, values="int8"),
    ExactOkTopk(density=0.2, values="bfloat16"),
    ExactOkTopk(density=0.2, residuals="bfloat16"),  # whole numbers this small fit
    TwoShot(density=0.2, values="float32"),
    TwoShot(density=1.0, values="float32"),
    TwoShot(density=0.2, values="bfloat16", residuals="bfloat16"),
)


@pytest.mark.parametrize("P", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_kept_and_what_was_written_is_what_came_in(P: int, dtype: torch.dtype) -> None:
    gradient = whole(P)
    came = torch.stack([gradient(rank, step) for rank in range(P) for step in range(3)]).sum(0)
    for scheme in KEEPING:
        for average in (True, False) if P in (1, 2, 8) else (False,):  # where dividing by P is exact
            ranks = world(scheme, P, 3, average, dtype, gradient)
            written = torch.cat([torch.stack(chunks).double().sum(0) for chunks, _, _ in ranks])
            kept = torch.stack([residual for _, _, residual in ranks]).double().sum(0)
            assert torch.equal(kept + written * (P if average else 1), came.double())


@pytest.mark.parametrize("P", WORLDS)
def test_everything_sent_is_the_dense_mean_and_no_traffic_alone(P: int) -> None:
    gradient = whole(P)
    total = torch.stack([gradient(rank, 0) for rank in range(P)]).sum(0)
    for scheme in (Dense(), SkipReduce(skip=0), ExactOkTopk(density=1.0), TwoShot(1.0, "float32")):
        for average in (True, False):
            ranks = world(scheme, P, 1, average, torch.float32, gradient)
            assert torch.equal(torch.cat([chunks[0] for chunks, _, _ in ranks]), total / P if average else total)
            if P == 1:
                assert ranks[0][1][0].cost == Cost()


def test_a_sum_is_scaled_as_if_all_had_come() -> None:
    P, gradient = 4, whole(4)
    for divide_by, factor in (("contributors", 4.0 / 2.0), ("ranks", 1.0)):
        scheme = SkipReduce(skip=2, divide_by=divide_by)  # pyright: ignore[reportArgumentType]
        sums, means = (world(scheme, P, 1, average, torch.float32, gradient) for average in (False, True))
        for a, b in zip(sums, means, strict=True):
            assert torch.equal(a[0][0], b[0][0] * 4.0)
        divisor = 2.0 if divide_by == "contributors" else 4.0
        there = world(SkipReduce(skip=2, divide_by="ranks"), P, 1, False, torch.float32, gradient)
        for rank in range(P):
            assert torch.equal(sums[rank][0][0], there[rank][0][0] * factor)
            assert torch.equal(means[rank][0][0], there[rank][0][0] / divisor)


def test_overflow_on_one_rank_is_nan_on_all_and_changes_nothing_kept() -> None:
    P, good = 3, whole(3)

    def bad(rank: int, step: int) -> Tensor:
        found = good(rank, step)
        if (rank, step) == (1, 2):
            found[4] = torch.inf
        return found

    for scheme in (
        SkipReduce(skip=1, feedback=True),
        ExactOkTopk(density=0.2),
        ExactOkTopk(density=0.2, values="int4"),
        ExactOkTopk(density=0.2, values="float16"),
        TwoShot(density=0.2),
    ):
        for before, after in zip(
            world(scheme, P, 2, True, torch.float32, good), world(scheme, P, 3, True, torch.float32, bad), strict=True
        ):
            assert after[0][2].isnan().all()
            assert torch.equal(before[2], after[2])
            assert after[1][2].details == {"overflow": True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("P", WORLDS)
def test_a_step_that_will_be_skipped_loses_nothing_but_the_bucket_with_the_infinity(P: int, dtype: torch.dtype) -> None:
    """Three buckets a step; at step 1 the last rank meets an infinity in the one in the middle, before and after finite ones."""
    lengths, keys = ("first", "second", "third"), {"step": 1, "key": "second"}

    def gradient(rank: int, step: int, key: str) -> Tensor:
        return torch.randint(-4, 5, (5 * P,), generator=generator(rank, key, step)).to(dtype)

    def program(comm: Comm, scheme: Scheme, average: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        ours, skipped = scheme.reduce_scatter_form().start(), Rollback()
        applied = {key: torch.zeros(5) for key in lengths}
        for step in range(3):
            outs = {}
            for key in lengths:
                x = gradient(comm.rank, step, key)
                x[2] = torch.inf if {"step": step, "key": key} == keys and comm.rank == P - 1 else x[2]
                parts = [(key, 5)]
                out = outs[key] = torch.empty(5, dtype=dtype)
                bucket = Bucket(key, x, step, shard_layout(parts, P))
                into = ReduceScatterInto(ours, out, average, P)
                skipped.reduced(
                    into, Bucket(key, out, step, own_shard_layout(parts, comm.rank)), into.reduce(bucket, comm)
                )
            if all(bool(out.isfinite().all()) for out in outs.values()):  # as a loss scaler decides, over all shards
                applied = {key: applied[key] + outs[key] for key in lengths}
            assert step != 1 or outs["second"].isnan().all()
        kept = ours.state_dict()["residual"]
        return applied, {key: torch.cat([kept[shard_name(key, owner)] for owner in range(P)]) for key in lengths}

    for scheme, average in product(KEEPING, (True, False) if P in (1, 2, 8) else (False,)):
        ranks = LocalWorld(P).run(partial(program, scheme=scheme, average=average))
        for key in lengths:
            steps = [step for step in range(3) if {"step": step, "key": key} != keys]
            came = torch.stack([gradient(rank, step, key) for rank in range(P) for step in steps]).double().sum(0)
            written = torch.cat([applied[key] for applied, _ in ranks]).double() * (P if average else 1)
            kept = torch.stack([residual[key] for _, residual in ranks]).double().sum(0)
            assert torch.equal(kept + written, came)


@pytest.mark.parametrize("values", ["float16", "bfloat16", "int4", "ternary"])
@pytest.mark.parametrize("make", [ExactOkTopk, TwoShot])
def test_what_a_format_cannot_carry_stays_in_the_residual(make: type[ExactOkTopk | TwoShot], values: Values) -> None:
    """A million in float16, and the largest float32 in the formats of its range."""
    P, good, large = 4, whole(4), 2.0**20 if values == "float16" else torch.finfo(torch.float32).max

    def gradient(rank: int, step: int) -> Tensor:
        return torch.where(torch.arange(20) == 1, large if rank == 1 else 0.0, good(rank, step))

    ranks = world(make(density=0.2, values=values), P, 1, True, torch.float32, gradient)
    written = torch.cat([chunks[0] for chunks, _, _ in ranks]).double()
    kept = torch.stack([kept for _, _, kept in ranks]).double()
    assert kept.isfinite().all()
    assert all(report[0].details["overflow"] is False for _, report, _ in ranks)
    total = torch.stack([gradient(rank, 0) for rank in range(P)]).double().sum(0)
    assert torch.equal(P * written + kept.sum(0), total)


@pytest.mark.parametrize("average", [True, False])
def test_what_was_kept_back_and_float16_cannot_carry_stays_in_the_residual(average: bool) -> None:
    """Ranks 1 and 2 are left out of each chunk but their own: what they hold back grows by 30 000 a step."""
    P, steps = 3, 3
    scheme = SkipReduce(skip=2, feedback=True, mode="naive")
    ranks = world(scheme, P, steps, average, torch.float16, lambda rank, step: torch.full((15,), 30_000.0))
    written = torch.cat([torch.stack(chunks).double().sum(0) for chunks, _, _ in ranks])
    kept = torch.stack([kept for _, _, kept in ranks]).double().sum(0)
    assert torch.equal(written * (P if average else 1) + kept, torch.full((15,), 30_000.0 * P * steps).double())


def test_oktopk_sends_no_more_than_its_share() -> None:
    P, n = 8, 40
    for _, reports, _ in world(ExactOkTopk(density=0.2), P, 3, True, torch.float32, whole(P)):
        for report in reports:
            heads = 12 * (P - 1)  # of messages: the length, and how many elements
            assert report.cost.nbytes <= heads + 8 * (n // 5) * (P - 1) // P


@pytest.mark.parametrize("owners", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(5, 3), (7,), (2, 2), (0, 3)])
def test_a_parameter_is_cut_into_the_rows_that_its_owners_have(owners: int, shape: tuple[int, ...]) -> None:
    rows = -(-shape[0] // owners)
    length = rows * int(torch.Size(shape[1:]).numel())
    parameter = torch.arange(torch.Size(shape).numel()).float() + 1
    each = ShardedParameter("weight", shape, 0, length)
    cut = each.cut(parameter, owners)
    assert len(cut) == owners
    for part, chunk in zip(cut, parameter.view(shape).chunk(owners) if shape[0] else (), strict=False):
        assert torch.equal(part[: chunk.numel()], chunk.flatten())
        assert not part[chunk.numel() :].any()
    assert torch.equal(each.join(cut), parameter)


def test_columns_are_joined_in_the_parameters_own_order() -> None:
    parameter = torch.arange(24).float()
    each = ShardedParameter("weight", (3, 8), 1, 6)
    for part, chunk in zip(each.cut(parameter, 4), parameter.view(3, 8).chunk(4, dim=1), strict=True):
        assert torch.equal(part, chunk.flatten())
    assert torch.equal(each.join(each.cut(parameter, 4)), parameter)

"""attach on real DDP models over gloo: every gradient is what the scheme makes of the same buckets without DDP."""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.ddp_training import (
    COUNT,
    NAMES,
    TIMEOUT_S,
    AttachedTraining,
    N,
    RankRecord,
    check,
    known,
)
from helpers.distributed import case, run
from helpers.known_gradients import FEW, KnownGradients, expected, noted, row, schemes
from helpers.overlapping import IN_ORDER, Overlapping
from invariants.world import same_bits
from sparsync.comm import Cost
from sparsync.schemes import Dense

pytestmark = pytest.mark.distributed


def late(model: nn.Module) -> Callable[[random.Random], None]:
    """Make some gradients of the model up to 3 ms late; each call of the result draws which and by how much."""
    delays = [0.0] * COUNT
    for number, parameter in enumerate(model.parameters()):
        parameter.register_hook(lambda grad, number=number: time.sleep(delays[number]) if delays[number] else None)

    def redraw(draw: random.Random) -> None:
        delays[:] = [0.003 * draw.random() if draw.random() < 0.08 else 0.0 for _ in delays]

    return redraw


def train_late(ids: Iterable[str], numbers: Iterable[int], steps: int) -> dict[tuple[str, int], RankRecord]:
    """Train with each scheme, in each number of buckets."""
    found = {}
    for id in ids:
        for buckets in numbers:
            with case(f"{id}, {buckets} buckets"):
                training = AttachedTraining(id, buckets)
                redraw, draw = late(training.model), random.Random(training.rank)
                for _ in range(steps):
                    redraw(draw)
                    training.step()
                found[id, buckets] = training.done()
    return found


def check_late(P: int, ids: Sequence[str], numbers: Sequence[int], steps: int) -> None:
    ranks = run(train_late, P, ids=ids, numbers=numbers, steps=steps)
    for id, buckets in ranks[0]:
        with case(f"P={P}, {id}, {buckets} buckets"):
            trained = [rank[id, buckets] for rank in ranks]
            assert {len(layouts) for step, layouts in trained[0].steps.items() if step > 0} == {buckets}
            check(id, trained)


def test_every_step_is_that_of_the_scheme_without_ddp_however_late_ranks_are() -> None:
    check_late(2, FEW, (4,), 6)


@pytest.mark.slow
@pytest.mark.parametrize(("P", "id"), [(P, id) for P in (2, 4) for id in schemes(P)])
def test_every_step_is_that_of_every_scheme_without_ddp_in_few_and_many_buckets(P: int, id: str) -> None:
    check_late(P, [id], (2, 8, 32) if P == 2 and id in FEW else (8,), 50 if P == 2 else 20)


UNUSED = "block3.bias"


def used(rank: int, step: int, name: str) -> bool:
    """Some parameters are left out by one of two ranks, another one each time; one is never used by anybody."""
    number = NAMES.index(name)
    return name != UNUSED and (number + step) % 3 != rank


def train_alone(ids: Iterable[str]) -> dict[str, RankRecord]:
    found = {}
    for id in ids:
        with case(id):
            training = AttachedTraining(id)
            for _ in range(3):
                training.step()
            found[id] = training.done()
    return found


@pytest.mark.slow
def test_one_rank_alone_sends_nothing_and_dense_gradients_stay_as_they_are() -> None:
    ids = schemes(1)
    (found,) = run(train_alone, 1, ids=ids)
    for id in ids:
        with case(id):
            check(id, [found[id]])
            assert all(report.sent == Cost() for report in found[id].reports)
    raw = torch.stack([torch.cat([known(0, step, name) for name in NAMES]) for step in range(3)])
    assert torch.equal(found["dense"].grads, raw)
    assert torch.equal(found["skip-default"].grads, raw)


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def train_perceptron(hooked: bool) -> list[Tensor]:
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.003)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    if hooked:
        sparsync.attach(ddp, Dense(), options=sparsync.Options(timeout_s=TIMEOUT_S))
    for step in range(10):
        optimizer.zero_grad()
        ddp(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in ddp.parameters()]


def train_both_ways() -> tuple[list[Tensor], list[Tensor]]:
    return train_perceptron(hooked=True), train_perceptron(hooked=False)


def test_dense_trains_to_the_same_bits_as_ddp_without_a_hook() -> None:
    for hooked, plain in run(train_both_ways, 2):
        assert all(map(same_bits, hooked, plain))


def train_on_real_numbers(id: str) -> tuple[RankRecord, dict[tuple[int, str], Tensor]]:
    """Each step twice on the same batch: once without synchronisation, for this rank's own gradient, and once with."""
    model, rank = perceptron(), dist.get_rank()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.003)
    options = sparsync.Options(timeout_s=TIMEOUT_S, join_mb=0, dense_below=0)
    handle = sparsync.attach(ddp, row(id).make(), options=options)
    buckets = noted(handle.state)
    own, rows = {}, []
    for step in range(5):
        for synchronised in (False, True):
            ddp.zero_grad()
            with nullcontext() if synchronised else ddp.no_sync():
                ddp(batch(rank, step)).square().mean().backward()
            grads = {name: p.grad.flatten().clone() for name, p in model.named_parameters() if p.grad is not None}
            if synchronised:
                rows.append(torch.cat(list(grads.values())))
            else:
                own |= {(step, name): grad for name, grad in grads.items()}
    residual = handle.state.state_dict().get("residual", {})
    return RankRecord(torch.stack(rows), buckets, handle.reports(), residual), own


@pytest.mark.parametrize("id", ["topk-0.1"])
def test_gradients_of_a_real_model_are_reduced_to_the_same_bits_as_without_ddp(id: str) -> None:
    ranks = run(train_on_real_numbers, 2, id=id)
    names = [name for name, _ in perceptron().named_parameters()]
    wanted = expected(id, 2, ranks[0][0].steps, names, lambda rank, step, name: ranks[rank][1][step, name].clone())
    for number, (trained, _) in enumerate(ranks):
        assert len(trained.steps[1]) > 1
        trained.check(wanted.grads, wanted.residuals[number])


def overlap() -> list[str]:
    model, scheme = KnownGradients(COUNT, N), Overlapping("bucket0", watched=False)
    model.embed.weight.register_hook(scheme.first_layer)
    ddp = DistributedDataParallel(model, bucket_cap_mb=COUNT // 2 * N * 4 / 2**20)
    sparsync.attach(ddp, scheme, options=sparsync.Options(timeout_s=TIMEOUT_S, join_mb=0, dense_below=0))
    for step in range(2):
        scheme.watched = step == 1  # from here on there are two buckets
        ddp(model.inputs(dist.get_rank(), step)).backward()
    return scheme.events


def test_the_backward_pass_goes_on_while_a_bucket_is_reduced() -> None:
    assert run(overlap, 2) == [IN_ORDER, IN_ORDER]

"""attach on real DDP models over gloo: every gradient is what the scheme makes of the same buckets without DDP."""

import random
import time
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.ddp_training import COUNT, NAMES, TIMEOUT_S, AttachedTraining, N, RankRecord, check
from helpers.distributed import case, run
from helpers.known_gradients import FEW, KnownGradients
from helpers.overlapping import IN_ORDER, Overlapping

pytestmark = pytest.mark.distributed


def late(model: nn.Module) -> Callable[[random.Random], None]:
    """Make some gradients of the model up to 3 ms late; each call of the result draws which and by how much."""
    delays = [0.0] * COUNT
    for number, parameter in enumerate(model.parameters()):
        parameter.register_hook(lambda grad, number=number: time.sleep(delays[number]) if delays[number] else None)

    def redraw(draw: random.Random) -> None:
        delays[:] = [0.003 * draw.random() if draw.random() < 0.08 else 0.0 for _ in delays]

    return redraw


def train_late(ids: Iterable[str], steps: int) -> dict[str, RankRecord]:
    found = {}
    for id in ids:
        with case(id):
            training = AttachedTraining(id)
            redraw, draw = late(training.model), random.Random(training.rank)
            for _ in range(steps):
                redraw(draw)
                training.step()
            found[id] = training.done()
    return found


def test_every_step_is_that_of_the_scheme_without_ddp_however_late_ranks_are() -> None:
    ranks = run(train_late, 2, ids=FEW, steps=4)
    for id in FEW:
        with case(id):
            trained = [rank[id] for rank in ranks]
            assert {len(layouts) for step, layouts in trained[0].steps.items() if step > 0} == {4}
            check(id, trained)


UNUSED = "block3.bias"


def used(rank: int, step: int, name: str) -> bool:
    """Some parameters are left out by one of two ranks, another one each time; one is never used by anybody."""
    number = NAMES.index(name)
    return name != UNUSED and (number + step) % 3 != rank


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + rank))


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

"""The moves of the common weights, as another rank replays them: the same bits, in few bytes; and what ends a journal."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, testing

from sparsync import AdamWSteps, Snapshot
from sparsync.comm import LocalWorld
from sparsync.core import Comm, generator
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.schemes import TwoShot
from sparsync_elastic.journal import Journal, nbytes_of, packed, unpacked, unpacked_move
from sparsync_elastic.trained import digest_of

P = 2


def normal(n: int) -> Tensor:
    return torch.randn(n, generator=generator(n, "journal", 0))


def in_signs(n: int, density: float) -> Tensor:
    """Return few elements that are not zero, with the same magnitude in runs of 256."""
    x = normal(n)
    index = (x.abs() > x.abs().quantile(1 - density)).nonzero().view(-1)
    kept = torch.zeros(n)
    kept[index] = x[index].sign() * normal(-(-len(index) // 256)).abs().repeat_interleave(256)[: len(index)]
    return kept


VECTORS = {
    "normal": normal(1000),
    "zeros": torch.zeros(100),
    "one": torch.ones(1),
    "none": torch.empty(0),
    "signs": in_signs(5000, 0.1),
    "all signs": normal(1003).sign(),
    "few": normal(1000).where(normal(1000) > 2, 0.0),
    "special": torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, -1e-45, 3.0, 3.0, -3.0]),
    "float64": normal(100).double(),
    "bfloat16": normal(100).bfloat16(),
}


@pytest.mark.parametrize("name", VECTORS)
def test_what_was_packed_comes_back_with_the_same_bits(name: str) -> None:
    x = VECTORS[name]
    found = unpacked(packed(x))
    assert found.dtype == x.dtype
    assert torch.equal(found.view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize(("density", "bits"), [(0.01, 0.1), (0.12, 0.76), (1.0, 1.05)])
def test_signs_take_what_they_take_in_the_packets_of_a_scheme(density: float, bits: float) -> None:
    n = 100_000
    x = normal(n).sign() if density == 1 else in_signs(n, density)
    assert 8 * nbytes_of(packed(x)) / n < bits


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5), nn.BatchNorm1d(5))


def learn(made: nn.Module, rank: int, step: int) -> None:
    for i, parameter in enumerate(made.parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=generator(i, f"learn {rank}", step))
        if (step + i) % 4 == 0:
            parameter.grad = None  # takes no part


def start(kind: str, comm: Comm) -> tuple[AdamWSteps | LocalTraining, list[torch.optim.Optimizer]]:
    made = network()
    matrices = [each for each in made.parameters() if each.dim() == 2]
    others = [each for each in made.parameters() if each.dim() != 2]
    scheme = TwoShot(0.1, values="sign", density_down=0.3)
    if kind == "muon":
        muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)
        optimizers = [muon, torch.optim.AdamW(others, lr=0.01)]
        return AdamWSteps(made, optimizers, scheme, comm=comm), optimizers
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01, weight_decay=0.1)
    if kind == "steps":
        return AdamWSteps(made, optimizer, scheme, comm=comm, bucket_mb=0.001), [optimizer]
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True) if "outer" in kind else None
    fragments = 2 if "outer" in kind else 1
    return LocalTraining(made, optimizer, scheme, comm=comm, every=2, outer=outer, fragments=fragments, keep=0.5), [
        optimizer
    ]


def train(method: AdamWSteps | LocalTraining, optimizers: list[torch.optim.Optimizer], rank: int, span: range) -> None:
    for step in span:
        for each in optimizers:
            for group in each.param_groups:
                group["lr"] *= 0.9
        learn(method.model, rank, step)
        if isinstance(method, LocalTraining):
            for each in optimizers:
                each.step()
        method.step()


def caught_up(comm: Comm, kind: str, made_steps: int) -> list[dict[str, Any]]:
    """Train, and have another handle catch up from step 6 to 11 on rank 0; return the states of both."""
    method, optimizers = start(kind, comm)
    train(method, optimizers, comm.rank, range(6))
    if comm.rank:
        train(method, optimizers, comm.rank, range(6, 11))
        return []
    state, journal = method.snapshot(), Journal(method, 1 << 30)
    train(method, optimizers, comm.rank, range(6, 11))
    assert not journal.broken

    def follows(alone: Comm) -> dict[str, Any]:
        other, its_optimizers = start(kind, alone)
        train(other, its_optimizers, 7, range(made_steps))
        other.restore(Snapshot(state.moved))
        first = [journal.moves.popleft() for _ in range(2)]
        for moves in (first, list(journal.moves)):
            other.restore(Snapshot(moves=list(map(unpacked_move, moves))))
        assert digest_of(other.snapshot()) == digest_of(method.snapshot())
        other.restore(Snapshot(shared=method.snapshot().shared))
        assert digest_of(other.snapshot()) == digest_of(method.snapshot())
        return common_of(other)

    (found,) = LocalWorld(1).run(follows)
    return [common_of(method), found]


def common_of(method: AdamWSteps | LocalTraining) -> dict[str, Any]:
    """Return what must be the same on all ranks."""
    moved, shared, *_ = method.snapshot()
    assert moved is not None and shared is not None
    moved = {**shared[method.integration], **moved}
    keys = ("common", "momentum", "applied", "outer", "common_buffers")
    return {"step": shared["step"], **{key: moved[key] for key in keys if key in moved}}


@pytest.mark.parametrize(
    ("kind", "made_steps"), [("steps", 0), ("steps", 3), ("muon", 3), ("local", 3), ("local, outer, fragments", 3)]
)
def test_a_rank_catches_up_to_the_bit_by_the_journal_of_another(kind: str, made_steps: int) -> None:
    (own, found), _ = LocalWorld(P).run(partial(caught_up, kind=kind, made_steps=made_steps))
    testing.assert_close(found, own, rtol=0.0, atol=0.0)


def test_a_journal_ends_when_a_copy_is_smaller() -> None:
    move = {"means": [normal(100)], "place": 0, "idle": [], "groups": []}
    handle: Any = SimpleNamespace(on_move=lambda _: None)
    journal = Journal(handle, nbytes_of(packed(normal(100))) + 1)
    journal.note(move)
    assert not journal.broken
    journal.note(move)
    assert journal.broken and not journal.moves


def ended(comm: Comm, how: str) -> bool:
    """Return whether a journal has ended after something else than a step has changed the common weights."""
    method, optimizers = start("steps", comm)
    train(method, optimizers, comm.rank, range(3))
    before, journal = method.snapshot(), Journal(method, 1 << 30)
    if how == "set":
        with torch.no_grad():
            next(iter(method.model.parameters())).fill_(1.0)
    elif how == "load":
        method.restore(before)
    train(method, optimizers, comm.rank, range(3, 4))
    return journal.broken


@pytest.mark.parametrize("how", ["nothing", "set", "load"])
def test_a_journal_ends_where_common_weights_change_by_anything_else(how: str) -> None:
    assert LocalWorld(P).run(partial(ended, how=how)) == [how != "nothing"] * P

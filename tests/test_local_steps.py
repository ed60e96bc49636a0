"""Local steps in one process: what is learnt is exchanged once, the common weights are the same bits, and nothing is lost on the way."""

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import sparsync
from helpers.quick import one_in
from sparsync import Bucket, Dense, LocalWorld, MiCRO, OkTopk, OuterSGD, Report, SkipReduce, State, TopK, TwoShot
from sparsync.base.scheme import Scheme
from sparsync.collectives.values import broadcast
from sparsync.comm.local import LocalComm
from sparsync.comm.metered import MeteredComm
from sparsync.core import Comm, spans
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.exchanges.weights import buckets_of, by_name, fragments_of
from sparsync.schemes import PerParameter

P = 4
SCHEMES: dict[str, Callable[[], Scheme]] = {
    "dense": Dense,
    "topk": lambda: TopK(0.25),
    "micro": lambda: MiCRO(0.25),
    "oktopk": lambda: OkTopk(0.25),
    "two_shot": lambda: TwoShot(0.25, values="float32"),
    "skip_reduce": lambda: SkipReduce(0.5, feedback=True),
    "per_parameter": lambda: PerParameter(TopK(0.25), {"*bias": Dense()}),
}


def model() -> nn.Sequential:
    """Two layers whose weights are whole numbers."""
    made = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    for i, parameter in enumerate(made.parameters()):
        parameter.data = (torch.arange(parameter.numel()) % 7 - i).to(parameter.dtype).view(parameter.shape)
    return made


def learn(made: nn.Module, rank: int, step: int) -> None:
    """Whole numbers as gradients, times 8 so that quarters and halves of them are whole; some parameters have none at some steps."""
    for i, parameter in enumerate(made.parameters()):
        generator = torch.Generator().manual_seed(1000 * rank + 10 * step + i)
        drawn = 8 * torch.randint(-8, 9, parameter.shape, generator=generator)
        parameter.grad = None if (step + rank + i) % 5 == 0 else drawn.to(parameter.dtype)


def total(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum(0)


def flat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().flatten().double() for each in values])


def common(steps: LocalTraining) -> Tensor:
    with steps.averaged():
        return flat(list(steps.model.parameters()))


def start(comm: Comm, scheme: Scheme, every: int, rate: float = 1.0, **settings: Any) -> LocalTraining:
    made = model()
    return LocalTraining(made, torch.optim.SGD(made.parameters(), lr=rate), scheme, every=every, comm=comm, **settings)


def train(steps: LocalTraining, span: range) -> list[Tensor]:
    """Train, and return the common weights after each step."""
    seen = []
    for step in span:
        learn(steps.model, steps.place[0], step)
        steps.optimizers[0].step()
        steps.step()
        seen.append(common(steps))
    return seen


def test_with_one_step_dense_and_sgd_it_is_data_parallel_sgd() -> None:
    def body(comm: LocalComm) -> tuple[Tensor, Tensor]:
        steps = start(comm, Dense(), every=1, rate=0.125)
        train(steps, range(6))
        reference = model()
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.125)
        for step in range(6):
            copies = [copy.deepcopy(reference) for _ in range(P)]
            for rank, each in enumerate(copies):
                learn(each, rank, step)
            for together in zip(reference.parameters(), *(each.parameters() for each in copies), strict=True):
                grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in together[1:]]
                together[0].grad = torch.stack(grads).sum(0) / P
            optimizer.step()
        return flat(list(steps.model.parameters())), flat(list(reference.parameters()))

    for ours, wanted in LocalWorld(P).run(body):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_divisor_that_does_not_conserve_still_gives_all_ranks_the_same_weights(keep: float) -> None:
    def body(comm: LocalComm) -> list[Tensor]:
        scheme = TwoShot(0.25, divide_by="contributors")
        return train(start(comm, scheme, every=2, keep=keep, bucket_mb=2e-4), range(6))

    ranks = LocalWorld(P).run(body)
    assert all(torch.equal(x, y) for rank in ranks for x, y in zip(rank, ranks[0], strict=True))
    assert not torch.equal(ranks[0][-1], flat(list(model().parameters())))


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", one_in(3, SCHEMES))
def test_what_was_learnt_is_in_the_common_weights_or_in_a_residual_and_own_weights_hold_their_share(
    name: str, keep: float
) -> None:
    def body(comm: LocalComm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scheme = SCHEMES[name]()
        steps = start(comm, scheme, every=2, keep=keep, bucket_mb=2e-4)
        before, learnt = common(steps), torch.zeros(83, dtype=torch.float64)
        for step in range(6):
            own = flat(list(steps.model.parameters()))
            learn(steps.model, comm.rank, step)
            steps.optimizers[0].step()
            learnt += own - flat(list(steps.model.parameters()))
            reports = steps.step()
            assert bool(reports) == (step % 2 == 1)
            assert all(report.sent == report.cost and report.step == step for report in reports)
        residual = steps.state.state_dict().get("residual", {})
        names = [name for name, _ in steps.model.named_parameters()]
        held = torch.cat(
            [
                residual.get(each, torch.zeros(p.numel()))
                for each, p in zip(names, steps.model.parameters(), strict=True)
            ]
        )
        shares = [steps.state.unsent(each.bucket(each.common, 0), comm) for each in steps._weights.buckets]
        share = torch.zeros(83) if None in shares else torch.cat([each for each in shares if each is not None])
        assert torch.equal(flat(list(steps.model.parameters())), common(steps) - keep * share.double())
        assert name == "two_shot" or torch.equal(share, held)
        return before, common(steps), learnt, held.double()

    ranks = LocalWorld(P).run(body)
    before, after = ranks[0][:2]
    assert all(torch.equal(rank[1], after) for rank in ranks)
    assert torch.equal(total(rank[2] for rank in ranks), P * (before - after) + total(rank[3] for rank in ranks))
    assert name == "dense" or any(rank[3].any() for rank in ranks)


@pytest.mark.parametrize("mixing", [None, 0.5])
def test_with_fragments_and_delay_nothing_is_lost_either_and_a_result_depends_on_step_numbers_only(
    mixing: float | None,
) -> None:
    def body(comm: LocalComm) -> tuple[list[Tensor], Tensor, Tensor, list[tuple[str, int]]]:
        scheme = TopK(0.25)
        steps = start(comm, scheme, every=4, keep=0.5, fragments=2, delay=3, mixing=mixing)
        learnt, seen, before = torch.zeros(83, dtype=torch.float64), [], common(steps)
        for step in range(12):
            own = flat(list(steps.model.parameters()))
            learn(steps.model, comm.rank, step)
            steps.optimizers[0].step()
            learnt += own - flat(list(steps.model.parameters()))
            steps.step()
            seen.append(common(steps))
        steps.flush()
        residual = torch.cat([steps.state.state_dict()["residual"][name] for name, _ in steps.model.named_parameters()])
        rest = learnt - residual.double()
        return [*seen, common(steps)], before, rest, [(report.key, report.step) for report in steps.reports()]

    ranks = LocalWorld(P).run(body)
    seen, before, _, reports = ranks[0]
    assert torch.equal(total(rank[2] for rank in ranks), P * (before - seen[-1]))
    for rank in ranks:
        assert all(map(torch.equal, rank[0], seen))
    # Sent after 2, 4, 6, ... steps in turn, and applied 3 steps later.
    changed = [
        step for step, (one, other) in enumerate(itertools.pairwise([before, *seen])) if not torch.equal(one, other)
    ]
    assert changed == [4, 6, 8, 10, 12]
    keys = ["0.float32/cpu/0", "1.float32/cpu/0"]
    assert reports == [(keys[i % 2], 2 * i + 1) for i in range(6)] + [(key, 11) for key in keys]


def test_a_delay_keeps_the_steps_made_meanwhile() -> None:
    def body(comm: LocalComm) -> list[float]:
        made = nn.Linear(1, 1, bias=False)
        made.weight.data.zero_()
        steps = LocalTraining(made, torch.optim.SGD(made.parameters(), 1.0), Dense(), every=2, delay=1, comm=comm)
        seen = []
        for _ in range(4):
            made.weight.grad = torch.full((1, 1), 4.0 * comm.rank)
            steps.optimizers[0].step()
            steps.step()
            seen.append(made.weight.item())
        return seen

    # Rank 1 learns -4 a step. At step 2 the mean of -8 and 0 is sent; at step 3 it replaces them, and what came since stays.
    assert LocalWorld(2).run(body) == [[0.0, 0.0, -4.0, -4.0], [-4.0, -8.0, -8.0, -12.0]]


def test_the_outer_optimizer_is_nesterov_on_the_mean_change() -> None:
    def body(comm: LocalComm) -> tuple[list[Tensor], list[Tensor]]:
        steps = start(comm, Dense(), every=2, outer=OuterSGD(rate=0.5, momentum=0.5))
        weights, velocity, wanted = common(steps), torch.zeros(83, dtype=torch.float64), []
        changes = [model() for _ in range(P)]
        for step in range(8):
            for rank, each in enumerate(changes):
                if step % 2 == 0:
                    nn.utils.vector_to_parameters(weights.float(), each.parameters())
                learn(each, rank, step)
                torch.optim.SGD(each.parameters(), lr=1.0).step()
            if step % 2 == 1:
                mean = total(weights - flat(list(each.parameters())) for each in changes) / P
                velocity = 0.5 * velocity + mean
                weights = weights - 0.5 * (mean + 0.5 * velocity)
            wanted.append(weights)
        return train(steps, range(8)), wanted

    for ours, wanted in LocalWorld(P).run(body):
        assert all(map(torch.equal, ours, wanted))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"outer": OuterSGD()},
    "delayed": {"fragments": 2, "delay": 2, "clip_factor": "measured"},
    "mixed": {"fragments": 3, "delay": 3, "mixing": 0.25, "outer": OuterSGD(), "keep": 1.0},
}


def adam(comm: Comm, settings: dict[str, Any], **more: Any) -> LocalTraining:
    torch.manual_seed(comm.rank)
    made = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return LocalTraining(made, torch.optim.AdamW(made.parameters()), TopK(0.25), every=3, comm=comm, **settings, **more)


def fit(steps: LocalTraining, span: range) -> None:
    for step in span:
        generator = torch.Generator().manual_seed(100 * step + steps.place[0])
        steps.model(torch.randn(8, 6, generator=generator)).square().sum().backward()
        steps.clip_grad_norm_(1.0)
        steps.optimizers[0].step()
        steps.optimizers[0].zero_grad()
        steps.step()


def held(steps: LocalTraining) -> list[Tensor]:
    return [*(each.detach().clone() for each in (*steps.model.parameters(), *steps.model.buffers())), common(steps)]


@pytest.mark.parametrize("name", one_in(2, SETTINGS))
def test_a_resumed_run_has_the_same_bits_at_any_step(name: str, tmp_path: Path) -> None:
    def whole(comm: LocalComm) -> list[Tensor]:
        steps = adam(comm, SETTINGS[name])
        fit(steps, range(9))
        return held(steps)

    def broken(comm: LocalComm, at: int) -> list[Tensor]:
        before = adam(comm, SETTINGS[name])
        fit(before, range(at))
        sparsync.checkpoint.save(before, tmp_path / str(at))
        comm.all_gather(torch.zeros(1))
        after = adam(comm, SETTINGS[name])
        sparsync.checkpoint.load(after, tmp_path / str(at))
        fit(after, range(at, 9))
        return held(after)

    wanted = LocalWorld(2).run(whole)
    for at in (3, 4, 5):
        for ours, theirs in zip(LocalWorld(2).run(partial(broken, at=at)), wanted, strict=True):
            assert all(map(torch.equal, ours, theirs)), at
    assert torch.equal(wanted[0][-1], wanted[1][-1])


@pytest.mark.parametrize("settings", [{}, {"fragments": 2, "delay": 3}])
@pytest.mark.parametrize("at", [3, 5])
def test_with_another_number_of_ranks_nothing_of_residuals_or_of_what_was_learnt_is_lost(
    at: int, settings: dict[str, Any]
) -> None:
    def save(comm: LocalComm) -> tuple[dict[str, Any], Tensor]:
        steps = start(comm, TopK(0.25), every=4, **settings)
        learnt = torch.zeros(83, dtype=torch.float64)
        for step in range(at):
            own = flat(list(steps.model.parameters()))
            learn(steps.model, comm.rank, step)
            steps.optimizers[0].step()
            learnt += own - flat(list(steps.model.parameters()))
            steps.step()
        return steps.state_dict(), learnt

    saved = LocalWorld(4).run(save)
    states = [state for state, _ in saved]

    def load(comm: LocalComm) -> tuple[Tensor, Tensor, Tensor]:
        scheme = TopK(0.25)
        steps = start(comm, scheme, every=4, **settings)
        steps.load_state_dict(steps.resized(states))
        for exchange in list(steps._exchanger.pending):  # what was on its way is applied as it would have been
            steps._finish(exchange)
        steps._note_written()
        residual = torch.cat(
            [
                steps.state.state_dict()["residual"].get(name, torch.zeros(each.numel())).double()
                for name, each in steps.model.named_parameters()
            ]
        )
        loaded, own = common(steps), flat(list(steps.model.parameters()))
        train(steps, range(at, at + 8))
        return loaded, own - loaded + 0.5 * residual, residual

    ranks = LocalWorld(2).run(load)
    before = flat(list(model().parameters()))
    learnt = total(each for _, each in saved)
    for common_weights, own, _ in ranks:
        assert torch.equal(common_weights, ranks[0][0])
        assert not own.any()
    assert torch.equal(4 * (before - ranks[0][0]) + 2 * total(rank[2] for rank in ranks), learnt)  # the mean stays


def poisoned(comm: LocalComm, settings: dict[str, Any]) -> list[Tensor]:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    steps = LocalTraining(made, optimizer, TopK(0.25), every=2, comm=comm, **settings)
    seen = []
    for step in range(12):
        learn(made, comm.rank, step)
        if comm.rank == 1 and step == 4:
            for each in made.parameters():
                each.grad = torch.full_like(each, torch.nan)
        optimizer.step()
        steps.step()
        seen.append(common(steps))
    assert flat(list(made.parameters())).isfinite().all()
    stats = steps.stats()
    assert (stats["steps"], stats["exchanges"], stats["dropped"]) == ((12, 9, 2) if settings else (12, 5, 1))
    assert any(report.details["overflow"] for report in steps.reports())
    return seen


@pytest.mark.parametrize("settings", [{}, {"fragments": 2, "delay": 1}])
def test_nan_on_one_rank_drops_the_exchange_on_all_and_training_goes_on(settings: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=r"was dropped, the weights of ranks \[1\] hold NaN or Inf"):
        ranks = LocalWorld(3).run(partial(poisoned, settings=settings))
    for seen in zip(*ranks, strict=True):
        assert all(torch.equal(each, seen[0]) for each in seen)
        assert seen[0].isfinite().all()
    seen = ranks[0]
    if not settings:
        assert torch.equal(seen[4], seen[5])
        assert torch.equal(seen[4], seen[6])
    assert not torch.equal(seen[-1], seen[6])


def test_a_mean_that_overflows_is_dropped_too_and_what_a_residual_scheme_had_sent_is_in_its_residual_again() -> None:
    def body(comm: LocalComm) -> tuple[Tensor, Tensor]:
        made = nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(4)})
        scheme = PerParameter(TopK(0.5), {"b": Dense(wire="float16")})
        steps = LocalTraining(made, torch.optim.SGD(made.parameters(), 1.0), scheme, every=1, comm=comm, keep=0.0)
        made["a"].grad, made["b"].grad = torch.arange(4.0), torch.full((4,), 1e6)
        steps.optimizers[0].step()
        steps.step()
        assert not flat([made["a"], made["b"]]).any()
        return steps.state.state_dict()["residual"]["a"], common(steps)

    with pytest.warns(UserWarning, match="the mean over ranks holds NaN or Inf"):
        ranks = LocalWorld(2).run(body)
    assert torch.equal(ranks[0][0] + ranks[1][0], 2 * torch.arange(4.0))
    assert not ranks[0][1].any()


def test_a_step_that_a_loss_scaler_skips_on_one_rank_counts_there_too() -> None:
    def body(comm: LocalComm) -> float:
        made = nn.Linear(1, 1, bias=False)
        made.weight.data.zero_()
        optimizer, scaler = torch.optim.SGD(made.parameters(), 1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
        steps = LocalTraining(made, optimizer, Dense(), every=2, comm=comm)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(made(torch.ones(1, 1)) * (torch.inf if step == 1 and comm.rank == 1 else 1.0)).sum().backward()
            scaler.step(optimizer)
            scaler.update()
            steps.step()
        return made.weight.item()

    assert LocalWorld(2).run(body) == [-3.5, -3.5]


def test_weights_of_all_types_frozen_shared_and_in_any_memory_format() -> None:
    def body(comm: LocalComm) -> list[Tensor]:
        convolution = nn.Conv2d(2, 3, 3)
        convolution.weight.data = convolution.weight.data.contiguous(memory_format=torch.channels_last)
        made = nn.ModuleList(
            [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(3, 2).bfloat16(), nn.Linear(3, 2).double(), convolution]
        )
        made[1].weight = made[0].weight
        frozen = made[1].bias
        assert isinstance(frozen, nn.Parameter)
        frozen.requires_grad_(False)
        with torch.no_grad():
            for each in made.parameters():
                each.fill_(1.0 + comm.rank)  # rank 0's are copied to all
        trained = [each for each in made.parameters() if each.requires_grad]
        steps = LocalTraining(made, torch.optim.SGD(trained, 1.0), Dense(), every=1, comm=comm)
        assert all(bool((each == 1).all()) for each in made.parameters())
        reports = []
        for step in range(3):
            learn(made, comm.rank, step)
            steps.optimizers[0].step()
            reports = steps.step()
        assert [report.key for report in reports] == ["float32/cpu/0", "float64/cpu/0"]
        assert torch.equal(frozen, torch.ones(4))
        assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
        return list(made.state_dict().values())

    first, second = LocalWorld(2).run(body)
    assert all(map(torch.equal, first, second))


@pytest.mark.slow
def test_common_weights_are_exact_where_own_ones_are_rounded_to_16_bits() -> None:
    def body(comm: LocalComm) -> tuple[float, float]:
        made = nn.Linear(1, 1, bias=False).bfloat16()
        made.weight.data.fill_(0.0)
        steps = LocalTraining(made, torch.optim.SGD(made.parameters(), 1.0), Dense(), every=1, comm=comm)
        for _ in range(300):  # bfloat16 has 8 bits: 256 + 1 is 256
            made.weight.data.zero_()  # the own weight as a small one would be, so that the change itself does not round
            steps._weights.buckets[0].start = torch.zeros(1)
            steps._weights.note_written()
            made.weight.grad = torch.full((1, 1), -1.0 - comm.rank).bfloat16()
            steps.optimizers[0].step()
            steps.step()
        return float(steps._weights.buckets[0].common), made.weight.item()

    assert LocalWorld(2).run(body) == [(450.0, 450.0)] * 2


class Counting(nn.Module):
    """A model with a floating and a counting buffer."""

    mean: Tensor
    count: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.full((3,), 4.0 * rank))
        self.register_buffer("count", torch.tensor(rank))


@pytest.mark.parametrize(("how", "wanted"), [("broadcast", (1.0, 1)), ("mean", (3.0, 1)), ("own", None)])
def test_buffers_are_exchanged_with_the_weights_and_own_ones_are_back_after_an_evaluation(
    how: Any, wanted: tuple[float, int] | None
) -> None:
    def body(comm: LocalComm) -> None:
        made = Counting(comm.rank)
        steps = LocalTraining(made, torch.optim.SGD(made.parameters(), 1.0), Dense(), every=2, buffers=how, comm=comm)
        assert (made.mean[0].item(), made.count.item()) == (0.0, 0)
        made.mean.fill_(1.0 + 4 * comm.rank)
        made.count.fill_(1 + comm.rank)
        steps.step()
        reports = steps.step()
        assert reports[0].sent == reports[0].cost
        expected = (1.0 + 4 * comm.rank, 1 + comm.rank) if wanted is None else wanted
        assert (made.mean[2].item(), made.count.item()) == expected
        made.mean.fill_(9.0)
        made.weight.grad = torch.full((2,), -7.0)
        steps.optimizers[0].step()
        with steps.averaged():
            assert (made.mean[2].item(), made.weight[0].item()) == (9.0 if wanted is None else wanted[0], 0.0)
            with pytest.raises(RuntimeError, match="leave `with handle"):
                steps.step()
            with pytest.raises(RuntimeError, match="leave `with handle"):
                steps.state_dict()
        assert (made.mean[2].item(), made.weight[0].item()) == (9.0, 7.0)

    LocalWorld(2).run(body)


class Masked(nn.Module):
    """A model with a causal mask and a mean as buffers."""

    mask: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("mean", torch.zeros(3))


@pytest.mark.parametrize("how", ["broadcast", "mean", "own"])
@pytest.mark.filterwarnings("error")
def test_a_buffer_that_was_not_finite_when_training_began_is_no_fault(how: Any) -> None:
    def body(comm: LocalComm) -> None:
        made = Masked()
        mask = made.mask.clone()
        steps = LocalTraining(made, torch.optim.SGD(made.parameters(), 1.0), Dense(), every=2, buffers=how, comm=comm)
        for _ in range(4):
            made.weight.grad = torch.full((2,), -1.0)
            steps.optimizers[0].step()
            steps.step()
        assert made.weight.tolist() == [4.0, 4.0]
        assert (steps.stats()["exchanges"], steps.stats()["dropped"]) == (2, 0)
        assert torch.equal(made.mask, mask)

    LocalWorld(2).run(body)


def test_a_buffer_that_comes_to_hold_nan_is_named_as_such_and_becomes_the_common_one_again() -> None:
    def body(comm: LocalComm) -> list[float]:
        made = Masked()
        steps = LocalTraining(made, torch.optim.SGD(made.parameters(), 1.0), Dense(), every=1, comm=comm)
        made.mean.fill_(torch.nan if comm.rank == 1 else 2.0)
        steps.step()
        return made.mean.tolist()

    with pytest.warns(UserWarning, match=r"was dropped, the buffers of ranks \[1\] hold NaN or Inf"):
        assert LocalWorld(2).run(body) == [[2.0] * 3, [0.0] * 3]


@pytest.mark.filterwarnings("ignore:the exchange before step")
@pytest.mark.parametrize("settings", [{}, {"fragments": 2, "delay": 1}])
def test_after_five_drops_in_a_row_all_ranks_raise(settings: dict[str, Any]) -> None:
    def body(comm: LocalComm) -> int:
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), 1.0)
        steps = LocalTraining(made, optimizer, TopK(0.25), every=2, comm=comm, **settings)
        for step in range(20):
            learn(made, comm.rank, step)
            weight = made.get_parameter("0.weight")
            if comm.rank == 1 and step not in (2, 3):
                weight.grad = torch.full_like(weight, torch.nan)
            optimizer.step()
            try:
                steps.step()
            except RuntimeError as error:
                assert "the last 5 exchanges were dropped" in str(error)
                assert "the weights of ranks [1] hold NaN or Inf" in str(error)
                return step
        return -1

    first, second = LocalWorld(2).run(body)
    assert first == second
    assert first in ((13,) if not settings else (13, 14))


def still(comm: LocalComm, settings: dict[str, Any], resumed_at: int = -1) -> list[Tensor]:
    """Train 16 steps of AdamW; from the 6th to the 11th the first weight is frozen, and the last bias has no gradient on any rank.

    Return own and common weights after each step.
    """

    def made() -> LocalTraining:
        torch.manual_seed(0)
        built = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(built.parameters())
        return LocalTraining(built, optimizer, TwoShot(0.25, values="sign"), every=2, comm=comm, **settings)

    steps, seen, held = made(), [], {}
    for step in range(16):
        if step == resumed_at:
            before, steps = steps, made()
            steps.load_state_dict(before.state_dict())
        frozen, unused = steps.model.get_parameter("0.weight"), steps.model.get_parameter("1.bias")
        idle = step in range(6, 12)
        frozen.requires_grad_(not idle)
        learn(steps.model, comm.rank, step)
        if idle:
            frozen.grad = unused.grad = None
        steps.optimizers[0].step()
        steps.step()
        seen += [flat(list(steps.model.parameters())), common(steps)]
        residual = steps.state_dict()["scheme"]["residual"]
        held[step] = [residual.get(each, torch.zeros(0)) for each in ("0.weight", "1.bias")]
    # The exchange at step 8 is the first that finds nothing changed, and with a delay the one of step 6 is applied at step 8.
    for step in (9, 10, 11):
        for one, other in ((seen[16], seen[2 * step]), (seen[17], seen[2 * step + 1])):
            assert torch.equal(one[:48], other[:48])
            assert torch.equal(one[-3:], other[-3:])
        assert all(map(torch.equal, held[8], held[step]))
    assert not torch.equal(seen[17], seen[23])
    assert not torch.equal(seen[-1][:48], seen[17][:48])
    return seen


@pytest.mark.parametrize("settings", [{}, {"outer": OuterSGD()}, {"fragments": 2, "delay": 1}])
def test_what_is_frozen_or_changed_on_no_rank_stays_where_it_is_and_what_is_unsent_of_it_waits(
    settings: dict[str, Any],
) -> None:
    ranks = LocalWorld(2).run(partial(still, settings=settings))
    assert all(map(torch.equal, ranks[0][1::2], ranks[1][1::2]))
    if "delay" in settings:
        for ours, wanted in zip(LocalWorld(2).run(partial(still, settings=settings, resumed_at=9)), ranks, strict=True):
            assert all(map(torch.equal, ours, wanted))


def test_a_parameter_that_is_frozen_on_some_ranks_only_is_an_error_that_names_it() -> None:
    def body(comm: LocalComm) -> None:
        steps = start(comm, Dense(), every=1)
        steps.model.get_parameter("1.weight").requires_grad_(comm.rank != 2)
        with pytest.raises(RuntimeError, match=r"1\.weight is frozen on ranks \[2\] and trained on the others"):
            steps.step()

    LocalWorld(3).run(body)


@pytest.mark.parametrize("settings", [{}, {"outer": OuterSGD()}, {"fragments": 2, "delay": 1}])
def test_weights_that_are_loaded_after_local_steps_were_made_are_no_change_that_was_learnt(
    settings: dict[str, Any],
) -> None:
    loaded = {name: 2.0 * each + 1.0 for name, each in model().state_dict().items()}

    def body(comm: LocalComm, late: bool) -> list[Tensor]:
        made = model()
        if not late:
            made.load_state_dict(loaded)
        steps = LocalTraining(made, torch.optim.SGD(made.parameters(), 1.0), TopK(0.25), every=2, comm=comm, **settings)
        if late:
            made.load_state_dict(loaded)
        return [*train(steps, range(6)), flat(list(made.parameters()))]

    wanted, found = (LocalWorld(2).run(partial(body, late=late)) for late in (False, True))
    for one, other in zip(wanted, found, strict=True):
        assert all(map(torch.equal, one, other))


def test_buffers_of_a_model_that_is_loaded_are_evaluated_with_its_weights() -> None:
    def body(comm: LocalComm) -> None:
        made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        steps = LocalTraining(made, torch.optim.SGD(made.parameters(), 1.0), Dense(), every=2, comm=comm)
        loaded = {name: each + 2 for name, each in made.state_dict().items()}
        made.load_state_dict(loaded)
        with steps.averaged():
            assert all(torch.equal(each, loaded[name]) for name, each in made.state_dict().items())

    LocalWorld(2).run(body)


class Wrapper(torch.optim.Optimizer):
    """An Optimizer by name only, as Accelerate's is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.param_groups

    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.optimizer.step()


class TwoPhase(torch.optim.SGD):
    """Steps by another name than `step`, by an optimizer inside it, as SAM does."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, 1.0)
        self.base_optimizer = torch.optim.SGD(self.param_groups, 1.0)

    def second_step(self) -> None:
        self.base_optimizer.step()


@pytest.mark.parametrize("how", ["wrapped", "inside", pytest.param("compiled", marks=pytest.mark.slow)])
def test_what_an_optimizer_inside_another_one_or_a_compiled_step_has_changed_was_learnt(how: str) -> None:
    def body(comm: LocalComm, how: str) -> tuple[set[str], Tensor]:
        made = model()
        sgd, two_phase = torch.optim.SGD(made.parameters(), 1.0), TwoPhase(made.parameters())
        optimizer = {"wrapped": Wrapper(sgd), "inside": two_phase}.get(how, sgd)

        @torch.compile(backend="eager")
        def compiled() -> None:
            sgd.step()

        take = {"wrapped": optimizer.step, "inside": two_phase.second_step, "compiled": compiled}.get(how, sgd.step)
        steps = LocalTraining(made, optimizer, Dense(), every=2, comm=comm)
        seen = set[str]()
        for step in range(4):
            learn(made, comm.rank, step)
            take()
            steps.step()
            seen |= steps._adopted
        return seen, common(steps)

    P = 1 if how == "compiled" else 2
    wanted, found = (LocalWorld(P).run(partial(body, how=each)) for each in ("plain", how))
    for (_, weights), (adopted, others) in zip(wanted, found, strict=True):
        assert not adopted and torch.equal(weights, others)


@pytest.mark.parametrize("settings", [{}, {"fragments": 2, "delay": 2}])
def test_a_layer_that_is_loaded_in_training_is_the_common_one_and_steps_before_and_after_it_are_kept(
    settings: dict[str, Any],
) -> None:
    def body(comm: LocalComm) -> tuple[Tensor, Tensor]:
        steps = start(comm, Dense(), every=2, **settings)
        train(steps, range(3))
        bias = steps.model.get_parameter("1.bias")
        with torch.no_grad():
            bias.fill_(64.0)
        learnt = torch.zeros(3, dtype=torch.float64)
        for exchange in (
            steps._exchanger.pending.values()
        ):  # what was learnt before and is on its way comes, as what is in a residual does
            for bucket, mean in zip(exchange.buckets, exchange.changes, strict=True):
                learnt += by_name([bucket], [mean.grad]).get("1.bias", torch.zeros(3))
        for step in range(3, 8):
            learn(steps.model, comm.rank, step)
            bias.grad = torch.full((3,), 8.0 * comm.rank)
            learnt += bias.grad
            steps.optimizers[0].step()
            steps.step()
        steps.flush()
        return common(steps)[-3:], learnt

    ranks = LocalWorld(2).run(body)
    for found, _ in ranks:
        assert torch.equal(found, 64.0 - total(learnt for _, learnt in ranks) / 2)


def test_the_own_gradient_is_clipped_at_the_factor_times_the_norm() -> None:
    def body(comm: LocalComm) -> None:
        for given, wanted in ((None, 2.0), (1.5, 1.5)):
            made = nn.Linear(1, 1, bias=False)
            steps = LocalTraining(
                made, torch.optim.SGD(made.parameters(), 1.0), Dense(), every=1, comm=comm, clip_factor=given
            )
            made.weight.grad = torch.full((1, 1), 8.0)
            assert steps.clip_grad_norm_(1.0) == 8.0
            assert made.weight.grad.item() == pytest.approx(wanted)

    LocalWorld(4).run(body)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_measured_factor_is_1_for_alike_gradients_2_for_the_noise_of_4_ranks_and_between_for_a_mixture(
    share: float,
) -> None:
    """A gradient of length 1 on each rank, of which `share` is noise: the mean's square norm is 1 - share + share / P."""

    def body(comm: LocalComm) -> float:
        made = nn.Linear(40, 50)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
        steps = LocalTraining(made, optimizer, Dense(), every=2, comm=comm, clip_factor="measured")
        assert steps.clip_factor == 2.0
        for step in range(60):
            for i, each in enumerate(made.parameters()):
                alike = torch.randn(each.shape, generator=torch.Generator().manual_seed(2 * step + i))
                own = torch.randn(
                    each.shape, generator=torch.Generator().manual_seed(1000 * (comm.rank + 1) + 2 * step + i)
                )
                each.grad = (1 - share) ** 0.5 * alike + share**0.5 * own
            steps.clip_grad_norm_(1e9)
            reports = steps.step()
            assert all(report.sent == report.cost for report in reports)
        steps.close()
        again = LocalTraining(made, optimizer, Dense(), every=2, comm=comm, clip_factor="measured")
        again.load_state_dict(steps.state_dict())
        assert again.clip_factor == steps.clip_factor == again.stats()["clip_factor"]
        return steps.clip_factor

    factors = LocalWorld(4).run(body)
    assert len(set(factors)) == 1
    assert factors[0] == pytest.approx((1 - share + share / 4) ** -0.5, rel=0.12)
    assert share > 0.0 or factors[0] == 1.0


def test_what_cannot_be_trained_by_local_steps_is_refused() -> None:
    def make(comm: Comm, made: nn.Module | None = None, **settings: Any) -> LocalTraining:
        made = nn.Linear(2, 2) if made is None else made
        return LocalTraining(
            made, torch.optim.SGD(made.parameters(), 1.0), Dense(), **{"every": 4, **settings}, comm=comm
        )

    def body(comm: LocalComm) -> None:
        cases: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"made": nn.Linear(2, 2).requires_grad_(False)}, ValueError, "nothing to exchange"),
            ({"every": 0}, ValueError, "every must be at least 1"),
            ({"keep": 1.5}, ValueError, r"keep must be in \[0, 1\]"),
            ({"fragments": 5}, ValueError, "fragments must be in .1, every=4"),
            ({"fragments": 3}, ValueError, "number of trained parameters, got 3"),
            ({"delay": 5}, ValueError, "delay must be in"),
            ({"mixing": 1.0}, ValueError, "mixing must be in"),
            ({"clip_factor": 0.0}, ValueError, "clip_factor must be above 0, 'measured' or None"),
            ({"bucket_mb": 0}, ValueError, "bucket_mb must be above 0"),
        ]
        for settings, kind, message in cases:
            with pytest.raises(kind, match=message):
                make(comm, **settings)
        made = nn.Linear(2, 2)
        made.bias.requires_grad_(False)
        steps = make(comm, made, every=1)
        made.bias.requires_grad_(True)
        with pytest.raises(RuntimeError, match="bias was frozen or missing when the model was attached"):
            steps.step()

    LocalWorld(1).run(body)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("every", r"LocalSteps\(every="),
        ("scheme", r"TopK\(density="),
        ("outer", r"SGD\(lr=0.\d\)"),
        ("model", "a model of . parameters"),
        ("rate", r"lr=\d.0 in parameter group 0 of SGD"),
    ],
)
def test_ranks_with_other_settings_are_found_before_anything_is_sent(setting: str, named: str) -> None:
    def body(comm: LocalComm) -> None:
        given: dict[str, Any] = {"every": 4, "scheme": TopK(0.5), "outer": OuterSGD(), "model": nn.Linear(2, 2)}
        if comm.rank == 1:
            other = {"every": 5, "scheme": TopK(0.25), "outer": OuterSGD(0.5), "model": nn.Linear(2, 2, bias=False)}
            given |= {setting: {**other, "rate": 2.0}[setting]}
        made, scheme = given.pop("model"), given.pop("scheme")
        LocalTraining(made, torch.optim.SGD(made.parameters(), given.pop("rate", 1.0)), scheme, **given, comm=comm)

    with pytest.raises(RuntimeError, match="ranks must agree, but rank . has " + named):
        LocalWorld(2).run(body)


def test_ranks_that_have_made_other_numbers_of_steps_are_told_so() -> None:
    def body(comm: LocalComm) -> None:
        steps = start(comm, Dense(), every=2)
        steps._step += 2 * comm.rank
        steps.step()
        steps.step()

    with pytest.raises(
        RuntimeError,
        match="ranks are at different steps: rank 0 exchanges at step 1 after 0 exchanges, rank 1 at step 3",
    ):
        LocalWorld(2).run(body)


def test_a_state_of_another_model_or_other_fragments_changes_nothing() -> None:
    def body(comm: LocalComm) -> None:
        steps = start(comm, TopK(0.25), every=2, fragments=2, delay=2)
        train(steps, range(3))
        state = steps.state_dict()
        for other, message in (
            (start(comm, TopK(0.25), every=2), "this state was saved with 2 fragments"),
            (start(comm, TopK(0.25), every=2, fragments=2, outer=OuterSGD()), "has an outer optimizer, but not both"),
        ):
            before = flat(list(other.model.parameters()))
            with pytest.raises(ValueError, match=message):
                other.load_state_dict(state)
            assert torch.equal(flat(list(other.model.parameters())), before)
        made = nn.Linear(2, 2)
        small = LocalTraining(
            made, torch.optim.SGD(made.parameters(), 1.0), TopK(0.25), every=2, comm=comm, fragments=2
        )
        with pytest.raises(ValueError, match=r"it has a parameter '0.weight', which this model has not"):
            small.load_state_dict(state)

    LocalWorld(1).run(body)


def test_fragments_hold_about_equally_many_elements_and_none_is_empty() -> None:
    for sizes, wanted in (
        ([1, 1, 100], [1, 1, 1]),
        ([100, 1, 1], [1, 1, 1]),
        ([5] * 7, [2, 3, 2]),
        ([3, 50, 4, 1, 30], [2, 2, 1]),
        ([1] * 6 + [6], [6, 1]),
    ):
        parameters = {str(i): nn.Parameter(torch.zeros(size)) for i, size in enumerate(sizes)}
        dealt = fragments_of(parameters, len(wanted))
        assert [len(part) for part in dealt] == wanted
        assert [name for part in dealt for name in part] == list(parameters)


def test_buckets_hold_at_most_so_many_megabytes_and_one_kind_of_sums() -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    parameters = {str(i): nn.Parameter(torch.zeros(100 * (i + 1), dtype=kind)) for i, kind in enumerate(kinds)}
    found = {each.key: list(each.parameters) for each in buckets_of(parameters, 1600 / 2**20)}
    assert found == {"float32/cpu/0": ["0", "1"], "float32/cpu/1": ["3"], "float64/cpu/0": ["2"]}
    with FakeTensorMode():  # of two devices, whose numbers differ between ranks
        parameters = {str(i): nn.Parameter(torch.empty(2, device=f"cuda:{2 + i % 2}")) for i in range(3)}
        found = {each.key: list(each.parameters) for each in buckets_of(parameters, 1, shared=True)}
    assert found == {"float32/cuda/0": ["0", "2"], "float32/cuda/1": ["1"]}


@pytest.mark.parametrize("n", [0, 1, 3, 8])
def test_a_broadcast_brings_rank_0s_tensor_to_all_ranks_and_counts_its_bytes(n: int) -> None:
    def body(comm: LocalComm) -> Tensor:
        metered = MeteredComm(comm)
        received = broadcast(torch.arange(n) + 10 * comm.rank, metered)
        chunks = [8 * len(span) for span in spans(n, 3)]
        scattered = sum(chunks[1:]) if comm.rank == 0 else 0
        assert metered.take()[0].nbytes == scattered + 2 * chunks[comm.rank]
        return received

    assert all(torch.equal(each, torch.arange(n)) for each in LocalWorld(3).run(body))


class Plain(Scheme):
    """A scheme that says nothing of what it holds back."""

    name = "plain"

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        return Dense().reduce(state, bucket, comm)


def test_a_scheme_that_holds_nothing_back_keeps_nothing() -> None:
    def body(comm: LocalComm) -> None:
        assert Plain().start().unsent(Bucket("b", torch.ones(2), 0), comm) is None
        steps = start(comm, Plain(), every=1, keep=1.0)
        assert torch.equal(train(steps, range(3))[-1], flat(list(steps.model.parameters())))

    LocalWorld(2).run(body)

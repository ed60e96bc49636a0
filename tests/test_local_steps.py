"""Local steps in one process: what is learnt is exchanged once, the common weights are the same bits, and nothing is lost on the way."""

import copy
import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.quick import one_in
from sparsync import OuterSGD
from sparsync.base.scheme import Scheme
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.core import Comm
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.exchanges.weights import buckets_of, fragments_of
from sparsync.schemes import Dense, TopK, TwoShot
from test_adamw_steps import SCHEMES

P = 4


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


def waiting(steps: LocalTraining) -> Tensor:
    """The residual of all parameters, in order."""
    kept = steps.state.state_dict().get("residual", {})
    return torch.cat([kept.get(name, torch.zeros(each.numel())) for name, each in steps.model.named_parameters()])


def start(comm: Comm, scheme: Scheme, every: int, rate: float = 1.0, **settings: Any) -> LocalTraining:
    made = model()
    return LocalTraining(made, torch.optim.SGD(made.parameters(), lr=rate), scheme, every=every, comm=comm, **settings)


def adam(rank: int, comm: Comm | None = None, **settings: Any) -> LocalTraining:
    """Begin with other weights on each rank, which has buffers too; without `comm` ranks are processes."""
    torch.manual_seed(rank)
    made = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    adamw = torch.optim.AdamW(made.parameters())
    return LocalTraining(made, adamw, TopK(0.25), comm=comm, timeout_s=120.0, **{"every": 3, **settings})


def fit(steps: LocalTraining, span: range) -> list[Tensor]:
    for step in span:
        generator = torch.Generator().manual_seed(100 * step + steps.place[0])
        steps.model(torch.randn(8, 6, generator=generator)).square().sum().backward()
        steps.clip_grad_norm_(1.0)
        steps.optimizers[0].step()
        steps.optimizers[0].zero_grad()
        steps.step()
    return [each.detach().clone() for each in (*steps.model.parameters(), *steps.model.buffers())]


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


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", one_in(3, (name for name in SCHEMES if name != "sign")))  # whose scales round
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
        held = waiting(steps)
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
        rest = learnt - waiting(steps).double()
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
    "delayed": {"fragments": 2, "delay": 2},
    "mixed": {"fragments": 3, "delay": 3, "mixing": 0.25, "outer": OuterSGD(), "keep": 1.0},
}


def held(steps: LocalTraining) -> list[Tensor]:
    return [*(each.detach().clone() for each in (*steps.model.parameters(), *steps.model.buffers())), common(steps)]


class Counting(nn.Module):
    """A model with a floating and a counting buffer."""

    mean: Tensor
    count: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.full((3,), 4.0 * rank))
        self.register_buffer("count", torch.tensor(rank))


def test_buffers_are_exchanged_with_the_weights_and_own_ones_are_back_after_an_evaluation() -> None:
    def body(comm: LocalComm) -> None:
        made = Counting(comm.rank)
        steps = LocalTraining(made, torch.optim.SGD(made.parameters(), 1.0), Dense(), every=2, comm=comm)
        assert (made.mean[0].item(), made.count.item()) == (0.0, 0)
        made.mean.fill_(1.0 + 4 * comm.rank)
        made.count.fill_(1 + comm.rank)
        steps.step()
        reports = steps.step()
        assert reports[0].sent == reports[0].cost
        assert (made.mean[2].item(), made.count.item()) == (1.0, 1)
        made.mean.fill_(9.0)
        made.weight.grad = torch.full((2,), -7.0)
        steps.optimizers[0].step()
        with steps.averaged():
            assert (made.mean[2].item(), made.weight[0].item()) == (1.0, 0.0)
            with pytest.raises(RuntimeError, match="leave `with handle"):
                steps.step()
            with pytest.raises(RuntimeError, match="leave `with handle"):
                steps.state_dict()
        assert (made.mean[2].item(), made.weight[0].item()) == (9.0, 7.0)

    LocalWorld(2).run(body)


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


def test_ranks_that_have_made_other_numbers_of_steps_are_told_so() -> None:
    def body(comm: LocalComm) -> None:
        steps = start(comm, Dense(), every=2)
        steps._step += 2 * comm.rank
        steps.step()
        steps.step()

    with pytest.raises(
        RuntimeError,
        match=r"ranks are at different steps: rank . exchanges at step . after 0 exchanges, rank . at step",
    ):
        LocalWorld(2).run(body)


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

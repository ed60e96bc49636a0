"""Steps of which every element is sent: made, encoded and applied in single passes, and skipped on a device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer

from helpers.quick import one_in
from sparsync import AdamWSteps, Scheme
from sparsync.collectives.values import quantized_all_reduce_
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.core import Arriving
from sparsync.exchanges import adamw_steps
from sparsync.kernels import operations as kernels
from sparsync.schemes import State, TwoShot
from sparsync.schemes.in_turn import InTurn
from sparsync.wire import ValueCodec

P = 3


def started(comm: LocalComm, scheme: Scheme, keep: float = 0.0, muon: bool = False, **given: Any) -> AdamWSteps:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 23), nn.ReLU(), nn.Linear(23, 5))
    matrices = [each for each in model.parameters() if muon and each.dim() == 2]
    others = [each for each in model.parameters() if all(each is not other for other in matrices)]
    optimizer: list[Optimizer] = [torch.optim.AdamW(others, lr=0.01, weight_decay=0.125)]
    optimizer += [torch.optim.Muon(matrices, lr=0.01, weight_decay=0.125)] if muon else []
    return AdamWSteps(model, optimizer, scheme, comm=comm, keep=keep, block=16, measure_every=2, **given)


def give_gradients(steps: AdamWSteps, step: int, but: str = "") -> None:
    """Put gradients on the parameters, not by a backward pass; the first rank has none of the parameter `but`."""
    drawn = torch.Generator().manual_seed(100 * step + steps.place[0])
    for name, each in steps.model.named_parameters():
        gradient = torch.randn(each.shape, generator=drawn)
        each.grad = None if name == but and steps.place[0] == 0 else gradient


def take(steps: AdamWSteps, numbers: range, but: str = "") -> None:
    for step in numbers:
        give_gradients(steps, step, but)
        steps.step()


def held(steps: AdamWSteps) -> dict[str, Tensor]:
    """Return all that a step changes."""
    state = steps.state_dict()
    own = {
        f"{kind}/{name}": each
        for kind in ("common", "momentum", "square")
        for name, each in state["adamw_steps"][kind].items()
    }
    ratios = {f"ratio/{kind}": state["adamw_steps"]["ratio"]["float32/cpu/0"][kind] for kind in ("mean", "own")}
    return {**own, **ratios, **{f"residual/{name}": each for name, each in state["scheme"]["residual"].items()}}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(each, other[name]) for name, each in one.items())


def test_the_default_is_its_formulas_in_plain_torch() -> None:
    def body(comm: LocalComm) -> tuple[Tensor, Tensor]:
        steps = started(comm, TwoShot(1.0, "int3"))
        (bucket,), codec, (beta1, beta2) = steps._weights.buckets, ValueCodec("int3"), (0.9, 0.999)

        def flat(of: Callable[[Any], Tensor]) -> Tensor:
            return torch.cat([of(each).flatten() for each in bucket.parameters.values()])

        weights = flat(lambda each: each.detach())
        residual, m, v = torch.zeros_like(weights), torch.zeros_like(weights), torch.full_like(weights, 1e-30)
        for t in range(1, 7):
            give_gradients(steps, t)
            rows = pad(v, (0, -v.numel() % 16)).view(-1, 16)
            for half in (8, 4, 2, 1):
                rows = rows[:, :half] + rows[:, half:]
            over = 1 / (rows[:, 0] / torch.tensor([16.0] * (len(rows) - 1) + [v.numel() % 16 or 16]))
            scale = (over.repeat_interleave(16)[: v.numel()] * v).double().sqrt().float() + 0.1
            residual += flat(lambda each: each.grad) / scale
            mean = quantized_all_reduce_(residual, comm, codec, codec).decoded() * scale
            v = v * beta2 + mean.square() * (1 - beta2)
            root = (v * (1 / torch.tensor(1 - beta2**t))).double().sqrt().float()
            m = m * beta1 + mean * 0.01 / (root + 1e-8) * (1 - beta1)
            weights = weights * (1 - 0.01 * 0.125) - m * (1 / (1 - beta1**t))
            steps.step()
        assert torch.equal(v, steps._sender.vectors["square"][0])
        assert torch.equal(weights, flat(lambda each: each.detach()))
        return weights, v

    first, *others = LocalWorld(P).run(body)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_a_bucket_without_elements_takes_its_step() -> None:
    def body(comm: LocalComm) -> int:
        model = nn.ParameterDict({"none": torch.zeros(0), "some": torch.zeros(3, dtype=torch.float64)})
        steps = AdamWSteps(model, torch.optim.AdamW(model.parameters()), TwoShot(1.0, "int3"), comm=comm, keep=0.0)
        for each in model.values():
            each.grad = torch.ones_like(each)
        return len(steps.step())

    assert LocalWorld(2).run(body) == [3, 3]


@pytest.mark.parametrize(("saved", "loaded"), [(0.5, 0.0), (0.0, 0.5)])
def test_a_state_with_own_second_moments_goes_on_with_common_ones_and_the_other_way_round(
    saved: float, loaded: float
) -> None:
    states = dict[int, dict[str, Any]]()  # Any: as Handle.state_dict

    def body(comm: LocalComm) -> list[Tensor]:
        first, second = (started(comm, TwoShot(1.0, "int3"), keep) for keep in (saved, loaded))
        take(first, range(6))
        states[comm.rank] = first.state_dict()
        second.load_state_dict(states[comm.rank])
        second.load_state_dict(second.state_dict())
        (square,) = second._sender.vectors["square"]
        for step in range(6, 9):
            before, old_square = [each.clone() for _, each in second._weights.common()], square.clone()
            for each in second.model.parameters():
                each.grad = torch.ones_like(each)
            second.step()
            if step == 6 and loaded == 0.0 and comm.rank == 0:  # whose squares become all ranks'
                assert ((square - 0.999 * old_square) / 0.001 - 1).abs().max() < 0.02
            moved = [(each - old).abs().max() for (_, each), old in zip(second._weights.common(), before, strict=True)]
            assert 0.002 < max(moved) < 0.02  # the rate is 0.01
        return [*second._sender.vectors["momentum"], *second._sender.vectors["square"][: loaded == 0.0]]

    def on_fewer_ranks(comm: LocalComm) -> float:
        steps = started(comm, TwoShot(1.0, "int3"), loaded)
        steps.load_state_dict(steps.resized([states[rank] for rank in range(P)]))
        return float(steps._sender.vectors["square"][0].mean())

    first, *others = LocalWorld(P).run(body)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    for rank, new in enumerate(LocalWorld(P - 1).run(on_fewer_ranks)):
        old = torch.cat([*states[rank]["adamw_steps"]["square"].values()]).mean().item()
        assert 2.5 < (new / old if loaded else old / new) < P + 0.1  # gradients are noise


@pytest.mark.parametrize(("values", "down"), [("int3", None), ("sign", "int3"), ("ternary", "int4"), ("int8", None)])
@pytest.mark.parametrize(("ranks", "keep", "bucket_mb"), [(P, 0.0, None), (1, 0.5, 1e-3)])
def test_single_passes_have_the_bits_of_one_pass_after_the_other(
    values: Any, down: Any, ranks: int, keep: float, bucket_mb: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(comm: LocalComm) -> dict[str, Tensor]:
        steps = started(comm, TwoShot(1.0, values, values_down=down), keep, bucket_mb=bucket_mb)
        take(steps, range(11), "2.bias")
        assert (len(steps._weights.buckets) == 1) == (bucket_mb is None)
        return held(steps)

    fused = LocalWorld(ranks).run(body)
    monkeypatch.setattr(State, "whole_form", lambda *_: None)
    assert all(map(same, fused, LocalWorld(ranks).run(body)))


def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have whether gradients are finite be a tensor, as on a GPU."""
    fits: Callable[..., Any] = kernels.squares_fit
    monkeypatch.setattr(kernels, "squares_fit", lambda *given: torch.tensor(fits(*given)))


FORMS: dict[str, dict[str, Any]] = {
    "whole": {"scheme": lambda: TwoShot(1.0, "int3")},
    "whole, own weights": {"scheme": lambda: TwoShot(1.0, "sign"), "keep": 1.0},
    "whole, Muon": {"scheme": lambda: TwoShot(1.0, "int3"), "muon": True},
    "16-bit residuals": {"scheme": lambda: TwoShot(1.0, "int3", residuals="bfloat16")},
    "sparse": {"scheme": lambda: TwoShot(0.1, "sign", density_down=0.3), "keep": 1.0, "muon": True},
    "sparse, 16-bit residuals, buckets": {
        "scheme": lambda: TwoShot(0.1, "sign", residuals="bfloat16"),
        "bucket_mb": 1e-3,
    },
    "in turn": {"scheme": lambda: InTurn(2), "keep": 1.0, "muon": True},
    "in turn, 16-bit residuals": {"scheme": lambda: InTurn(2, residuals="bfloat16")},
}


def trained(
    comm: LocalComm, steps: int, lost: int | None = None, more: int = 0, form: str = "whole"
) -> list[dict[str, Tensor]]:
    scheme, *others = FORMS[form].items()
    handle = started(comm, scheme[1](), **dict(others))
    shown = handle.optimizers[0].state[next(each for each in handle.model.parameters() if each.dim() == 1)]
    take(handle, range(steps))
    found = [held(handle)]
    if lost is not None:
        give_gradients(handle, steps)
        if comm.rank == lost:
            next(handle.model.parameters()).grad[0] = torch.nan  # pyright: ignore[reportOptionalSubscript]
        handle.step()
        assert shown["step"] == steps + 1  # nobody knows yet
        found.append(held(handle))
        assert handle.stats()["skipped"] == 1
        assert shown["step"] == steps
    take(handle, range(steps + 1, steps + 1 + more))
    return [*found, held(handle)]


@pytest.mark.parametrize("form", one_in(2, FORMS))
def test_what_is_decided_on_a_device_has_the_bits_of_what_the_host_decides(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = partial(trained, steps=12, form=form)
    host = LocalWorld(P).run(body)
    on_device(monkeypatch)
    assert all(map(same, (each[0] for each in host), (each[0] for each in LocalWorld(P).run(body))))


def test_a_step_that_the_host_skips_is_reported_and_leaves_the_residual_as_it_was() -> None:
    def body(comm: LocalComm) -> None:
        handle = skipping(comm)
        take(handle, range(3, 11))
        before = {name: each for name, each in held(handle).items() if name.startswith("residual")}
        give_gradients(handle, 11)  # which does not measure
        if comm.rank == 0:
            next(handle.model.parameters()).grad[0] = torch.nan  # pyright: ignore[reportOptionalSubscript]
        assert [(each.key, each.details["overflow"]) for each in handle.step()] == [("float32/cpu/0", True)]
        after = held(handle)
        assert before and all(torch.allclose(each, after[name], atol=1e-6) for name, each in before.items())

    with pytest.warns(UserWarning, match="was skipped on all ranks"):
        LocalWorld(P).run(body)


@pytest.mark.parametrize(
    ("steps", "form"), [(0, "whole"), *one_in(2, (pytest.param(5, form) for form in FORMS)), (10, "whole, Muon")]
)  # measured before the steps; not; and beside them
def test_a_step_that_a_device_skips_leaves_everything_as_it_was(
    steps: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(monkeypatch)
    with pytest.warns(UserWarning, match="was skipped on all ranks"):
        ranks = LocalWorld(P).run(partial(trained, steps=steps, lost=1, more=3, form=form))
    if steps:
        assert all(same(before, after) for before, after, _ in ranks)
    assert all(
        torch.equal(ranks[0][2][key], rank[2][key]) for rank in ranks for key in rank[2] if key.startswith("common")
    )
    assert not same(ranks[0][1], ranks[0][2])


def skipping(comm: LocalComm, scheme: Scheme | None = None, **given: Any) -> AdamWSteps:
    """Return a handle after three steps, with a gradient on the first rank that has the next one skipped."""
    handle = started(comm, scheme or TwoShot(1.0, "int3"), **given)
    take(handle, range(3))
    give_gradients(handle, 3)
    if comm.rank == 0:
        next(handle.model.parameters()).grad[0] = torch.nan  # pyright: ignore[reportOptionalSubscript]
    return handle


def test_ranks_agree_where_to_skip_though_one_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: LocalComm) -> dict[str, Tensor]:
        handle = started(comm, TwoShot(1.0, "int3"))
        for step in range(6):
            give_gradients(handle, step)
            if (comm.rank, step) == (0, 4):
                handle.optimizers[0].zero_grad()
            handle.step()
        return held(handle)

    host = LocalWorld(P).run(body)
    fits: Callable[..., Any] = kernels.squares_fit
    monkeypatch.setattr(kernels, "squares_fit", lambda *given: torch.tensor(fits(*given)) if given[0] else True)
    monkeypatch.setattr(adamw_steps, "host_is_ahead", lambda _: True)
    assert all(map(same, host, LocalWorld(P).run(body)))


# A whole step; and a bucket that was reduced before the one that fails.
@pytest.mark.parametrize(("density", "bucket_mb", "first"), [(1.0, None, True), (0.1, 1e-3, False)])
def test_what_fails_in_a_skipped_step_returns_nothing_to_the_residual(
    density: float, bucket_mb: float | None, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(monkeypatch)

    passing, exchange = dict[int, int](), LocalComm.all_to_all

    def exchanged(comm: LocalComm, *given: Any) -> list[Tensor]:
        if passing.setdefault(comm.rank, 99) == 0:
            raise RuntimeError("another rank is gone")
        passing[comm.rank] -= 1
        return exchange(comm, *given)

    def body(comm: LocalComm) -> bool:
        handle = skipping(comm, TwoShot(density, "int3"), bucket_mb=bucket_mb)
        before = (handle.snapshot(shared=False).own or {})["scheme"]["residual"]
        passing[comm.rank] = 0 if first else 1
        with pytest.raises(RuntimeError, match="another rank is gone"):
            handle.step()
        return same(before, (handle.snapshot(shared=False).own or {})["scheme"]["residual"])

    monkeypatch.setattr(LocalComm, "all_to_all", exchanged)
    assert all(LocalWorld(P).run(body))


def test_ranks_of_which_one_listens_to_moves_agree_and_hear_of_no_step_that_was_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_device(monkeypatch)

    def body(comm: LocalComm) -> tuple[int, dict[str, Tensor]]:
        handle, heard = started(comm, TwoShot(1.0, "int3")), list[Any]()
        if comm.rank == 1:
            handle.on_move(heard.append)
        for step in range(4):
            give_gradients(handle, step)
            if step == 2 and comm.rank == 0:
                next(handle.model.parameters()).grad[0] = torch.nan  # pyright: ignore[reportOptionalSubscript]
            handle.step()
        return len(heard), held(handle)

    with pytest.warns(UserWarning, match="was skipped on all ranks"):
        (_, common), (heard, _), (_, other) = LocalWorld(P).run(body)
    assert heard == 3
    assert all(torch.equal(each, other[name]) for name, each in common.items() if name.startswith("common/"))


def test_a_handle_closes_after_a_step_that_could_not_be_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch)

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    def body(comm: LocalComm) -> bool:
        handle = started(comm, TwoShot(1.0, "int3"))
        give_gradients(handle, 0)
        with pytest.raises(RuntimeError, match="no memory"):
            handle.step()
        handle.close()
        return handle.closed

    monkeypatch.setattr(kernels, "apply_steps_", fail)
    assert LocalWorld(1).run(body) == [True]


def test_what_an_optimizer_saves_has_no_step_that_a_device_has_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch)

    def body(comm: LocalComm) -> None:
        handle = skipping(comm)
        optimizer = handle.optimizers[0]
        before = optimizer.state_dict()
        handle.step()
        after = optimizer.state_dict()
        assert all(same(each, after["state"][number]) for number, each in before["state"].items())
        take(handle, range(4, 5))
        next(handle.model.parameters()).grad[0] = torch.nan  # pyright: ignore[reportOptionalSubscript]
        handle.step()
        optimizer.load_state_dict(before)
        optimizer.state_dict()  # which takes what was loaded
        take(handle, range(6, 9))
        assert (optimizer.state_dict()["state"][0]["step"], handle._sender.ratios.measured) == (6, 3)

    with pytest.warns(UserWarning, match="was skipped on all ranks"):
        LocalWorld(P).run(body)


def test_a_handle_closes_though_its_last_step_was_one_too_many_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch)
    monkeypatch.setattr(adamw_steps, "_MOST_SKIPPED", 1)

    def body(comm: LocalComm) -> bool:
        handle = skipping(comm)
        handle.step()
        with pytest.raises(RuntimeError, match="the last 1 steps were skipped on all ranks"):
            handle.close()
        return handle.closed

    assert all(LocalWorld(P).run(body))


def test_a_training_that_is_saved_and_resumed_has_the_bits_of_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch)

    def train(steps: AdamWSteps, numbers: range, saves: bool = False) -> dict[str, Any]:
        saved: dict[str, Any] = {}
        for step in numbers:
            steps.optimizers[0].zero_grad()
            drawn = torch.Generator().manual_seed(100 * step + steps.place[0])
            steps.model(torch.randn(4, 30, generator=drawn)).square().mean().backward()
            steps.clip_grad_norm_(0.01)
            steps.step()
            if saves and step == 8:  # which has measured
                saved = steps.state_dict()
        return saved

    def body(comm: LocalComm) -> list[dict[str, Tensor]]:
        plain, saving, resumed = (started(comm, TwoShot(1.0, "int3")) for _ in range(3))
        train(plain, range(12))
        saved = train(saving, range(12), saves=True)
        resumed.load_state_dict(saved)
        train(resumed, range(9, 12))
        return [held(each) for each in (plain, saving, resumed)]

    for plain, saving, resumed in LocalWorld(P).run(body):
        assert same(plain, saving)
        assert same(plain, resumed)


def test_weights_that_are_set_are_taken_though_the_host_reads_comparisons_a_step_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(comm: LocalComm) -> tuple[dict[str, Tensor], int]:
        steps, reads = started(comm, TwoShot(1.0, "sign"), keep=1.0), list[int]()
        changed = steps._weights.last_written.changed
        steps._weights.last_written.changed = lambda: reads.append(0) or changed()
        for step in range(6):
            give_gradients(steps, step)
            with torch.no_grad():
                if step == 3:
                    next(steps.model.parameters()).fill_(0.5)
            steps.step()
        return held(steps), len(reads)

    host = LocalWorld(P).run(body)
    monkeypatch.setattr(adamw_steps, "host_is_ahead", lambda _: True)
    ahead = LocalWorld(P).run(body)
    assert all(same(one[0], other[0]) for one, other in zip(host, ahead, strict=True))
    assert all(other[1] == one[1] - 5 for one, other in zip(host, ahead, strict=True))


def test_weights_that_were_set_without_torch_counting_it_raise_a_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_steps, "host_is_ahead", lambda _: True)

    def body(comm: LocalComm) -> None:
        steps = started(comm, TwoShot(1.0, "sign"), keep=1.0)
        for step in range(3):
            give_gradients(steps, step)
            if step == 1:
                next(steps.model.parameters()).data.fill_(0.5)
            if step == 2:
                with pytest.raises(RuntimeError, match=r"0.weight got other values through `.data`"):
                    steps.step()
                assert steps._connection.failed  # which ends the waits of the other ranks
            else:
                steps.step()

    LocalWorld(P).run(body)


def test_numbers_arrive_in_this_machines_memory_whatever_the_default_device() -> None:
    numbers = torch.ones(2)
    with torch.device("meta"):
        assert Arriving(numbers).read() == [1.0, 1.0]

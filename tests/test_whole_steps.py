"""Steps of which every element is sent: made, encoded and applied in single passes, and skipped on a device."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsync import AdamWSteps, LocalWorld, TwoShot
from sparsync.comm.local import LocalComm
from sparsync.core import Bucket
from sparsync.exchanges import exchanged_steps
from sparsync.exchanges.block_ratios import MeanOfSketches
from sparsync.exchanges.whole_steps import Arriving
from sparsync.kernels import operations as kernels

P = 3


def started(comm: LocalComm, scheme: TwoShot, keep: float = 0.0, **given: Any) -> AdamWSteps:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 23), nn.ReLU(), nn.Linear(23, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.125)
    return AdamWSteps(model, optimizer, scheme, comm=comm, keep=keep, block=16, measure_every=2, **given)


def give_gradients(steps: AdamWSteps, step: int, but: str = "") -> None:
    """Put gradients on the parameters, not by a backward pass; the first rank has none of the parameter `but`."""
    drawn = torch.Generator().manual_seed(100 * step + steps.place[0])
    for name, each in steps.model.named_parameters():
        gradient = torch.randn(each.shape, generator=drawn)
        each.grad = None if name == but and steps.place[0] == 0 else gradient


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


@pytest.mark.parametrize(("values", "down"), [("int3", None), ("sign", "int3"), ("ternary", "int4"), ("int8", None)])
@pytest.mark.parametrize(("ranks", "keep", "bucket_mb"), [(P, 0.0, None), (1, 0.5, 1e-3)])
def test_single_passes_have_the_bits_of_one_pass_after_the_other(
    values: Any, down: Any, ranks: int, keep: float, bucket_mb: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(comm: LocalComm) -> dict[str, Tensor]:
        steps = started(comm, TwoShot(1.0, values, values_down=down), keep, bucket_mb=bucket_mb)
        for step in range(11):
            give_gradients(steps, step, "2.bias")
            steps.step()
        assert (len(steps._weights.buckets) == 1) == (bucket_mb is None)
        return held(steps)

    fused = LocalWorld(ranks).run(body)
    monkeypatch.setattr(TwoShot, "whole_form", lambda *_: None)
    assert all(map(same, fused, LocalWorld(ranks).run(body)))


def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have whether gradients are finite be a tensor, as on a GPU."""
    fits: Callable[..., Any] = kernels.squares_fit
    monkeypatch.setattr(kernels, "squares_fit", lambda *given: torch.tensor(fits(*given)))


def trained(comm: LocalComm, steps: int, lost: int | None = None, more: int = 0) -> list[dict[str, Tensor]]:
    handle = started(comm, TwoShot(1.0, "int3"))
    for step in range(steps):
        give_gradients(handle, step)
        handle.step()
    found = [held(handle)]
    if lost is not None:
        give_gradients(handle, steps)
        if comm.rank == lost:
            next(handle.model.parameters()).grad[0] = torch.nan  # pyright: ignore[reportOptionalSubscript]
        handle.step()
        assert handle.optimizers[0].state[next(handle.model.parameters())]["step"] == steps + 1  # nobody knows yet
        found.append(held(handle))
        assert handle.stats()["skipped"] == 1
        assert handle.optimizers[0].state[next(handle.model.parameters())]["step"] == steps
    for step in range(steps + 1, steps + 1 + more):
        give_gradients(handle, step)
        handle.step()
    return [*found, held(handle)]


def test_what_is_decided_on_a_device_has_the_bits_of_what_the_host_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    host = LocalWorld(P).run(partial(trained, steps=12))
    on_device(monkeypatch)
    assert all(
        map(same, (each[0] for each in host), (each[0] for each in LocalWorld(P).run(partial(trained, steps=12))))
    )


@pytest.mark.parametrize("steps", [0, 5, 10])  # measured before the steps; not; and beside them
def test_a_step_that_a_device_skips_leaves_everything_as_it_was(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch)
    with pytest.warns(UserWarning, match="was skipped on all ranks"):
        ranks = LocalWorld(P).run(partial(trained, steps=steps, lost=1, more=3))
    if steps:
        assert all(same(before, after) for before, after, _ in ranks)
    assert all(
        torch.equal(ranks[0][2][key], rank[2][key]) for rank in ranks for key in rank[2] if key.startswith("common")
    )
    assert not same(ranks[0][1], ranks[0][2])


def test_after_32_steps_that_a_device_skips_the_next_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch)

    def body(comm: LocalComm) -> None:
        handle = started(comm, TwoShot(1.0, "int3"))
        for step in range(33):
            give_gradients(handle, step)
            next(handle.model.parameters()).grad[0] = torch.inf  # pyright: ignore[reportOptionalSubscript]
            if step == 32:
                with pytest.raises(RuntimeError, match="the last 32 steps were skipped on all ranks"):
                    handle.step()
            else:
                handle.step()

    with pytest.warns(UserWarning, match="was skipped on all ranks"):
        LocalWorld(P).run(body)


def skipping(comm: LocalComm) -> AdamWSteps:
    """Return a handle after three steps, with a gradient on the first rank that has the next one skipped."""
    handle = started(comm, TwoShot(1.0, "int3"))
    for step in range(3):
        give_gradients(handle, step)
        handle.step()
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
    monkeypatch.setattr(exchanged_steps, "_host_is_ahead", lambda _: True)
    assert all(map(same, host, LocalWorld(P).run(body)))


def test_what_fails_in_a_skipped_step_returns_nothing_to_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch)

    failing, exchange = set[int](), LocalComm.all_to_all

    def exchanged(comm: LocalComm, *given: Any) -> list[Tensor]:
        if comm.rank in failing:
            raise RuntimeError("another rank is gone")
        return exchange(comm, *given)

    def body(comm: LocalComm) -> bool:
        handle = skipping(comm)
        before = (handle.snapshot(shared=False).own or {})["scheme"]["residual"]
        failing.add(comm.rank)
        with pytest.raises(RuntimeError, match="another rank is gone"):
            handle.step()
        return same(before, (handle.snapshot(shared=False).own or {})["scheme"]["residual"])

    monkeypatch.setattr(LocalComm, "all_to_all", exchanged)
    assert all(LocalWorld(P).run(body))


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
        give_gradients(handle, 4)
        handle.step()
        next(handle.model.parameters()).grad[0] = torch.nan  # pyright: ignore[reportOptionalSubscript]
        handle.step()
        optimizer.load_state_dict(before)
        optimizer.state_dict()  # which takes what was loaded
        for step in range(6, 9):
            give_gradients(handle, step)
            handle.step()
        assert (optimizer.state_dict()["state"][0]["step"], handle._ratios.measured) == (6, 3)

    with pytest.warns(UserWarning, match="was skipped on all ranks"):
        LocalWorld(P).run(body)


def test_a_handle_closes_though_its_last_step_was_one_too_many_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch)
    monkeypatch.setattr(exchanged_steps, "_MOST_SKIPPED", 1)

    def body(comm: LocalComm) -> bool:
        handle = skipping(comm)
        handle.step()
        with pytest.raises(RuntimeError, match="the last 1 steps were skipped on all ranks"):
            handle.close()
        return handle.closed

    assert all(LocalWorld(P).run(body))


def test_waits_are_plain_again_where_no_thread_could_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("no more threads")

    def body(comm: LocalComm) -> bool:
        connection = started(comm, TwoShot(1.0, "int3"))._connection
        monkeypatch.setattr(connection, "overlaps", lambda *_: True)
        monkeypatch.setattr(threading.Thread, "start", fail)
        try:
            with pytest.raises(RuntimeError, match="no more threads"):
                connection.reduce_together([(Bucket("ratio", torch.ones(2), 0), MeanOfSketches())], lambda: None)
        finally:
            monkeypatch.undo()
        return connection._waits is nullcontext

    assert LocalWorld(1).run(body) == [True]


def test_numbers_arrive_in_this_machines_memory_whatever_the_default_device() -> None:
    numbers = torch.ones(2)
    with torch.device("meta"):
        assert Arriving(numbers).read() == [1.0, 1.0]

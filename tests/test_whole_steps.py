"""Steps of which every element is sent: made, encoded and applied in single passes, and skipped on a device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsync import AdamWSteps, LocalWorld, TwoShot
from sparsync.comm.local import LocalComm
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

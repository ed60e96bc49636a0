"""States that cannot be: of another integration, or with an entry that is wrong. Each is refused by name, and nothing has changed."""

import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsync
from helpers.distributed import case, run
from helpers.stepped import Stepped
from sparsync import AdamWSteps, GradientReducer, LocalWorld, OuterSGD, TopK
from sparsync.attached import checkpoint
from sparsync.core import Comm
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.runtime.handle import Handle


def learn(model: nn.Module, rank: int, step: int) -> None:
    for i, parameter in enumerate(model.parameters()):
        drawn = torch.Generator().manual_seed(100 * rank + 10 * step + i)
        parameter.grad = torch.randint(-4, 5, parameter.shape, generator=drawn).float()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def adamw(comm: Comm) -> AdamWSteps:
    made = model()
    steps = AdamWSteps(made, torch.optim.AdamW(made.parameters(), lr=0.25), TopK(0.25), comm=comm, block=8)
    for step in range(3):
        learn(made, comm.rank, step)
        steps.step()
    return steps


def local(comm: Comm) -> LocalTraining:
    """With an exchange on its way, whose sketches are measured."""
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.25, momentum=0.5)
    options: Any = {"every": 2, "delay": 1, "fragments": 2, "outer": OuterSGD(), "clip_factor": "measured", "keep": 0.5}
    steps = LocalTraining(made, optimizer, TopK(0.25), comm=comm, **options)
    for step in range(4):
        learn(made, comm.rank, step)
        steps.clip_grad_norm_(1e9)
        optimizer.step()
        steps.step()
    assert steps._exchanger.pending
    return steps


def gradients(comm: Comm) -> Stepped:
    return Stepped(comm).step(3)


MAKE: dict[str, Callable[[Comm], Handle]] = {"gradients": gradients, "adamw_steps": adamw, "local_steps": local}


def entries(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every entry of a state: dicts and lists too, and what is in them; of two optimizers what torch itself saves is left to torch."""
    if path:
        yield path, state
    inner = (
        state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    )
    for key, value in inner:
        if path[-2:-1] != ("optimizers",) and path[-1:] != ("outer",):
            yield from entries(value, (*path, key))


def broken(path: tuple[Any, ...], value: Any) -> Iterator[tuple[str, Any]]:
    """What an entry cannot be, in words and as a value."""
    yield "another type", 1.5 if isinstance(value, str) else "x"
    if not may_lack(path):
        yield "missing", MISSING
    if isinstance(value, Tensor):
        yield "another shape", torch.zeros(*value.shape, 2, dtype=value.dtype)
        yield "a list", value.tolist()
        if value.is_floating_point():
            yield "whole numbers", torch.zeros(value.shape, dtype=torch.int64)
        if value.is_floating_point() and value.numel() and not may_be_nan(path):
            yield "NaN", torch.full_like(value, torch.nan)
            yield "Inf", torch.full_like(value, -torch.inf)
        if {"square", "ratio"} & set(path) and value.numel():
            yield "negative", -1 - value
    elif isinstance(value, (int, float)):
        yield "NaN", math.nan
        yield "negative", -2
        if isinstance(value, int):
            yield "a fraction", 1.5
        if not isinstance(value, bool):
            yield "True", True


MISSING = object()


def may_be_nan(path: tuple[Any, ...]) -> bool:
    """Return whether a rank may have NaN there: in its own weights, of which the next exchange finds out, and in buffers."""
    return path[:2] == ("local_steps", "own") or bool({"buffers", "common_buffers", "sketches"} & set(path))


def may_lack(path: tuple[Any, ...]) -> bool:
    """Return whether states lack that too: older ones the integration and clipping, a scheme residuals of what was not reduced yet, a rank
    of a larger world than before its own weights and the ratio."""
    inside = {
        "residual",
        "ratio",
        "start",
        "own",
        "layout",
        "rates",
        "pending",
        "applied",
        "sketches",
        "not_finite",
    } & set(path[:-1])
    return path in [("integration",), ("recipe",), ("clipping",), ("scheme", "scheme")] or (
        bool(inside) and path[-2:-1] != (0,)
    )


def changed(state: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    other = deepcopy(state)
    *way, last = path
    inner: Any = other
    for key in way:
        inner = inner[key]
    if value is MISSING:
        del inner[last]
    else:
        inner[last] = value
    return other


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("kind", MAKE)
def test_whatever_entry_of_a_state_is_wrong_it_is_refused_by_name_and_the_handle_is_unchanged(kind: str) -> None:
    def body(comm: Comm) -> tuple[int, list[str]]:
        handle = MAKE[kind](comm)
        state = handle.state_dict()
        handle.load_state_dict(deepcopy(state))
        tried, found = 0, []
        for path, value in entries(state):
            for what, wrong in broken(path, value):
                tried += 1
                try:
                    handle.load_state_dict(changed(state, path, wrong))
                except ValueError as error:
                    name = next(each for each in reversed(path) if isinstance(each, str))
                    if name not in str(error) and "ratio" not in str(error):
                        found.append(f"{path}: {what}: not named: {error}")
                except Exception as error:
                    found.append(f"{path}: {what}: {type(error).__name__}: {error}")
                else:
                    found.append(f"{path}: {what}: accepted")
                if not same(handle.state_dict(), state):
                    found.append(f"{path}: {what}: the handle has changed")
                    handle.load_state_dict(deepcopy(state))
        return tried, found

    ((tried, found),) = LocalWorld(1).run(body)
    assert not found, "\n".join(found)
    assert tried > 50


@pytest.mark.parametrize("saved_by", MAKE)
@pytest.mark.parametrize("loaded_by", MAKE)
def test_a_state_continues_its_own_integration_only_also_from_a_file_and_also_an_older_one_without_its_name(
    saved_by: str, loaded_by: str, tmp_path: Path
) -> None:
    def body(comm: Comm) -> None:
        saved, loaded = (bare_handle(each, comm) for each in (saved_by, loaded_by))
        checkpoint.save(saved, tmp_path)
        state = saved.state_dict()
        assert state["integration"] == saved_by
        older = {key: value for key, value in state.items() if key != "integration"}
        before = loaded.state_dict()
        for load in (
            lambda: loaded.load_state_dict(state),
            lambda: loaded.load_state_dict(older),
            lambda: checkpoint.load(loaded, tmp_path),
            lambda: checkpoint.restore(loaded, [state]),
        ):
            if saved_by == loaded_by:
                load()
                continue
            with pytest.raises(
                ValueError, match=r"it was saved with .*, whose residuals are in other units than those of "
            ):
                load()
            assert same(loaded.state_dict(), before)
        del saved  # or the folder is another model's of this process
        if saved_by != loaded_by:
            with pytest.raises(ValueError, match=r"it was saved with .*; pass name="):
                checkpoint.save(loaded, tmp_path)

    LocalWorld(1).run(body)


def bare_handle(kind: str, comm: Comm) -> Handle:
    """A handle of one and the same model and scheme."""
    made = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(4, 5)), "bias": nn.Parameter(torch.zeros(5))})
    if kind == "adamw_steps":
        return AdamWSteps(made, torch.optim.AdamW(made.parameters()), TopK(0.1), comm=comm)
    if kind == "local_steps":
        return LocalTraining(made, torch.optim.SGD(made.parameters()), TopK(0.1), comm=comm, every=1)
    return Stepped(comm)


def continued() -> None:
    def attached() -> Handle:
        return sparsync.attach(nn.parallel.DistributedDataParallel(model()), TopK(0.25))

    for make, other in (
        (attached, lambda: GradientReducer(model(), TopK(0.25))),
        (lambda: GradientReducer(model(), TopK(0.25)), attached),
    ):
        with case(make):
            other().load_state_dict(make().state_dict())
    state = attached().state_dict()
    for wrong in ("x", 3, [3], [["bucket0"], 3]):
        with pytest.raises(ValueError, match=r"state\['buckets'\]"):
            attached().load_state_dict({**state, "buckets": wrong})


@pytest.mark.distributed
def test_attach_and_gradient_reducer_continue_each_others_states() -> None:
    run(continued, 1)

"""The door of a handle: a state of another format, integration or model is refused, and nothing has changed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparsync
from helpers.distributed import case, run
from helpers.stepped import Stepped
from sparsync import AdamWSteps, GradientReducer
from sparsync.attached import checkpoint
from sparsync.comm import LocalWorld
from sparsync.core import Comm
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.runtime import state_file
from sparsync.runtime.handle import Handle
from sparsync.schemes import TopK

KINDS = ("gradients", "adamw_steps", "local_steps")


def bare_handle(kind: str, comm: Comm, **more: nn.Module) -> Handle:
    """A handle of one and the same model and scheme, with `more` beside it."""
    made = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(4, 5)), "bias": nn.Parameter(torch.zeros(5))})
    for name, each in more.items():
        made.add_module(name, each)
    if kind == "adamw_steps":
        return AdamWSteps(made, torch.optim.AdamW(made.parameters()), TopK(0.1), comm=comm)
    if kind == "local_steps":
        return LocalTraining(made, torch.optim.SGD(made.parameters()), TopK(0.1), comm=comm, every=1)
    return Stepped(comm)


def bits(handle: Handle) -> bytes:
    return bytes(state_file.encoded(handle.state_dict()).tolist())


@pytest.mark.parametrize("saved_by", KINDS)
@pytest.mark.parametrize("loaded_by", KINDS)
def test_a_state_continues_its_own_integration_only_also_from_a_file(
    saved_by: str, loaded_by: str, tmp_path: Path
) -> None:
    def body(comm: Comm) -> None:
        saved, loaded = (bare_handle(each, comm) for each in (saved_by, loaded_by))
        checkpoint.save(saved, tmp_path)
        state = saved.state_dict()
        before = bits(loaded)
        for load in (
            lambda: loaded.load_state_dict(state),
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
            assert bits(loaded) == before

    LocalWorld(1).run(body)


def test_what_is_no_state_of_this_format_rank_or_number_of_ranks_is_refused() -> None:
    def body(comm: Comm) -> None:
        handle = bare_handle("gradients", comm)
        state, before = handle.state_dict(), bits(handle)
        for wrong, message in (
            ({}, "has format version None, and this sparsync reads version 4"),
            (
                {**state, "version": 1},
                "has format version 1, and this sparsync reads version 4; load it with the sparsync",
            ),
            ({**state, "rank": 1}, "load each rank's own"),  # a residual loaded twice would count twice
            ({**state, "ranks": 2}, "load each rank's own"),
        ):
            with pytest.raises(ValueError, match=message):
                handle.load_state_dict(wrong)
        assert bits(handle) == before

    LocalWorld(1).run(body)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_state_without_a_buffer_or_a_trained_parameter_is_refused_before_anything_is_loaded(kind: str) -> None:
    def body(comm: Comm) -> None:
        frozen = nn.Linear(2, 2).requires_grad_(False)
        saved = bare_handle(kind, comm, norm=nn.BatchNorm1d(3, affine=False), head=frozen).state_dict()
        for more, name in (
            ({"norm": nn.BatchNorm1d(3, affine=False), "head": nn.Linear(2, 2)}, "head.weight"),
            ({"norm": nn.BatchNorm1d(4, affine=False), "head": frozen}, "norm.running_mean"),
        ):
            handle: Any = bare_handle(kind, comm, **more)
            before = bits(handle)
            with pytest.raises(ValueError, match=f"this state has no '{name}' of 4 elements among its"):
                handle.load_state_dict(saved)
            assert bits(handle) == before

    LocalWorld(1).run(body)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def continued() -> None:
    def attached() -> Handle:
        return sparsync.attach(nn.parallel.DistributedDataParallel(model()), TopK(0.25))

    for make, other in (
        (attached, lambda: GradientReducer(model(), TopK(0.25))),
        (lambda: GradientReducer(model(), TopK(0.25)), attached),
    ):
        with case(make):
            other().load_state_dict(make().state_dict())


@pytest.mark.distributed
def test_attach_and_gradient_reducer_continue_each_others_states() -> None:
    run(continued, 1)

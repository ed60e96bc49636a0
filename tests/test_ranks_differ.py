"""Ranks that differ in what they reduce get an error, all of them, that names both: no wrong result, no wait, no abort."""

import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.distributed import case, in_turn, run
from invariants.table import ROWS
from sparsync import AdamWSteps, Bucket, GradientReducer, Options
from sparsync.base.scheme import Scheme
from sparsync.comm import GroupComm
from sparsync.core import generator, laid_out
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.runtime.connection import Connection
from sparsync.runtime.handle import Handle
from sparsync.schemes import Dense, ExactExDyna, ExactMiCRO, ExactOkTopk, MiCRO, SkipReduce, TopK, TwoShot

pytestmark = pytest.mark.distributed

SCHEMES = (
    Dense,
    lambda: TopK(0.1),
    lambda: TwoShot(0.1),
    lambda: ExactMiCRO(0.1),
    lambda: ExactExDyna(0.1),
    lambda: ExactOkTopk(0.1),
    lambda: SkipReduce(1),
)


def model(*sizes: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = nn.Sequential(*(nn.Linear(size, size, bias=False, dtype=dtype) for size in sizes))
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    return layers


def error_of(reducer: GradientReducer, step: int | None = None) -> str:
    try:
        reducer.reduce(step)
    except sparsync.RanksDifferError as error:
        return str(error)
    return "no error"


def changed_state() -> str:
    scheme = MiCRO(0.1)
    reducer = GradientReducer(model(20, 20), scheme, options=Options(timeout_s=120))
    reducer.reduce()
    if dist.get_rank() == 1:
        reducer.state.load_state_dict({**reducer.state.state_dict(), "shared": {}})
    return error_of(reducer)


def test_a_shared_state_that_differs_is_an_error_that_names_it() -> None:
    for found in run(changed_state, 2):
        assert "rank 0 has state of micro: scaling: {'step': 1, " in found
        assert "rank 1 has state of micro: " in found


def every_scheme() -> list[str]:
    comm, found = GroupComm.private(timeout_s=120), []
    for each in [row for row in ROWS if comm.size % row.node_size == 0]:
        scheme = each.make().start()
        connection = Connection(scheme, comm)
        try:
            for step in range(2):
                grad = torch.randn(300, generator=generator(comm.rank, each.id, step))
                connection.reduce(Bucket("bucket", grad, step, laid_out([("a", (10, 20)), ("b", (100,))])), scheme)
        except RuntimeError as error:
            found.append(f"{each.id}: {error}")
    return found


@pytest.mark.slow
def test_no_scheme_is_taken_for_one_that_differs_where_gradients_do() -> None:
    for found in run(every_scheme, 2):
        assert found == []


def different_models() -> dict[str, str]:
    rank, found = dist.get_rank(), {}
    named = model(20, 30)
    if rank == 1:
        named = nn.Sequential(named[1], named[0])  # pyright: ignore[reportIndexIssue]  # a Sequential
    for name, mine in {
        "another size": model(20, 30) if rank == 0 else model(20, 31),
        "longer": model(20, 30) if rank == 0 else model(20, 30, 10),
        "another order": named,
        "another type": model(20, dtype=torch.float32 if rank == 0 else torch.float64),
    }.items():
        for make in SCHEMES:
            with case(name):
                found[f"{name}, {make().name}"] = error_of(GradientReducer(mine, make(), options=Options(timeout_s=5)))
    return found


@pytest.mark.slow
def test_different_models_are_an_error_that_names_the_first_parameter_that_differs() -> None:
    for found in run(different_models, 2):
        for name, error in found.items():
            wanted = {
                "another size": "1300 elements of torch.float32 in 2 parameters, rank 1 has bucket",
                "longer": "in 2 parameters, rank 1 has bucket 'float32'",
                "another order": "rank 0 has parameter '0.weight' of [20, 20], rank 1 has parameter '0.weight' of [30, 30]",
                "another type": "rank 0 has bucket 'float32'",
            }[name.split(", ")[0]]
            assert wanted in error, (name, error)


INTEGRATIONS = ("attach", "GradientReducer", "AdamWSteps", "LocalSteps", "delay", "replicate", "shard")


@dataclass
class TrainedGroups:
    """A model behind an integration, with two parameter groups, and what makes a step of it."""

    handle: Handle
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], object]
    weights: list[Tensor]  # those that ranks compare, by parameter

    def error(self) -> str:
        try:
            self.step()
        except RuntimeError as error:
            if isinstance(self.model, FSDPModule):
                self.model.reset_iter_state()
            return str(error)
        return "no error"


def behind(integration: str, every: int = 0, rates: Sequence[Any] = (0.1, 0.2), unused: bool = False) -> TrainedGroups:
    """A model of two layers, the same on all ranks. `unused`: DDP does not wait for gradients that do not come."""
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    wrapped: Any = bare
    if integration == "attach":
        wrapped = DistributedDataParallel(bare, find_unused_parameters=unused)
    elif integration in ("replicate", "shard"):
        shape = (2, 1) if integration == "replicate" else (2,)
        wrapped = fully_shard(
            bare, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        )
    groups = [{"params": list(each.parameters()), "lr": rate} for each, rate in zip(bare, rates, strict=True)]
    optimizer: Any = torch.optim.SGD(groups, momentum=0.5)
    options: Any = {"timeout_s": 20.0, "check_weights_every": every}
    scheme = SkipReduce(0) if integration == "shard" else Dense()
    if integration == "AdamWSteps":
        optimizer = torch.optim.AdamW(groups)
        handle: Any = AdamWSteps(bare, optimizer, scheme, **options)
    elif integration in ("LocalSteps", "delay"):
        handle = LocalTraining(bare, optimizer, scheme, every=1, delay=int(integration == "delay"), **options)
    elif integration == "GradientReducer":
        handle = GradientReducer(bare, scheme, optimizer=optimizer, options=sparsync.Options(**options))
    else:
        handle = sparsync.attach(wrapped, scheme, optimizer=optimizer, options=sparsync.Options(**options))

    def step() -> None:
        optimizer.zero_grad()
        wrapped(torch.ones(2, 4)).square().sum().backward()
        if integration == "GradientReducer":
            handle.reduce()
        if integration != "AdamWSteps":
            optimizer.step()
        if isinstance(handle, (AdamWSteps, LocalTraining)):
            handle.step()

    if isinstance(handle, (AdamWSteps, LocalTraining)):
        weights = [entry.span.of(each.common) for each in handle._weights.buckets for entry in each.layout]
    else:
        weights = [getattr(each.detach(), "to_local", each.detach)() for each in bare.parameters()]
    return TrainedGroups(handle, wrapped, optimizer, step, weights)


def other_settings() -> dict[str, str]:
    rank, found = dist.get_rank(), {}
    for integration in INTEGRATIONS:
        with case(integration):
            trained = behind(integration, rates=(0.1, torch.tensor(0.2)))
            trained.step()
            group = trained.optimizer.param_groups[1]
            group["lr"].fill_(0.5 - 0.25 * rank)
            found[integration] = trained.error()
            if integration == "delay":  # what is on its way was read when it was sent
                assert found[integration] == "no error"
                found[integration] = trained.error()
            group["lr"].fill_(0.25)
            if integration not in ("replicate", "shard"):  # FSDP2 continues after reset_iter_state
                trained.step()
                group["weight_decay"] = 0.5 * rank
                found[f"{integration}, weight_decay"] = trained.error() + (
                    trained.error() if integration == "delay" else ""
                )
    return found


@pytest.mark.slow
def test_one_rank_with_another_setting_of_its_optimizer_is_an_error_on_all_ranks_behind_every_integration() -> None:
    for found in run(other_settings, 2):
        for integration in INTEGRATIONS:
            kind = "AdamW" if integration == "AdamWSteps" else "SGD"
            of = f"in parameter group 1 of {kind}"
            wanted = f"ranks differ: rank 0 has lr=0.5 {of}, rank 1 has lr=0.25 {of}; give the optimizers of all ranks the same"
            assert wanted in found[integration], integration
        decayed = [each for each in found if each.endswith("weight_decay")]
        assert len(decayed) == 5
        for each in decayed:
            assert (
                "rank 0 has weight_decay=0.0 in" in found[each] and "rank 1 has weight_decay=0.5 in" in found[each]
            ), each
            assert "lr=" not in found[each]


def frozen_on_one() -> dict[str, str]:
    found = {}
    for integration in INTEGRATIONS:
        for layer in ("0", "1"):
            with case((integration, layer)):
                trained = behind(integration, unused=True)
                trained.step()
                if dist.get_rank() == 1:
                    module = getattr(trained.model, "module", trained.model)
                    module.get_submodule(layer).requires_grad_(False)
                found[f"{integration}, {layer}"] = trained.error() + (trained.error() if integration == "delay" else "")
    return found


@pytest.mark.slow
def test_a_layer_that_one_rank_freezes_is_an_error_that_names_it_on_all_ranks_behind_every_integration() -> None:
    for found in run(frozen_on_one, 2):
        assert len(found) == 2 * len(INTEGRATIONS)
        for name, error in found.items():
            layer, of = name[-1], f"of {'AdamW' if name.startswith('AdamWSteps') else 'SGD'}"
            parameter = f"parameter '{layer}.weight' in parameter group {layer} {of}"
            assert f"ranks differ: rank 0 has {parameter}, rank 1 has {parameter}, frozen; give" in error, name


def other_weights() -> dict[str, list[str]]:
    found = {}
    for integration, every in [*((each, 4) for each in INTEGRATIONS), ("GradientReducer", 0)]:
        with case((integration, every)):
            trained = behind(integration, every)
            for _ in range(2):
                trained.step()
            if dist.get_rank() == 1:
                trained.weights[1].view(-1)[5] *= 1 + 2**-20
            found[f"{integration}, {every}"] = [trained.error() for _ in range(5)]
    return found


_WEIGHTS = r"rank {} has weights '1\.weight' with digest (\w{{16}}) before step (\d)"


def test_weights_that_differ_are_an_error_that_names_them_at_the_next_check_and_in_each_step_after_it() -> None:
    for found in run(other_weights, 2):
        for name, errors in found.items():
            differ = [number for number, error in enumerate(errors, 2) if error != "no error"]
            if name in ("shard, 4", "GradientReducer, 0"):
                assert differ == [], name  # each rank has a shard of its own; never
                continue
            # LocalTraining counts steps from 1 on. With delay the error comes a step later, and another exchange is on its way by then.
            assert differ == {"LocalSteps, 4": [3, 4, 5, 6], "delay, 4": [4, 6]}.get(name, [4, 5, 6]), name
            for number in differ:
                here, there = (re.search(_WEIGHTS.format(rank), errors[number - 2]) for rank in (0, 1))
                assert here and there and here[1] != there[1] and here[2] == there[2], (name, errors[number - 2])
                assert "load the same weights on all ranks" in errors[number - 2]


def loaded_weights() -> dict[str, list[str]]:
    """The errors of the steps after loads: of the same weights, of some on rank 1 only, of others on each rank, of the same again."""
    found: dict[str, list[str]] = {}
    for integration in ("AdamWSteps", "LocalSteps", "delay"):
        with case(integration):
            trained = behind(integration, rates=(1e-6, 1e-6))
            trained.step()
            for load in (1.0, 2.0 if dist.get_rank() == 1 else None, 3.0 + dist.get_rank(), 5.0):
                if load is not None:
                    trained.model.load_state_dict({"0.weight": torch.full((4, 4), load), "1.weight": torch.eye(4)})
                errors = [trained.error() for _ in range(2)]  # with delay the error comes a step later
                found.setdefault(integration, []).append(errors[integration == "delay"])
            assert isinstance(trained.handle, (AdamWSteps, LocalTraining))
            with trained.handle.averaged():
                assert bool((next(trained.model.parameters()) - 5.0).abs().max() < 1.0)
    return found


def test_weights_loaded_on_one_rank_only_are_an_error_and_the_same_ones_on_all_ranks_are_adopted() -> None:
    for found in run(loaded_weights, 2):
        for integration, (first, one, both, last) in found.items():
            assert first == last == "no error", integration
            assert "rank 0 has nothing more, rank 1 has weights '0.weight' with digest" in one, integration
            assert "set from outside before step" in one and "rank 1 has weights '0.weight'" in both, integration
            assert "load the same weights on all ranks before the same step" in one, integration


def run_out_of_data() -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    handle = sparsync.attach(
        model, Dense(), optimizer=optimizer, options=sparsync.Options(timeout_s=20.0, check_weights_every=1)
    )
    with model.join():
        for _ in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            schedule.step()
    assert len(handle.reports()) == 4


def left_alone_by_ddp() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ddp = DistributedDataParallel(model)
    with torch.no_grad():
        next(model.parameters()).add_(dist.get_rank())
    with sparsync.attach(ddp, Dense(), options=sparsync.Options(timeout_s=20.0, check_weights_every=1)):
        ddp(torch.ones(2, 4)).square().sum().backward()


def without_more_bytes() -> None:
    for integration in INTEGRATIONS:
        with case(integration):
            sent = []
            for every in (0, 1):
                trained = behind(integration, every)
                for _ in range(3):
                    trained.step()
                sent.append([(each.key, each.sent, each.cost) for each in trained.handle.reports()])
                trained.handle.close()
            assert sent[0] == sent[1]


@pytest.mark.slow
def test_a_check_of_weights_sends_nothing_more_and_accepts_ranks_that_joined_and_parameters_ddp_ignores() -> None:
    run(in_turn, 2, parts=(run_out_of_data, left_alone_by_ddp, without_more_bytes))


def opened(times: int, how: str) -> tuple[int, int]:
    """The open files of this process before and after attaching to so many models."""

    def attached() -> None:
        scheme: Scheme = TopK(0.1)
        if how == "ddp":
            ddp = DistributedDataParallel(model(8))
            handle = sparsync.attach(ddp, scheme)
            ddp(torch.ones(1, 8)).sum().backward()
            if times % 2:
                handle.close()
        elif how == "with":
            with GradientReducer(model(8), scheme) as reducer:
                reducer.reduce()
        else:
            GradientReducer(model(8), scheme).reduce()
        gc.collect()

    attached()
    dist.barrier()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(times):
        attached()
    dist.barrier()
    return before, len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "with", "gone"])
def test_models_that_are_gone_leave_no_connections_behind(how: str) -> None:
    for before, after in run(opened, 2, times=6, how=how):
        assert after <= before + 2

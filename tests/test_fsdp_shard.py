"""attach on the shard axis of models under fully_shard over gloo: exact means, known contributors, residuals lose nothing."""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from helpers.distributed import case, in_turn, run
from helpers.fsdp_training import SHAPES, backward, conserved, each_unit, flat, inputs, known, made, mean, on, same
from sparsync import Report
from sparsync.attached import checkpoint
from sparsync.comm.announcement import announcement_cost
from sparsync.schemes import Dense, ExactOkTopk, SkipReduce, TwoShot

pytestmark = pytest.mark.distributed


def offsets(report: Report) -> list[int]:
    found = ast.literal_eval(str(report.details["offsets"]))
    assert isinstance(found, list)
    return found


def mean_over_contributors(name: str, step: int, left_out: list[int], protected: bool = False) -> Tensor:
    """Return the result of a reduce-scatter over all ranks: the rows of each owner's shard, averaged over its contributors."""
    P = dist.get_world_size()
    rows = torch.arange(SHAPES[name][0])
    owners = rows // -(-SHAPES[name][0] // P)
    result = torch.empty(SHAPES[name])
    for owner in range(P):
        there = [r for r in range(P) if protected or (r - owner) % P not in left_out]
        total = torch.stack([known(r, step, name) for r in there]).sum(0)
        result[owners == owner] = (total / len(there))[owners == owner]
    return result


def exact_on_the_shard_axis() -> None:
    P = dist.get_world_size()
    net = made()
    on(net, Dense())
    assert same(backward(net, inputs(0)), mean(P, 0))
    for reduced in (torch.float32, torch.bfloat16, torch.float16):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        plain, ours = made(mp_policy=policy), made(mp_policy=policy)
        on(ours, Dense())
        assert same(backward(ours, inputs(0)), backward(plain, inputs(0)))
    for factor in (8.0, 3.0):
        plain, ours = made(), made()
        for net in (plain, ours):
            each_unit(net, lambda unit, factor=factor: unit.set_gradient_divide_factor(factor))
            each_unit(net, lambda unit: unit.set_force_sum_reduction_for_comms(True))
        on(ours, Dense())
        assert same(backward(ours, inputs(0)), backward(plain, inputs(0)))


def skipping_on_the_shard_axis() -> None:
    P, net = dist.get_world_size(), made()
    handle = on(net, SkipReduce(skip=2, protect=["first.bias"]))
    for step in range(3):
        found = backward(net, inputs(step))
        reports = {report.key: report for report in handle.take_reports()}
        for name, grad in found.items():
            key = name.partition(".")[0] if "." in name else "(root)"
            wanted = mean_over_contributors(name, step, offsets(reports[key]), protected=name == "first.bias")
            assert torch.equal(grad, wanted)
        for key, report in reports.items():
            assert len(offsets(report)) == 2
            assert report.sent == report.cost
            residual = 4 * 2 if key == "first" else 0  # two elements of the bias on each rank
            reduced = report.cost.nbytes - announcement_cost(P).nbytes
            assert reduced == (P - 1 - 2) * (4 * report.elements // P) + 2 * residual


def residuals_on_the_shard_axis() -> None:
    for scheme in (
        SkipReduce(skip=2, feedback=True),
        ExactOkTopk(density=0.1),
        ExactOkTopk(density=0.1, dense_steps=1),
        TwoShot(density=0.1, values="float32"),
    ):
        with case(scheme):
            net = made()
            handle = on(net, scheme)
            conserved(handle, net, 3)
            assert flat(handle.state_dict()["scheme"]["residual"]).any()
    net = made()
    handle = on(net, ExactOkTopk(density=1.0))
    for step in range(2):
        assert same(backward(net, inputs(step)), mean(dist.get_world_size(), step))
    for report in handle.reports():
        assert float(report.details["sent_count"]) <= report.elements - report.elements // 4


@pytest.mark.slow
def test_on_the_shard_axis_the_mean_is_over_contributors_and_residuals_lose_nothing() -> None:
    run(in_turn, 4, parts=(exact_on_the_shard_axis, skipping_on_the_shard_axis, residuals_on_the_shard_axis))


def save_copies(folder: Path) -> tuple[Tensor, Tensor]:
    """The residual of each of two copies of two shards, and what was loaded of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net, again = made(mesh["shard"]), made(mesh["shard"])
    handle, other = on(net, ExactOkTopk(density=0.1)), on(again, ExactOkTopk(density=0.1))
    backward(net, inputs(0))
    checkpoint.save(handle, folder)
    dist.barrier()
    checkpoint.load(other, folder)
    return tuple(flat(each.state_dict()["scheme"]["residual"]) for each in (handle, other))  # pyright: ignore[reportReturnType]


def test_each_copy_of_the_shards_saves_its_own_residual(tmp_path: Path) -> None:
    found = run(save_copies, 4, folder=tmp_path)
    assert all(torch.equal(saved, loaded) for saved, loaded in found)
    assert not any(torch.equal(found[0][0], saved) for saved, _ in found[1:])
    assert len(list(tmp_path.iterdir())) == 4

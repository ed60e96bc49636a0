"""attach on the shard axis of models under fully_shard over gloo: exact means, known contributors, residuals lose nothing."""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from helpers.distributed import case, run
from helpers.fsdp_training import (
    KEYS,
    SHAPES,
    as_fsdp,
    backward,
    conserved,
    each_unit,
    everywhere,
    flat,
    gradients,
    inputs,
    known,
    made,
    mean,
    on,
    same,
    skipped,
)
from sparsync import Dense, OkTopk, Report, SkipReduce, TwoShot
from sparsync.attached import checkpoint
from sparsync.comm.announcement import announcement_cost

pytestmark = pytest.mark.distributed

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
    for dtype in TYPES:
        with case(dtype):
            plain, ours = made(dtype=dtype), made(dtype=dtype)
            handle = on(ours, SkipReduce(skip=0) if dtype == torch.bfloat16 else Dense())
            steps = 2 if dtype == torch.float32 else 1
            for step in range(steps):
                wanted = backward(plain, inputs(step, dtype))
                assert same(wanted, mean(P, step, dtype))
                assert same(backward(ours, inputs(step, dtype)), wanted)
            assert {report.key for report in handle.reports()} == set(KEYS)
            assert [report.step for report in handle.reports()] == [step for step in range(steps) for _ in KEYS]
            assert all(report.sent == report.cost for report in handle.reports())
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
    P = dist.get_world_size()
    for skip in (1, 2, P - 1):
        net = made()
        handle = on(net, SkipReduce(skip=skip, protect=["first.bias"] if skip == 2 else ()))
        drawn: dict[str, list[int]] = {}
        for step in range(3):
            found = backward(net, inputs(step))
            reports = {report.key: report for report in handle.take_reports()}
            for name, grad in found.items():
                key = name.partition(".")[0] if "." in name else "(root)"
                protected = skip == 2 and name == "first.bias"
                assert torch.equal(grad, mean_over_contributors(name, step, offsets(reports[key]), protected))
            for key, report in reports.items():
                assert len(offsets(report)) == skip
                assert report.sent == report.cost
                drawn[key] = drawn.get(key, []) + offsets(report)
                chunk = 4 * report.elements // P
                residual = 4 * 2 if skip == 2 and key == "first" else 0  # two elements of the bias on each rank
                reduced = report.cost.nbytes - announcement_cost(P).nbytes
                assert reduced == (P - 1 - skip) * chunk + skip * residual
        mine = torch.tensor([offset for each in drawn.values() for offset in each])
        assert all(torch.equal(theirs, mine) for theirs in everywhere(mine))
        # P-1 steps: each equally often.
        assert all(sorted(each) == sorted(list(range(1, P)) * skip) for each in drawn.values())
    scaled = made()
    each_unit(scaled, lambda unit: unit.set_force_sum_reduction_for_comms(True))
    handle = on(scaled, SkipReduce(skip=2))
    found = backward(scaled, inputs(0))
    for report in handle.reports():
        for name in (name for name in found if name.startswith(report.key)):
            assert torch.equal(found[name], mean_over_contributors(name, 0, offsets(report)))


def residuals_on_the_shard_axis() -> None:
    for scheme in (
        SkipReduce(skip=2, feedback=True),
        OkTopk(density=0.1),
        OkTopk(density=0.1, dense_steps=1),
        TwoShot(density=0.1, values="float32"),
    ):
        with case(scheme):
            net = made()
            handle = on(net, scheme)
            conserved(handle, net, 3)
            assert flat(handle.state_dict()["scheme"]["residual"]).any()
    net = made()
    handle = on(net, OkTopk(density=1.0))
    for step in range(2):
        assert same(backward(net, inputs(step)), mean(dist.get_world_size(), step))
    for report in handle.reports():
        assert float(report.details["sent_count"]) <= report.elements - report.elements // 4


def changing_sizes() -> None:
    """A parameter that no rank uses at some steps: where names do not matter FSDP2 leaves it out, else it counts as zero."""
    P = dist.get_world_size()
    net = made()
    handle = on(net, SkipReduce(skip=1))
    for step in range(4):
        found = backward(net, inputs(step, leave_out="middle.weight" if step % 2 else ""))
        assert ("middle.weight" in found) == (step % 2 == 0)
        report = next(report for report in handle.take_reports() if report.key == "middle")
        assert report.elements == P * (2 if step % 2 else 2 + 6)
        assert torch.equal(found["middle.bias"], mean_over_contributors("middle.bias", step, offsets(report)))
    net = made()
    handle = on(net, OkTopk(density=1.0))
    found = backward(net, inputs(0, leave_out="middle.weight"))
    assert not found["middle.weight"].any()
    each_unit(net, lambda unit: unit.set_reduce_scatter_unused_params(False))
    with pytest.raises(RuntimeError, match=r"module 'middle' came with 2 elements a shard, and its .* have 8"):
        backward(net, inputs(1, leave_out="middle.weight"))
    as_fsdp(net).reset_iter_state()
    assert same(backward(net, inputs(2)), mean(P, 2))


def accumulated() -> None:
    P = dist.get_world_size()
    for scheme in (Dense(), OkTopk(density=1.0)):
        net = made()
        handle = on(net, scheme)
        for step in range(2):
            net.zero_grad()
            for part in range(3):
                as_fsdp(net).set_requires_gradient_sync(part == 2)
                net(inputs(3 * step + part)).backward()
            parts = [mean(P, 3 * step + part) for part in range(3)]
            assert same(gradients(net), {name: parts[0][name] + parts[1][name] + parts[2][name] for name in SHAPES})
        assert len(handle.reports()) == 8
        net(inputs(6)).backward()  # without zero_grad: added to what is there
        wanted = {name: torch.stack([mean(P, step)[name] for step in (3, 4, 5, 6)]).sum(0) for name in SHAPES}
        assert all(torch.equal(gradients(net)[name], wanted[name]) for name in SHAPES)


def overflow_on_the_shard_axis() -> None:
    for scheme in (SkipReduce(skip=1, feedback=True), OkTopk(density=0.1), TwoShot(density=0.1)):
        net = made()
        handle = on(net, scheme)
        backward(net, inputs(0))
        before = handle.state_dict()["scheme"]["residual"]
        bad = inputs(1)
        if dist.get_rank() == 1:
            bad["middle.weight"][3, 1] = torch.inf
        found = backward(net, bad)
        assert all(grad.isnan().all() for name, grad in found.items() if name.startswith("middle"))
        assert all(grad.isfinite().all() for name, grad in found.items() if not name.startswith("middle"))
        after = handle.state_dict()["scheme"]["residual"]
        assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("middle"))
        assert backward(net, inputs(2))["middle.weight"].isfinite().all()


def skipped_on_the_shard_axis() -> None:
    for scheme in (SkipReduce(skip=2, feedback=True), OkTopk(density=0.1), TwoShot(0.1, "float32")):
        for divided in (False, True):  # by FSDP2, in place, once a bucket is reduced
            net = made()
            each_unit(net, lambda unit, divided=divided: unit.set_force_sum_reduction_for_comms(divided))
            with case((scheme, divided)):
                skipped(on(net, scheme), net)


def shard_axis() -> None:
    for part in (
        exact_on_the_shard_axis,
        skipping_on_the_shard_axis,
        residuals_on_the_shard_axis,
        changing_sizes,
        accumulated,
        overflow_on_the_shard_axis,
        skipped_on_the_shard_axis,
    ):
        with case(part.__name__):
            part()


@pytest.mark.slow
def test_on_the_shard_axis_the_mean_is_over_contributors_and_residuals_lose_nothing() -> None:
    run(shard_axis, 4)


def save(folder: Path) -> dict[str, Tensor]:
    net = made()
    handle = on(net, OkTopk(density=0.1))
    backward(net, inputs(dist.get_world_size()))
    checkpoint.save(handle, folder)
    return handle.state_dict()["scheme"]["residual"]


def load(folder: Path) -> dict[str, Tensor]:
    net = made()
    handle = on(net, OkTopk(density=0.1))
    checkpoint.load(handle, folder)
    backward(net, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    return {name: dist.get_world_size() * grad for name, grad in gradients(net).items()} | {
        f"residual {name}": part for name, part in handle.state_dict()["scheme"]["residual"].items()
    }


def save_copies(folder: Path) -> tuple[Tensor, Tensor]:
    """The residual of each of two copies of two shards, and what was loaded of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net, again = made(mesh["shard"]), made(mesh["shard"])
    handle, other = on(net, OkTopk(density=0.1)), on(again, OkTopk(density=0.1))
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


@pytest.mark.slow
def test_on_another_number_of_shards_residuals_lose_nothing(tmp_path: Path) -> None:
    old, new = run(save, 4, folder=tmp_path), run(load, 2, folder=tmp_path)
    for name in SHAPES:
        residual = torch.stack([rank[name] for rank in old]).sum(0)
        still = torch.stack([rank[f"residual {name}"] for rank in new]).sum(0)
        assert residual.any()
        assert torch.equal((new[0][name].flatten() + still) / 2, residual / 4)

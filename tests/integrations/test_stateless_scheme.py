"""A third party's scheme that has only a name and `reduce` works with every integration."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.distributed import case, run
from sparsync import Bucket, Report, Scheme
from sparsync.comm import Cost
from sparsync.core import Comm
from sparsync.runtime.handle import Handle
from sparsync.schemes import State

pytestmark = pytest.mark.distributed


class StatelessMean(Scheme):
    """The mean gradient."""

    name = "mean"

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        bucket.grad.copy_(comm.all_reduce(bucket.grad) / comm.size)
        n = bucket.grad.numel()
        return Report(self.name, bucket.key, bucket.step, n, n, n, Cost())


Step = Callable[[Tensor], Tensor]  # reduces the given gradient, and returns the result


def ddp() -> tuple[Handle, Step]:
    model = nn.Linear(3, 1, bias=False)
    wrapped = DistributedDataParallel(model)
    handle = sparsync.attach(wrapped, StatelessMean(), options=sparsync.Options(timeout_s=120))

    def step(gradient: Tensor) -> Tensor:
        wrapped.zero_grad()
        wrapped(gradient).backward()
        assert model.weight.grad is not None
        return model.weight.grad.flatten().clone()

    return handle, step


def fsdp2() -> tuple[Handle, Step]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    fully_shard(model, mesh=mesh["shard"])
    with pytest.raises(ValueError, match="mean has no reduce-scatter"):
        sparsync.attach(model, StatelessMean())
    handle = sparsync.attach(
        model, StatelessMean(), options=sparsync.Options(replicate=mesh["replicate"], timeout_s=120)
    )

    def step(gradient: Tensor) -> Tensor:
        model.zero_grad()
        model(gradient).backward()
        assert isinstance(model.weight.grad, DTensor)
        return model.weight.grad.full_tensor().flatten().clone()

    return handle, step


def reducer() -> tuple[Handle, Step]:
    model = nn.Linear(3, 1, bias=False)
    reducer = sparsync.GradientReducer(model, StatelessMean(), options=sparsync.Options(timeout_s=120))

    def step(gradient: Tensor) -> Tensor:
        model.weight.grad = gradient.view(1, 3).clone()
        reducer.reduce()
        return model.weight.grad.flatten()

    return reducer, step


def trained(folder: Path) -> None:
    rank = dist.get_rank()
    for make in (ddp, fsdp2, reducer):
        with case(make.__name__):
            first, step = make()
            assert step(torch.full((3,), 2.0 * rank)).tolist() == [1.0] * 3
            assert not step(torch.full((3,), torch.inf if rank else 0.0)).isfinite().any()
            assert step(torch.full((3,), 4.0 * rank)).tolist() == [2.0] * 3
            assert first.state_dict()["scheme"].get("residual", {}) == {}
            sparsync.checkpoint.save(first, folder / make.__name__)
            dist.barrier()
            second, step = make()
            sparsync.checkpoint.load(second, folder / make.__name__)
            step(torch.zeros(3))
            assert second.reports()[-1].step == 3
    for wrong, cure in (
        (StatelessMean, r"give an instance: StatelessMean\(\.\.\.\)"),
        (object(), "subclass sparsync.Scheme"),
    ):
        for take in (sparsync.attach, sparsync.doctor):
            with pytest.raises(TypeError, match=cure):
                take(DistributedDataParallel(nn.Linear(3, 1)), wrong)  # pyright: ignore[reportArgumentType]


def test_a_name_and_reduce_are_enough_to_train_to_skip_a_step_and_to_resume(tmp_path: Path) -> None:
    run(trained, 2, folder=tmp_path)

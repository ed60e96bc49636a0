"""One call after the backward pass: the same gradients as the scheme gives by itself, in any loop."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.distributed import run
from sparsync import Bucket, GradientReducer, Options, Report
from sparsync.core import Comm
from sparsync.schemes import Dense, State, TopK

pytestmark = pytest.mark.distributed


def gradient(parameter: nn.Parameter, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step + parameter.numel())
    return torch.randint(-8, 9, parameter.shape, generator=generator).to(parameter.dtype)


def resumed(folder: Path) -> None:
    """Four steps at once; and two, a checkpoint, and two by another reducer; all with a loss scaler and a learning rate that change."""

    def trained(
        reducer: GradientReducer, optimizer: torch.optim.Optimizer, scaler: GradScaler, steps: range
    ) -> list[torch.Tensor]:
        found = []
        for step in steps:
            optimizer.param_groups[0]["lr"] = 2.0**-step
            scaler.update(2.0 ** (step + 4))
            scale = scaler.scale(torch.ones(()))
            for parameter in reducer.model.parameters():
                parameter.grad = gradient(parameter, dist.get_rank(), step) * scale
            reducer.reduce()
            found.append(
                torch.cat([each.grad.flatten() for each in reducer.model.parameters() if each.grad is not None])
            )
        return found

    def made() -> tuple[GradientReducer, torch.optim.Optimizer, GradScaler]:
        model, scaler = nn.Linear(8, 8), GradScaler("cpu")
        scaler.scale(torch.ones(()))  # which makes its scale
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return (
            GradientReducer(model, TopK(0.25), optimizer=optimizer, scaler=scaler, options=Options(timeout_s=120)),
            optimizer,
            scaler,
        )

    whole, before, after = made(), made(), made()
    wanted = trained(*whole, range(4))
    trained(*before, range(2))
    sparsync.checkpoint.save(before[0], folder)
    dist.barrier()
    sparsync.checkpoint.load(after[0], folder)
    assert all(map(torch.equal, trained(*after, range(2, 4)), wanted[2:]))
    assert [report.step for report in after[0].take_reports()] == [2, 3]
    weight = next(whole[0].model.parameters())
    came = sum(gradient(weight, rank, step) * 2.0**-step for rank in (0, 1) for step in range(4))
    state = whole[0].state_dict()
    residual = state["scheme"]["residual"]["weight"].view(8, 8) * 2.0**-3 / state["loss_scale"]
    dist.all_reduce(residual)
    written = sum(2 * grad[:64].view(8, 8) * 2.0**-step / 2.0 ** (step + 4) for step, grad in enumerate(wanted))
    assert torch.equal(residual + written, came)  # pyright: ignore[reportArgumentType]


def test_a_reducer_is_saved_and_loaded_and_its_residual_follows_the_learning_rate_and_the_loss_scale(
    tmp_path: Path,
) -> None:
    run(resumed, 2, folder=tmp_path)


def numbered() -> list[int]:
    reducer = GradientReducer(nn.Linear(3, 3), TopK(0.5))
    return [reducer.reduce(step)[0].step for step in (None, None, 7, None, 7)]


def test_steps_are_counted_unless_their_number_is_given() -> None:
    assert run(numbered, 2) == [[0, 1, 7, 8, 7]] * 2


class FailsLate(TopK):
    """One rank fails after its last message, so the other does not notice before the next call."""

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        report = super().reduce(state, bucket, comm)
        if bucket.step == 1:
            through = dist.distributed_c10d._get_default_store()
            if comm.rank == 0:
                through.wait(["through"])
                raise MemoryError("no memory")
            through.set("through", "")
        return report


def coming_apart() -> list[str]:
    model, rank = nn.Linear(2, 1, bias=False), dist.get_rank()
    reducer, seen = sparsync.GradientReducer(model, FailsLate(1.0), options=sparsync.Options(timeout_s=120)), []

    def reduce(step: int) -> None:
        model.weight.grad = torch.full((1, 2), 10.0 * step + rank)
        try:
            reducer.reduce(step)
            seen.append(str(float(model.weight.grad[0, 0])))
        except (MemoryError, RuntimeError) as error:
            seen.append(type(error).__name__)
            if "must agree" in str(error):
                seen.append(f"load a checkpoint on all ranks: {'load a checkpoint on all ranks' in str(error)}")

    reduce(0)
    saved = reducer.state_dict()
    for step in (1, 5) if rank == 0 else (1, 2, 5):
        reduce(step)
    reducer.load_state_dict(saved)
    for step in (5, 6):
        reduce(step)
    return seen


def test_ranks_that_came_apart_must_load_a_checkpoint_and_then_go_on() -> None:
    apart = ["RuntimeError", "load a checkpoint on all ranks: True"]
    first, second = run(coming_apart, 2)
    assert first == ["0.5", "MemoryError", *apart, "50.5", "60.5"]
    assert second == ["0.5", "10.5", "ConnectionLostError", *apart, "50.5", "60.5"]


def test_parameters_on_other_devices_are_another_bucket() -> None:
    for devices in (("cpu", "meta", "cpu"), ("cuda:2", "cuda:3", "cuda:2")):
        reducer = GradientReducer.__new__(GradientReducer)
        with FakeTensorMode():
            reducer.model = nn.ParameterList([torch.empty(2, device=device) for device in devices])
        found = {key: list(parameters) for key, parameters in reducer._buckets().items()}
        assert found == {"float32": ["0", "2"], "float32/1": ["1"]}


def compiled() -> None:
    model = nn.Linear(8, 2)
    reducer = GradientReducer(model, Dense())
    loss = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)
    loss(torch.ones(3, 8)).backward()
    reducer.reduce()
    assert model.bias.grad is not None and torch.equal(model.bias.grad, torch.full((2,), 3.0))
    reducer.close()


def test_a_function_that_calls_an_attached_model_compiles_to_one_graph() -> None:
    run(compiled, 1)


def wrapped_and_sparse() -> None:
    model = nn.Linear(3, 3)
    reducer, copied = GradientReducer(model, Dense()), copy.deepcopy(model)
    DistributedDataParallel(copied)(torch.ones(1, 3))
    ddp = DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match="was put around a model that is attached bare"):
        ddp(torch.ones(1, 3))
    reducer.close()
    ddp(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ValueError, match="'words' has sparse=True"):
        GradientReducer(nn.ModuleDict({"words": nn.Embedding(3, 3, sparse=True)}), Dense())


def test_ddp_around_an_attached_model_and_sparse_embeddings_are_refused() -> None:
    run(wrapped_and_sparse, 1)

"""An attached model in the hands of a user, by public names only: copies, torch.compile, other hooks, other schemes, and the summary."""

import copy
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import sparsync
from helpers.distributed import case, in_turn, run
from helpers.replicas import same
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.schemes import Dense, PerParameter, SkipReduce, TopK

pytestmark = pytest.mark.distributed

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]


def bare(parts: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(parts)))


def ddp(parts: int = 3, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(bare(parts), **options)


def gradients(model: nn.Module, step: int, rank: int | None = None) -> list[Tensor]:
    """The gradients of a step of `model` on batches of its own on each rank."""
    model.zero_grad()
    own = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    model(torch.randn(4, 16, generator=own)).square().sum().backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@contextmanager
def refused(error: type[Exception], *parts: str) -> Iterator[None]:
    with pytest.raises(error) as raised:
        yield
    assert all(part in str(raised.value) for part in parts), raised.value


def names_without_wrappers() -> None:
    inside, around, both = DistributedDataParallel(torch.compile(bare(), backend="eager")), ddp(), bare()
    both[1] = checkpoint_wrapper(both[1])
    found = {}
    for name, model in {
        "inside": inside,
        "around": torch.compile(around, backend="eager"),
        "checkpointed": DistributedDataParallel(both),
    }.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # as where protect= matches nothing
            handle = sparsync.attach(model, SkipReduce(0.5, feedback=True, protect=["1.weight"]))
        assert list(handle.layout()) == NAMES, name
        found[name] = gradients(model, 0), handle.state_dict()  # pyright: ignore[reportArgumentType]
        handle.close()
    assert same(found["inside"][0], found["around"][0]) and same(found["inside"][0], found["checkpointed"][0])
    plain = sparsync.attach(ddp(), SkipReduce(0.5, feedback=True, protect=["1.weight"]))
    plain.load_state_dict(found["inside"][1])
    assert list(plain.state_dict()["layout"]) == NAMES
    compiled_ddp: Any = torch.compile(ddp())
    assert not [each for each in sparsync.doctor(compiled_ddp, Dense()) if each.refused]
    compiled = sparsync.GradientReducer(torch.compile(bare(), backend="eager"), Dense())  # pyright: ignore[reportArgumentType]
    assert list(compiled.layout()) == NAMES


def copies_of_a_model() -> None:
    model = ddp()
    handle = sparsync.attach(model, TopK(density=0.1))
    gradients(model, 0)
    averaged = AveragedModel(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    wanted = gradients(ddp(), 1)
    for other in (copy.deepcopy(model), averaged.module, torch.load(file, weights_only=False)):
        assert same(gradients(other, 1), wanted)  # densely
        own = sparsync.attach(other, TopK(density=1.0))
        gradients(other, 2)
        assert [report.scheme for report in own.reports()] == ["topk"]
        own.close()
    handle.close()


def another_scheme() -> None:
    model, dense = ddp(bucket_cap_mb=0.001), ddp()  # a bucket of each layer
    handle = sparsync.attach(model, Dense(), options=sparsync.Options(dense_below=0))
    assert same(gradients(model, 0), gradients(dense, 0))
    came_in = [torch.zeros_like(each) for each in dense.parameters()]
    written = [torch.zeros_like(each) for each in dense.parameters()]

    def step(number: int) -> None:
        torch._foreach_add_(came_in, gradients(dense, number))  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_(written, gradients(model, number))  # pyright: ignore[reportPrivateImportUsage]

    handle.scheme = TopK(density=0.1)
    for number, scheme in enumerate(
        (None, sparsync.schemes.ExactOkTopk(density=0.05), TopK(density=0.2), sparsync.schemes.ExactMiCRO(density=0.1)),
        1,
    ):
        handle.scheme = scheme or handle.scheme
        step(number)
    for number, density in enumerate((0.02, 0.02, 0.3), 5):
        before = handle.scheme
        handle.set(density=density)
        assert (handle.scheme is before) == (number == 6)
        assert handle.state_dict()["settings"] == repr(handle.scheme)
        step(number)
    with refused(ValueError, "cannot take over", "TopK(density=1.0)"):
        handle.scheme = Dense()
    with refused(ValueError, "no setting 'densty'"):
        handle.set(densty=0.1)
    with refused(ValueError, "density"):
        handle.set(density=2.0)
    handle.scheme = TopK(density=1.0)
    step(8)
    # What went in came out, whatever the schemes: the last step sent all residuals.
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-4) for a, b in zip(came_in, written, strict=True))
    seen = []

    def inside(_: Tensor) -> None:
        try:
            handle.set(density=0.5)
        except RuntimeError as error:
            seen.append(str(error))

    hook = next(model.parameters()).register_hook(inside)
    gradients(model, 10)
    hook.remove()
    assert len(seen) == 1 and "inside a backward pass" in seen[0]
    handle.set(density=0.1 + 0.1 * dist.get_rank())
    told = f"ranks differ: rank 0 has {TopK(density=0.1)}, rank 1 has {TopK(density=0.2)}; give all"
    with refused(RuntimeError, told):
        gradients(model, 11)
    handle.set(density=0.1)
    gradients(model, 11)
    steps = LocalTraining(bare(), torch.optim.SGD(bare().parameters(), 0.1), Dense(), every=1)
    with refused(RuntimeError, "this handle keeps the scheme"):
        steps.scheme = Dense()
    handle.close()


def schemes_by_parameter_for_others() -> None:
    model, dense = ddp(), ddp()
    handle = sparsync.attach(
        model, PerParameter(TopK(density=0.1), {"*bias": Dense()}), options=sparsync.Options(dense_below=0)
    )
    with refused(RuntimeError, "already attached to a scheme", "handle.scheme = ...", "handle.detach()"):
        sparsync.attach(model, TopK())
    came_in, written = (
        [sum(each) for each in zip(*(gradients(reduced, number) for number in range(3)), strict=True)]
        for reduced in (dense, model)
    )
    with refused(
        ValueError,
        "PerParameter cannot take over what PerParameter holds back",
        "assign TopK(density=1.0) to handle.scheme",
    ):
        handle.scheme = PerParameter(TopK(density=0.1), {"0.*": Dense()})
    handle.scheme = TopK(density=1.0)  # takes the residual over, and sends all of it
    rest = zip(written, gradients(model, 3), came_in, gradients(dense, 3), strict=True)
    assert all(torch.allclose(a + b, c + d, rtol=1e-5, atol=1e-4) for a, b, c, d in rest)
    handle.close()


def detached() -> None:
    model, dense, kept = ddp(), ddp(), ddp()
    handle, other = sparsync.attach(model, TopK(density=0.1)), sparsync.attach(kept, TopK(density=0.1))
    gradients(model, 0)
    gradients(kept, 0)
    handle.detach()
    handle.detach()
    assert len(handle.reports()) == 1 and handle.state_dict()["scheme"]["residual"]
    assert "topk" in str(handle.summary())
    changes = (
        lambda: handle.set(density=0.2),
        lambda: handle.set(density=0.1),
        lambda: setattr(handle, "scheme", Dense()),
    )
    for change in changes:
        with refused(RuntimeError, "this handle is detached; attach again"):
            change()
    assert same(gradients(model, 1), gradients(dense, 1))
    assert len(handle.reports()) == 1 and handle.closed
    # The residual is in the handle's state, and goes on in another handle that is given it.
    again = sparsync.attach(model, handle.scheme)
    again.load_state_dict(handle.state_dict())
    assert same(gradients(model, 2), gradients(kept, 2))
    again.detach()
    other.close()


def summaries() -> None:
    model = ddp(bucket_cap_mb=0.001)
    handle = sparsync.attach(model, TopK(density=0.1), options=sparsync.Options(join_mb=0, dense_below=0))
    assert str(handle.summary()) == f"rank {dist.get_rank()} of 2: 0 steps, 816 trained parameters"
    for step in range(3):
        gradients(model, step)
        handle.take_reports()  # the summary remembers
    summary = handle.summary()
    reduced = summary.total
    assert summary.steps == 3 and reduced.elements == 3 * 816 and reduced.nbytes > 0
    assert reduced.selected < reduced.union < reduced.elements
    assert summary.hidden is not None and 0 <= summary.hidden.exposed_s <= summary.hidden.reducing_s
    text = str(summary)
    assert all(part in text for part in ("bucket0", "exchange", "accumulate", "ms/step", "the backward pass hid"))
    plain = bare()
    reducer = sparsync.GradientReducer(plain, TopK(density=0.1))
    gradients(plain, 0)
    reducer.reduce()
    assert "after the backward pass" in str(reducer.summary()) and reducer.summary().steps == 1
    parameters = dict(plain.named_parameters())
    frozen = next(iter(parameters.values())).requires_grad_(False)
    assert reducer.summary().parameters == 816 - frozen.numel()
    reducer.close()
    handle.close()


def scheduled_density() -> None:
    for scheme in (
        sparsync.schemes.ExactMiCRO(0.05),
        sparsync.schemes.ExactExDyna(0.05),
        sparsync.schemes.ExactOkTopk(0.05),
        sparsync.schemes.TwoShot(0.05),
    ):
        with case(scheme.name):
            model, n = bare(16), 16 * 272
            reducer, report = sparsync.GradientReducer(model, scheme), None
            left = torch.zeros(n)  # came in and not written, summed over ranks
            for step in range(12):
                density = (0.05, 0.2)[step // 4 % 2]
                reducer.set(density=density)
                for rank in (0, 1):
                    left += torch.cat([each.flatten() for each in gradients(model, step, rank)])
                gradients(model, step)
                report = reducer.reduce()[0]
                left -= 2 * torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
            assert report is not None and 0.03 < report.density < 0.12, report
            residual = reducer.state_dict()["scheme"]["residual"]
            held = torch.cat([residual[name] for name, _ in model.named_parameters()])
            dist.all_reduce(held)
            assert torch.allclose(held, left, rtol=1e-4, atol=1e-2 * float(left.abs().max()) / 100)
            reducer.close()


def sharded() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = bare()
    model[1] = checkpoint_wrapper(model[1])
    for module in (model[0], model[1], model):
        fully_shard(module, mesh=mesh["shard"])
    handle = sparsync.attach(model, TopK(density=0.1), options=sparsync.Options(replicate=mesh["replicate"]))
    assert sorted(handle.layout()) == sorted(NAMES)
    gradients(model, 0)
    handle.set(density=0.5)
    gradients(model, 1)
    assert {report.key for report in handle.reports()} == {"(root)", "1", "0"}
    assert handle.reports()[-1].selected == 272 // 2
    summary = handle.summary()
    assert summary.steps == 2 and summary.hidden is not None and "the backward pass hid" in str(summary)
    sparsync.GradientReducer(bare(), handle.scheme).close()  # a scheme may be that of several models
    handle.detach()
    sparsync.attach(model, handle.scheme, options=sparsync.Options(replicate=mesh["replicate"]))
    gradients(model, 2)


def test_an_attached_model_can_be_copied_hooked_switched_detached_and_summed_up() -> None:
    parts = (copies_of_a_model, another_scheme, schemes_by_parameter_for_others, detached, summaries)
    run(in_turn, 2, parts=parts)


@pytest.mark.slow
def test_wrappers_change_no_names_and_density_may_follow_a_schedule_behind_every_integration() -> None:
    run(in_turn, 2, parts=(names_without_wrappers, scheduled_density, sharded))

"""attach(..., parameters=) over gloo: the same bits everywhere, forward as in backward, and errors that do not pile up."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint as recomputed
from torch.utils.checkpoint import set_checkpoint_early_stop

import sparsync
from helpers.distributed import case, in_turn, run
from helpers.fsdp_training import KEYS, SHAPES, TIMEOUT_S, Net, as_fsdp, each_unit, everywhere, inputs, made, on, saved
from sparsync.attached.fsdp2 import Fsdp2Handle
from sparsync.attached.fsdp2_gather import SharedShards
from sparsync.attached.fsdp2_units import units_of
from sparsync.collectives.values import gather_differences
from sparsync.comm import LocalWorld, MeteredComm
from sparsync.comm.announcement import announcement_cost
from sparsync.comm.metered import all_gather_cost
from sparsync.schemes import Dense, SkipReduce, TopK
from sparsync.testing.world import same_bits
from sparsync.wire import ValueCodec, Values
from test_ddp import batch

ROUNDED: tuple[Values, ...] = ("bfloat16", "int8", "int4")
TYPES = (torch.float32, torch.bfloat16, torch.float64)
Weights = dict[str, Tensor]


def test_all_ranks_hold_the_same_bits_and_what_stands_still_becomes_exact() -> None:
    P = 3
    m = 300  # a block of 256 and a part of one

    def program(comm: MeteredComm) -> list[Tensor]:
        seen = []
        for values in ("float32", *ROUNDED, "ternary", "sign"):
            for dtype in TYPES:
                codec = ValueCodec(values)
                shard = torch.randn(m, generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
                held = torch.full((P * m,), torch.nan, dtype=dtype)
                gather_differences(shard, held, ValueCodec(), comm)
                assert same_bits(held.view(P, m)[comm.rank], shard)
                shard = shard * 1.01
                comm.take()
                errors = []
                for _ in range(12):
                    gather_differences(shard, held, codec, comm)
                    assert comm.take()[0] == all_gather_cost(codec.nbytes(m, dtype), P)
                    errors.append((held.view(P, m)[comm.rank] - shard).abs().max())
                    seen.append(held.clone())
                if values not in ("ternary", "sign") and dtype != torch.float64:
                    assert errors[-1] == 0
                assert errors[-1] <= errors[0]
        return seen

    first, *others = LocalWorld(P).run(lambda comm: program(MeteredComm(comm)))
    assert all(same_bits(a, b) for other in others for a, b in zip(first, other, strict=True))


def gathering(net: nn.Module, parameters: Values) -> Fsdp2Handle:
    handle = sparsync.attach(net, Dense(), options=sparsync.Options(parameters=parameters, timeout_s=TIMEOUT_S))
    assert isinstance(handle, Fsdp2Handle)
    return handle


def watched(net: Net) -> Weights:
    """Where each forward pass leaves a copy of the weights it was given."""
    seen: Weights = {}
    for prefix, module in (("", net), ("first.", net.first), ("middle.", net.middle), ("last.", net.last)):

        def note(module: nn.Module, _: object, prefix: str = prefix) -> None:
            seen.update({prefix + name: each.detach().clone() for name, each in module.named_parameters(recurse=False)})

        module.register_forward_pre_hook(note)
    return seen


def there_and_back(net: Net, step: int, call: Callable[..., Tensor] | None = None) -> Weights:
    """The weights that a backward pass was given: each is the derivative of the loss by what it was multiplied with."""
    given = {name: x.requires_grad_() for name, x in inputs(step).items()}
    (net(given) if call is None else call(given)).backward()
    return {name: x.grad for name, x in given.items() if x.grad is not None}


def forward(net: Net) -> None:
    """A forward pass that no backward pass follows; the root, which waits for one, gives its weights back."""
    net(inputs(0))
    as_fsdp(net).reshard()


def moved(net: nn.Module, by: float = 0.3) -> None:
    """What an optimizer does: other weights, other on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in net.parameters():
            local = parameter.to_local()  # pyright: ignore[reportAttributeAccessIssue]
            local += by * torch.randn(local.shape, generator=generator).to(local.dtype)


def whole(net: nn.Module) -> Weights:
    """The weights that the owners have."""
    return {name: each.full_tensor().detach() for name, each in net.named_parameters()}  # pyright: ignore[reportAttributeAccessIssue]


def equal(found: Weights, wanted: Weights) -> bool:
    return found.keys() == wanted.keys() and all(
        same_bits(found[name].float(), wanted[name].float()) for name in wanted
    )


def agreed(found: Weights) -> bool:
    return all(same_bits(theirs, x) for x in found.values() for theirs in everywhere(x))


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 41), nn.Tanh(), nn.Linear(41, 40), nn.Tanh(), nn.Linear(40, 3))
    for module in (model[0], model[2], model[4], model):
        fully_shard(module)
    return model


def trained(parameters: Values | None, **options: Any) -> tuple[list[Tensor], float]:
    """Train with dense gradients; None: by FSDP2 alone."""
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    if parameters is not None:
        sparsync.attach(model, Dense(), options=sparsync.Options(parameters=parameters, timeout_s=TIMEOUT_S))
    loss = torch.zeros(())
    for step in range(8):
        x = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        loss = (model(x) - x[:, :3]).square().mean()
        loss.backward()
        optimizer.step()
    return list(whole(model).values()), loss.item()


def as_torch() -> None:
    plain, loss = trained(None)
    found, same = trained("float32")
    assert same == loss
    assert all(map(same_bits, found, plain))
    for parameters in ROUNDED:
        assert abs(trained(parameters)[1] / loss - 1) < 0.05


def there_as_back() -> None:
    mixed: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for parameters in ROUNDED:
        for options in ({}, mixed):
            with case((parameters, options)):
                net = made(**options)
                handle, seen = gathering(net, parameters), watched(net)
                for step in range(3):
                    back = there_and_back(net, step)
                    assert equal(back, seen)
                    assert agreed(seen)
                    wanted = whole(net)
                    if step == 0:
                        assert equal(seen, wanted if not options else {n: x.bfloat16() for n, x in wanted.items()})
                    assert all((seen[name].float() - wanted[name]).abs().max() < 0.3 for name in SHAPES)
                    moved(net)
                reports = handle.parameter_reports()
                assert [report.key for report in reports] == list(KEYS) * 3  # nothing in the backward pass
                assert [report.step for report in reports] == [0] * 4 + [1] * 4 + [2] * 4
                assert all(report.sent == report.cost for report in reports)
                assert not any(report.key == "parameters" for report in handle.reports())
                first, last = reports[1], reports[-1]
                m, element = first.elements // dist.get_world_size(), 2 if options else 4
                announced = announcement_cost(2).nbytes
                assert first.cost.nbytes == announced + element * m
                rounded = ValueCodec(parameters).nbytes(m, torch.float32)
                assert last.cost.nbytes == announced + min(element * m, rounded)


def recomputing() -> None:
    """Activations that are computed again inside the backward pass see the weights of the forward pass."""
    net = made()
    handle, seen = gathering(net, "int4"), watched(net)
    forward(net)
    moved(net)
    passes: list[Weights] = []
    net.register_forward_hook(lambda *_: passes.append(dict(seen)))
    with set_checkpoint_early_stop(False):
        back = there_and_back(net, 0, lambda given: recomputed(net, given, use_reentrant=False))  # pyright: ignore[reportArgumentType]
    there, again = passes
    assert equal(there, again)
    assert equal(there, back)
    assert len(handle.parameter_reports()) == 8


def loaded() -> None:
    net = made()
    handle, seen = gathering(net, "int4"), watched(net)
    forward(net)
    kept, state = {name: x.clone() for name, x in net.state_dict().items()}, saved(handle)
    assert "parameters" not in state
    moved(net, by=3.0)
    forward(net)
    assert not equal(seen, whole(net))
    net.load_state_dict(kept)
    forward(net)
    assert equal(seen, whole(net))
    assert all(report.details["exact"] for report in handle.parameter_reports()[-4:])
    for jump in (lambda: handle.load_state_dict(state), handle.gather_exactly):
        moved(net, by=3.0)
        jump()
        forward(net)
        assert equal(seen, whole(net))
    moved(net, by=3.0)
    forward(net)
    assert not equal(seen, whole(net))
    net.middle.load_state_dict({name: x.clone() for name, x in net.middle.state_dict().items()})  # this part alone
    forward(net)
    assert [report.key for report in handle.parameter_reports()[-4:] if report.details["exact"]] == ["middle"]


def failing() -> None:
    net = made()
    handle, seen = gathering(net, "int8"), watched(net)
    there_and_back(net, 0)
    moved(net)
    gather = handle._gather
    assert gather is not None
    shared: SharedShards = gather._shared
    plain = shared.reduce

    def unlucky(bucket: Any, comm: Any) -> Any:
        if bucket.key == "middle" and dist.get_rank() == 1:
            raise MemoryError("no room")
        return plain(bucket, comm)

    shared.reduce = unlucky  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(
        RuntimeError, match=r"the parameters of module 'middle' were not gathered .*MemoryError: no room"
    ) as error:
        forward(net)
    assert ("rank 1 reports" in str(error.value)) == (dist.get_rank() == 0)
    shared.reduce = plain
    as_fsdp(net).reset_iter_state()
    back = there_and_back(net, 1)
    assert equal(back, seen)
    assert equal(seen, whole(net))
    if dist.get_rank() == 1:
        handle.gather_exactly()  # on one rank alone
    with pytest.raises(
        RuntimeError, match=r"'\(root\)' were not gathered .* ranks differ: rank . has .* nothing is held yet"
    ):
        net(inputs(0))
    as_fsdp(net).reset_iter_state()
    assert equal(there_and_back(net, 2), whole(net))


def refusals() -> None:
    mixed = Net()
    mixed.middle.bfloat16()
    for module in (mixed.first, mixed.last, mixed):  # the root has the parameters of the middle too
        fully_shard(module)
    with pytest.raises(RuntimeError, match=r"'\(root\)' have several types"):
        gathering(mixed, "int8")
    net = made()
    handle, before = gathering(net, "int8"), [unit.all_gather for unit in units_of(made())]
    handle.close()
    with pytest.raises(RuntimeError, match=r"module '.root.' were not gathered .* this handle is closed"):
        net(inputs(0))
    as_fsdp(net).reset_iter_state()
    handle.detach()
    assert [type(unit.all_gather) for unit in units_of(net)] == [type(each) for each in before]
    forward(net)
    assert not handle.parameter_reports()
    with pytest.raises(RuntimeError, match=r"ranks must agree, but rank . has .*parameters=int"):
        gathering(made(), "int8" if dist.get_rank() else "int4")
    assert on(made(), SkipReduce()).reports() == []


@pytest.mark.slow
@pytest.mark.distributed
def test_weights_are_the_same_everywhere_there_and_back_and_follow_their_owners() -> None:
    run(in_turn, 2, parts=(as_torch, there_as_back, recomputing, loaded, failing, refusals))


def fewer_in_backward_and_replicas() -> None:
    net = made()
    each_unit(net, lambda unit: unit.set_reshard_after_forward(False))
    handle, seen = gathering(net, "int8"), watched(net)
    for step in range(2):
        assert equal(there_and_back(net, step), seen)
        moved(net)
    assert len(handle.parameter_reports()) == 8
    fewer = made(reshard_after_forward=2)
    with pytest.raises(RuntimeError, match="fewer ranks in the backward pass"):
        gathering(fewer, "int8")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = made(mesh["shard"])
    handle = sparsync.attach(
        net,
        TopK(density=0.5),
        options=sparsync.Options(replicate=mesh["replicate"], parameters="int4", timeout_s=TIMEOUT_S),
    )
    seen, optimizer = watched(net), torch.optim.AdamW(net.parameters())
    for step in range(3):
        optimizer.zero_grad()
        assert equal(there_and_back(net, step), seen)
        assert agreed(seen)  # on the replicas too: their shards are the same
        optimizer.step()


@pytest.mark.slow
@pytest.mark.distributed
def test_replicas_stay_equal_and_weights_that_are_kept_are_gathered_once() -> None:
    run(fewer_in_backward_and_replicas, 4)

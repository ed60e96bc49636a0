"""Gradient clipping and residuals: what it cuts off of a spike does not come back, and routine clipping changes no residual."""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import sparsync
from helpers.distributed import case, run
from helpers.fsdp_training import Net, inputs, made, same
from sparsync import GradientReducer
from sparsync.comm import LocalWorld
from sparsync.core import Comm, generator
from sparsync.runtime.comparison import Comparison
from sparsync.runtime.handle import Handle
from sparsync.runtime.rescaling import Clipping, ResidualRescaler, UsualShare, _norms

P, SHAPES = 2, {"bias": (20,), "head": (40,), "weight": (30, 20)}  # a ParameterDict sorts its names
N = sum(torch.Size(shape).numel() for shape in SHAPES.values())
SCHEMES = (
    "topk:density=0.05",
    "two_shot:density=0.05:values=int4",
    "two_shot:density=1.0:values=int4",
    "exact_oktopk:density=0.05",
)


class Reducer(GradientReducer):
    """A GradientReducer over any communicator, and a step of its optimizer with gradients that are given."""

    def __init__(
        self, comm: Comm, scheme: str, scaler: GradScaler | None = None, follows: bool = True, several: bool = False
    ) -> None:
        self.model = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()})
        parameters = list(self.model.parameters())
        self.optimizer, *others = (
            SGD(each, lr=1.0) for each in ([parameters[:1], parameters[1:]] if several else [parameters])
        )
        self.optimizers = [self.optimizer, *others]
        names = {id(each): name for name, each in self.model.named_parameters()}
        rescaler = ResidualRescaler(names, self.optimizers if follows else None, scaler)
        Handle.__init__(self, sparsync.schemes.from_text(scheme), comm, rescaler, Comparison([], names, None, every=0))
        self.rank, self.scaler = comm.rank, scaler

    def parts(self, grad: Tensor) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """Return the parameters, each with its part of the gradient, [n]."""
        parameters = list(self.model.parameters())
        return zip(parameters, grad.split([each.numel() for each in parameters]), strict=True)

    def train(
        self, grad: Tensor, clip: Callable[[Sequence[nn.Parameter]], object] = lambda parameters: None, by: int = 0
    ) -> Tensor:
        """Take a step of optimizer `by` with this rank's gradient [n], and return the reduced one before `clip`."""
        scaler, parameters = self.scaler, list(self.model.parameters())
        for each, part in self.parts(grad):
            each.grad = (part if scaler is None else scaler.scale(part)).view_as(each).clone()
        self.reduce()
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        reduced = flat(parameters)
        clip(parameters)
        if scaler is None:
            self.optimizers[by].step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        return reduced

    @property
    def weights(self) -> Tensor:
        return torch.cat([each.detach().flatten() for each in self.model.parameters()])

    @property
    def residual(self) -> Tensor:
        held = self.state_dict()["scheme"]["residual"]
        scale = self._rescaler.units.scale or 1.0
        return torch.cat([held[name] for name in SHAPES]) / scale


def flat(parameters: Sequence[nn.Parameter]) -> Tensor:
    return torch.cat([each.grad.flatten().clone() for each in parameters if each.grad is not None])


def times(factor: float) -> Callable[[Sequence[nn.Parameter]], object]:
    return lambda parameters: [each.grad.mul_(factor) for each in parameters if each.grad is not None]


def to_norm(most: float) -> Callable[[Sequence[nn.Parameter]], object]:
    return lambda parameters: nn.utils.clip_grad_norm_(parameters, most)


def whole(rank: int, step: int) -> Tensor:
    """Whole numbers whose sums, halves and quarters are exact."""
    return 8.0 * torch.randint(-8, 9, (N,), generator=generator(rank, "gradient", step))


def drawn(rank: int, step: int) -> Tensor:
    """A gradient of norm about 1, of which the ranks share a part."""
    own, common = (torch.randn(N, generator=generator(seed, "gradient", step)) for seed in (rank, -1))
    return (0.6 * own + 0.8 * common) / N**0.5


@pytest.mark.parametrize("scheme", [*SCHEMES, "dgc:density=0.3"])  # from 0.25 on the density of dgc is constant
def test_a_step_of_which_nothing_is_applied_leaves_the_residual_as_it_was(scheme: str) -> None:
    def body(comm: Comm) -> None:
        ours, never = Reducer(comm, scheme), Reducer(comm, scheme)
        for step in range(3):
            # The second one is cut for both, so that residuals are held from then on.
            for each in (ours, never):
                each.train(drawn(comm.rank, step), times(0.5 if step == 1 else 1.0))
        before = ours.residual
        assert torch.equal(before, never.residual)
        ours.train(100 * drawn(comm.rank, 3), times(0.0))
        assert torch.equal(ours.residual, before)
        # The regions of Ok-Topk follow the survivors of the step.
        same_next = torch.equal(ours.train(drawn(comm.rank, 4)), never.train(drawn(comm.rank, 4)))
        assert same_next or scheme.startswith("exact_oktopk")

    LocalWorld(P).run(body)


@pytest.mark.parametrize(
    "scheme", ["topk:density=0.05", "two_shot:density=0.05", "exact_oktopk:density=0.05", "exact_micro:density=0.1"]
)
def test_of_a_step_that_is_cut_as_much_comes_in_as_goes_out(scheme: str) -> None:
    """In the units in which gradients are applied: what was + a quarter of all gradients = a quarter of P x the mean + what is left."""

    def body(comm: Comm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        reducer = Reducer(comm, scheme)
        reducer._rescaler.units.clipping = [UsualShare(1.0, 32, cuts=True)]
        for step in range(4):
            reducer.train(whole(comm.rank, step))
        before = reducer.residual
        reduced = reducer.train(grad := 64 * whole(comm.rank, 4), times(0.25))
        return before, grad, reduced, reducer.residual

    ranks = LocalWorld(P).run(body)
    before, grads, _, after = (torch.stack(each).double().sum(dim=0) for each in zip(*ranks, strict=True))
    assert before.any()
    assert torch.equal(before + 0.25 * grads, 0.25 * P * ranks[0][2].double() + after)


def test_optimizers_that_step_in_turn_each_have_a_usual_share_and_keep_it_in_the_state() -> None:
    """As those of a GAN: one is always cut to a quarter, the other never, and no residual changes by that."""

    def body(comm: Comm) -> None:
        follows, ignores = (Reducer(comm, "topk:density=0.05", several=True, follows=each) for each in (True, False))
        for step in range(6):
            for each in (follows, ignores):
                each.train(drawn(comm.rank, step), times(0.25 if step % 2 else 1.0), by=step % 2)
        assert torch.equal(follows.residual, ignores.residual)
        state = follows.state_dict()
        assert state["clipping"][1:] == [{"mean": 0.25, "steps": 3, "cuts": False}]
        again = Reducer(comm, "topk:density=0.05", several=True)
        again.load_state_dict(state)
        for each in (follows, again):
            each.train(64 * drawn(comm.rank, 7), times(2.0**-8), by=1)
        assert torch.equal(follows.residual, again.residual)
        assert follows.state_dict()["clipping"] == again.state_dict()["clipping"]

    LocalWorld(P).run(body)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_clipping_that_is_the_same_at_every_step_changes_no_bit_of_the_residual(scheme: str, share: float) -> None:
    def body(comm: Comm) -> None:
        follows, ignores = Reducer(comm, scheme), Reducer(comm, scheme, follows=False)
        for step in range(6):
            for each in (follows, ignores):
                each.train(drawn(comm.rank, step), times(share))
        assert torch.equal(follows.residual, ignores.residual)
        assert follows.state.vectors.by_kind("residual").held == {}
        assert follows.state_dict()["clipping"] == [{"mean": share, "steps": 6, "cuts": False}]

    LocalWorld(P).run(body)


def test_a_training_with_a_loss_scaler_has_the_bits_of_one_without() -> None:
    """The scale doubles and halves, always between two powers of two, spikes are clipped, and one step is skipped."""

    def body(comm: Comm) -> None:
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        plain, scaled = Reducer(comm, "topk:density=0.05"), Reducer(comm, "topk:density=0.05", scaler)
        scales = set()
        for step in range(14):
            grad = drawn(comm.rank, step) * (100 if step in (4, 9) else 1)
            assert torch.equal(plain.train(grad, to_norm(1.0)), scaled.train(grad, to_norm(1.0)))
            assert torch.equal(plain.weights, scaled.weights)
            assert torch.equal(plain.residual, scaled.residual)
            scales.add(scaler.get_scale())
            if step == 6:  # skipped: nothing is applied, and the residual stays
                scaled.train(torch.full((N,), torch.inf), to_norm(1.0))
        assert len(scales) > 2
        assert plain.state_dict()["clipping"][0]["cuts"]

    LocalWorld(P).run(body)


def test_a_training_that_is_resumed_after_a_spike_goes_on_to_the_same_bits() -> None:
    """Saved before the next step settles what the spike has left, and after a first cut."""

    def body(comm: Comm) -> None:
        whole, again = (Reducer(comm, "two_shot:density=1.0:values=int4") for _ in range(2))
        for step in range(8):
            grad = drawn(comm.rank, step) * (50 if step in (2, 4, 7) else 1)
            whole.train(grad, to_norm(1.0))
            if step == 4:
                again.load_state_dict(whole.state_dict())
                again.optimizer.load_state_dict(whole.optimizer.state_dict())
                again.model.load_state_dict(whole.model.state_dict())
            elif step > 4:
                again.train(grad, to_norm(1.0))
        assert torch.equal(again.weights, whole.weights)
        assert torch.equal(again.residual, whole.residual)
        assert again.state_dict()["clipping"] == whole.state_dict()["clipping"]

    LocalWorld(P).run(body)


def test_a_gradient_that_is_reduced_twice_before_a_step_counts_as_one() -> None:
    """As under DDP without no_sync: the second time the gradient has the first mean in it."""

    def body(comm: Comm) -> None:
        reducer = Reducer(comm, "topk:density=0.05")
        reducer._rescaler.units.clipping = [UsualShare(1.0, 32, cuts=True)]
        reducer.train(drawn(comm.rank, 0))
        before = reducer.residual
        for step in (1, 2):
            for each, part in reducer.parts(drawn(comm.rank, step)):
                each.grad = (0 if step == 1 or each.grad is None else each.grad) + part.view_as(each)
            reducer.reduce()
        times(0.0)(list(reducer.model.parameters()))
        reducer.optimizer.step()
        assert torch.equal(reducer.residual, before)

    LocalWorld(P).run(body)


def behind_every_wrapper() -> None:
    mesh = init_device_mesh("cpu", (P, 1), mesh_dim_names=("replicate", "shard"))
    parallel = DistributedDataParallel(Net())
    nets: dict[str, tuple[nn.Module, nn.Module, str]] = {
        "DDP": (parallel.module, parallel, "topk:density=0.1"),
        "a shard axis": ((sharded := made()), sharded, "two_shot:density=0.2:values=int4"),
        "a replicate axis": ((replicated := made(mesh)), replicated, "topk:density=0.1"),
    }
    for wrapper, (net, wrapped, scheme) in nets.items():
        with case(wrapper):
            optimizer = SGD(net.parameters(), lr=0.5)
            handle = sparsync.attach(
                wrapped,
                sparsync.schemes.from_text(scheme),
                optimizer=optimizer,
                options=sparsync.Options(timeout_s=20, dense_below=0),
            )
            held = []
            for step, share in enumerate((1.0, 1.0, 0.25, 1.0, 0.0)):
                net.zero_grad()
                wrapped({name: 8 * each for name, each in inputs(step).items()}).backward()
                times(share)(list(net.parameters()))
                optimizer.step()
                held.append(handle.state_dict())
            before, after = (each["scheme"]["residual"] for each in held[-2:])
            assert any(bool(each.any()) for each in before.values())
            assert same(after, before)
            shares = [each["clipping"][0] for each in held]
            assert [each["cuts"] for each in shares] == [False, False, True, True, True]
            assert [each["mean"] for each in shares] == pytest.approx([1.0, 1.0, 0.75, 0.8125, 0.65])
            handle.detach()
            assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.distributed
def test_behind_every_wrapper_a_step_of_which_nothing_is_applied_leaves_the_residual_as_it_was() -> None:
    run(behind_every_wrapper, P)


# The share itself, without a world.


class Watched:
    """Parameters, their optimizer, and a Clipping that was told the gradients as they are now."""

    def __init__(
        self, sizes: Sequence[int] = (6, 3), dtype: torch.dtype = torch.float32, make: Callable[..., Optimizer] = SGD
    ) -> None:
        self.parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
        self.optimizer = make(self.parameters, lr=1.0)
        self.names = {id(each): f"p{number}" for number, each in enumerate(self.parameters)}
        self.clipping = Clipping(self.optimizer, self.names)
        self.write([torch.arange(1.0, size + 1).to(dtype) for size in sizes])

    def write(self, grads: Sequence[Tensor | None]) -> None:
        for each, grad in zip(self.parameters, grads, strict=True):
            each.grad = None if grad is None else grad.clone()
        written = {f"p{number}": grad for number, grad in enumerate(grads) if grad is not None}
        self.clipping.written(written, _norms([*written.values()]))

    def share(self) -> float | None:
        self.optimizer.step()
        found = self.clipping.take()
        return None if found is None else found[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_share_is_what_clipping_has_left_of_the_norm(dtype: torch.dtype) -> None:
    watched = Watched(dtype=dtype)
    assert watched.share() == 1.0
    for large in (8.0, 30000.0):  # squares beyond 16 bits
        watched.write([torch.full((6,), large, dtype=dtype), torch.full((3,), large, dtype=dtype)])
        nn.utils.clip_grad_value_(watched.parameters, large / 2)
        assert watched.share() == 0.5


def test_clipping_of_a_spike_whose_norm_overflows_applies_nothing() -> None:
    watched = Watched()
    watched.write([torch.full((6,), 1e38), torch.ones(3)])
    nn.utils.clip_grad_norm_(watched.parameters, 1.0)
    assert watched.share() == 0.0


@pytest.mark.parametrize(
    ("written", "applied"),
    [
        ([torch.zeros(6), torch.zeros(3)], [torch.zeros(6), torch.zeros(3)]),
        ([torch.full((6,), torch.nan), torch.ones(3)], [torch.full((6,), torch.nan), torch.ones(3)]),
        ([torch.full((6,), torch.inf), torch.ones(3)], [torch.full((6,), torch.inf), torch.ones(3)]),
        ([torch.ones(6), torch.ones(3)], [torch.ones(6), torch.full((3,), torch.nan)]),
        ([torch.ones(6), torch.ones(3)], [None, None]),
    ],
    ids=["zero", "nan", "inf", "nan-later", "none"],
)
def test_a_step_without_a_finite_norm_has_no_share(written: list[Tensor], applied: list[Tensor | None]) -> None:
    watched = Watched()
    watched.write(written)
    for each, grad in zip(watched.parameters, applied, strict=True):
        each.grad = grad
    assert watched.share() is None
    watched.write([torch.ones(6), torch.ones(3)])
    assert watched.share() == 1.0


def test_a_parameter_that_no_rank_used_does_not_count() -> None:
    """Its gradient stays None, or zero, whatever the scheme wrote for it from its residual."""
    for unused in (None, torch.zeros(3)):
        watched = Watched()
        watched.write([torch.ones(6), torch.full((3,), 100.0)])
        watched.parameters[1].grad = unused
        assert watched.share() == 1.0


def test_an_optimizer_of_some_parameters_speaks_for_these_only() -> None:
    watched = Watched()
    own = SGD(watched.parameters[:1], lr=1.0)
    clipping = Clipping(own, watched.names)
    clipping.written(["p0", "p1"], [torch.tensor(6**0.5), torch.tensor(3**0.5)])
    watched.parameters[0].grad, watched.parameters[1].grad = torch.full((6,), 0.5), torch.ones(3)
    own.step()
    assert clipping.take() == (["p0"], 0.5)
    assert clipping.take() is None
    watched.optimizer.step()
    assert clipping.take() is None


@pytest.mark.parametrize("by_name", [True, False])
def test_a_step_with_a_closure_is_measured_when_the_closure_has_clipped(by_name: bool) -> None:
    watched = Watched()

    def closure() -> float:
        watched.write([torch.full((6,), 2.0), torch.full((3,), 2.0)])
        times(0.5)(watched.parameters)
        return 7.0

    loss = watched.optimizer.step(closure=closure) if by_name else watched.optimizer.step(closure)
    assert loss == 7.0
    found = watched.clipping.take()
    assert found is not None
    assert found[1] == 0.5


def test_a_fused_optimizer_that_unscales_by_itself_counts_without_the_scale() -> None:
    watched, scaler = Watched(make=partial(SGD, fused=True)), GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(1))
    watched.write([torch.full((6,), 64.0), torch.full((3,), 64.0)])
    scaler.step(watched.optimizer)
    found = watched.clipping.take()
    assert found is not None
    assert found[1] == 1 / 64


def test_gradients_that_add_up_have_no_share_as_their_norm_is_not_known() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = SGD([parameter], lr=1.0)
    clipping = Clipping(optimizer, {id(parameter): "p"}, adds_up=True)
    for count in (2, 1):
        for _ in range(count):
            clipping.written(["p"], [torch.tensor(2.0)])
        parameter.grad = torch.full((4,), float(count))
        optimizer.step()
        assert clipping.take() == (None if count == 2 else (["p"], 1.0))


def test_the_hook_keeps_nothing_alive_and_goes_with_its_handle() -> None:
    watched = Watched()
    hooks = watched.optimizer._optimizer_step_pre_hooks
    assert len(hooks) == 1
    watched.clipping.close()
    watched.clipping.close()
    assert not hooks
    again = weakref.ref(Clipping(watched.optimizer, watched.names))
    assert again() is None
    assert not hooks

    reducer = LocalWorld(1).run(lambda comm: Reducer(comm, "topk:density=0.05"))[0]
    optimizer, gone = reducer.optimizer, weakref.ref(reducer)
    reducer.close()
    assert not optimizer._optimizer_step_pre_hooks
    del reducer
    gc.collect()
    assert gone() is None


def test_the_usual_share_is_the_mean_of_the_last_steps_and_one_spike_moves_it_little() -> None:
    usual = UsualShare()
    assert usual.weigh(0.5) == 1.0
    assert [usual.weigh(0.5) for _ in range(40)] == [1.0] * 40
    assert not usual.cuts
    assert usual.weigh(0.125) == 0.25
    assert usual.cuts
    assert usual.mean == 0.5 - 0.375 / 32
    assert usual.weigh(1.0) == 1.0  # more than usual counts as usual
    none = UsualShare()
    assert [none.weigh(0.0) for _ in range(3)] == [1.0] * 3

"""The integration `attach` for FSDP2: on the shard axis, on the replicate axis, and with a mesh of both (HSDP)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from helpers.fsdp_training import SHAPES, as_fsdp, each_unit, known
from integrations.attach import nothing
from integrations.failing import FAILURE, Failure, fail_once, failed_on_all_ranks, failing
from integrations.fsdp_integration import Axis, Done, Sharding, same_on_all_ranks
from integrations.scaled import SCALED, ScalerRecord, scaled, scaled_without_loss
from integrations.situations import OTHER, SAME, STEPS, accumulated, compiled, resized, trained
from integrations.table import Case, absent, trial
from sparsync.testing.world import same_bits

OPTION = absent("an option of DistributedDataParallel")
OVERFLOWING = "middle.weight"


def typed(id: str, axis: Axis, dtype: torch.dtype) -> Done:
    return trained(Sharding(id, axis, dict.fromkeys(SHAPES, dtype)))


def cast(rank: int, step: int, name: str, dtypes: Mapping[str, torch.dtype]) -> Tensor:
    return known(rank, step, name).to(dtypes[name])


TYPES = {name: torch.bfloat16 if name.startswith("middle") else torch.float32 for name in SHAPES}


def several_types(id: str, axis: Axis) -> Done:
    return trained(Sharding(id, axis, TYPES))


def of_three(rank: int, step: int, name: str) -> Tensor:
    return torch.stack([known(rank, 3 * step + part, name) for part in range(3)]).sum(0)


def used(rank: int, step: int, name: str) -> bool:
    return name != OVERFLOWING or (rank + step) % 2 == 0


def in_part(id: str, axis: Axis) -> Done:
    training = Sharding(id, axis)
    each_unit(training.net, lambda unit: unit.set_reduce_scatter_unused_params(True))
    for step in range(STEPS):
        training.step({name: x for name, x in training.inputs(step).items() if used(training.rank, step, name)})
    return training.done()


def of_used(rank: int, step: int, name: str) -> Tensor:
    return known(rank, step, name) if used(rank, step, name) else torch.zeros(SHAPES[name])


FROZEN = ("first.bias", "last.weight")


def frozen(id: str, axis: Axis) -> Done:
    return trained(Sharding(id, axis, frozen=FROZEN))


def unfrozen(id: str, axis: Axis) -> Done:
    training = Sharding(id, axis, frozen=FROZEN)
    trained(training, range(STEPS // 2))
    for name in FROZEN:
        training.net.get_parameter(name).requires_grad_(True)
    return trained(training, range(STEPS // 2, STEPS))


def reduced_later(id: str, ranks: list[Done]) -> None:
    for rank in ranks:
        assert rank.rows[0].keys() == SHAPES.keys() - set(FROZEN)
        for name in SHAPES:
            assert same_bits(rank.rows[-1][name], ranks[0].rows[-1][name]), name


def tied(id: str, axis: Axis) -> Done:
    return trained(Sharding(id, axis, layered=False, tied=True))


def of_tied(rank: int, step: int, name: str) -> Tensor:
    return known(rank, step, name) + (known(rank, step, "last.bias") if name == "first.bias" else 0)


def two_at_once(id: str, axis: Axis) -> list[Done]:
    both = [Sharding(id, axis), Sharding(OTHER, axis)]
    for step in range(STEPS):
        for training in both:
            training.net.zero_grad()
        first, second = (training.forward(training.inputs(step)) for training in both)
        (first + second).backward()
        for training in both:
            training.record()
    return [training.done() for training in both]


def both_same_on_all_ranks(id: str, ranks: list[list[Done]], axis: Axis) -> None:
    same_on_all_ranks(id, [rank[0] for rank in ranks], axis)
    same_on_all_ranks(OTHER, [rank[1] for rank in ranks], axis)


def in_a_group(id: str, axis: Axis) -> Done | None:
    training = Sharding.of_ranks([0, 2], id, axis)
    return None if training is None else trained(training)


def rewrapped(id: str, axis: Axis) -> Done:
    """Train two steps with a unit per layer, and from that state two with a single unit."""
    first, second = Sharding(id, axis), Sharding(id, axis, layered=False)
    trained(first, range(2))
    second.handle.load_state_dict(first.handle.state_dict())
    second.rows, second.units = first.rows, first.units
    return trained(second, range(2, STEPS))


def stepping(id: str, axis: Axis) -> Done:
    """Check that a hook that takes each gradient when it is ready finds it reduced."""
    training = Sharding(id, axis)
    found: dict[str, Any] = {}

    def take(name: str, parameter: Any) -> None:  # Any: a DTensor's attributes
        found[name], parameter.grad = parameter.grad.clone(), None

    for name, parameter in training.net.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(take, name))
    for step in range(STEPS):
        training.forward(training.inputs(step)).backward()
        training.record({name: found[name].full_tensor() for name in SHAPES})
    return training.done()


def attached_twice(id: str, axis: Axis) -> None:
    training = Sharding(id, axis)
    training.attach(id)


def with_infinity(rank: int, step: int, name: str) -> Tensor:
    gradient = known(rank, step, name)
    if (rank, step, name) == (1, 1, OVERFLOWING):
        gradient[3, 1] = torch.inf
    return gradient


def overflowing(id: str, axis: Axis) -> Done:
    training = Sharding(id, axis)
    for step in range(STEPS):
        training.step({name: with_infinity(training.rank, step, name) for name in SHAPES})
    return training.done()


def finite_on_all_ranks(id: str, ranks: list[Done], axis: Axis) -> None:
    same_on_all_ranks(id, ranks, axis, with_infinity)
    for rank in ranks:
        for step, grads in enumerate(rank.rows):
            assert step == 1 or all(grad.isfinite().all() for grad in grads.values())
            assert all(same_bits(grad, ranks[0].rows[step][name]) for name, grad in grads.items())
        assert all(part.isfinite().all() for part in rank.residual.values())


def skipping(id: str, axis: Axis) -> ScalerRecord:
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=3)
    training = Sharding(id, axis, scaler=scaler)
    came = scaled(training, scaler, list(SHAPES), known, OVERFLOWING)
    came.non_finite = {name for name in SHAPES if name.startswith("middle")}
    return came


def unlucky(id: str, axis: Axis) -> list[Tensor | Failure]:
    training = Sharding(id, axis)
    fail_once(training.handle.state)

    def step(number: int) -> None:
        try:
            training.step(training.inputs(number))
        except RuntimeError:
            as_fsdp(training.net).reset_iter_state()
            raise

    return failing(step, lambda: torch.cat([grad.flatten() for grad in training.rows[-1].values()]))


def resumed(id: str, axis: Axis) -> tuple[Done, Done]:
    whole, first, second = (Sharding(id, axis) for _ in range(3))
    trained(first, range(STEPS // 2))
    second.handle.load_state_dict(first.handle.state_dict())
    second.rows, second.units = first.rows, first.units
    return trained(whole), trained(second, range(STEPS // 2, STEPS))


def resumed_to_the_same_bits(id: str, ranks: list[tuple[Done, Done]]) -> None:
    for whole, again in ranks:
        for a, b in zip(whole.rows, again.rows, strict=True):
            assert all(same_bits(a[name], b[name]) for name in SHAPES)
        assert all(same_bits(whole.residual[name], again.residual[name]) for name in whole.residual)


def cases(axis: Axis) -> dict[str, Case]:
    """Make the cases of one axis, or of a mesh of both."""
    integration, judged = partial(Sharding, axis=axis), partial(same_on_all_ranks, axis=axis)

    def case(body: Any, gradient: Any = known, claim: str = SAME, judge: Any = None, P: int = 2) -> Case:
        judge = judge or partial(judged, gradient=gradient)
        return Case(claim, trial(partial(body, axis=axis), judge, P))

    def of_type(name: str) -> Case:
        dtype: torch.dtype = getattr(torch, name)
        return case(partial(typed, dtype=dtype), partial(cast, dtypes=dict.fromkeys(SHAPES, dtype)))

    parts = "shards" if axis == "shard" else "copies"
    return {
        **{f"{name} parameters": of_type(name) for name in ("float32", "float64", "bfloat16", "float16")},
        "parameters of several types": case(
            several_types, partial(cast, dtypes=TYPES), "in one module FSDP2 takes one type"
        ),
        "parameters in channels_last": absent("fully_shard takes contiguous parameters only"),
        "accumulation over backward passes (no_sync)": Case(
            "the sum is reduced once with set_requires_gradient_sync",
            trial(partial(accumulated, integration=integration), partial(judged, gradient=of_three)),
        ),
        "gradient_as_bucket_view=True": OPTION,
        "static_graph=True": OPTION,
        "parameters that ranks do not use (find_unused_parameters=True)": case(
            in_part, of_used, f"{SAME} with set_reduce_scatter_unused_params(True); an unused parameter counts as zero"
        ),
        "frozen parameters": case(frozen, claim=SAME, judge=partial(judged, frozen=FROZEN)),
        "parameters that are trained later": case(unfrozen, claim="they are reduced from then on", judge=reduced_later),
        "parameters that share their weights": case(
            tied, claim="in one module", judge=partial(judged, gradient=of_tied, frozen=["last.bias"])
        ),
        "ranks that run out of data (join)": absent("FSDP2 has no join(): all ranks take part in every forward pass"),
        "sparse embeddings": absent("FSDP2 cannot cut sparse gradients into shards"),
        "two models at once": case(two_at_once, claim=SAME, judge=partial(both_same_on_all_ranks, axis=axis)),
        "a group that is not the world": case(in_a_group, P=3),
        "buckets that change": case(rewrapped, claim=f"{SAME} from a state saved before fully_shard on other modules"),
        "torch.compile": Case(SAME, trial(partial(compiled, integration=integration), judged)),
        "DDP's mixed_precision": OPTION,
        "an optimizer in the backward pass": case(
            stepping, claim=f"{SAME} for an optimizer that takes each gradient when it is ready"
        ),
        "a model that is reduced already": case(attached_twice, claim="-", judge=nothing),
        "Inf on one rank": case(
            overflowing,
            claim="gradients and residuals are finite from the next step on",
            judge=partial(finite_on_all_ranks, axis=axis),
        ),
        "a loss scaler skips a step (GradScaler)": case(
            skipping,
            claim=SCALED + ("" if axis == "shard" else ", and with several shards what the others sent in that step"),
            judge=scaled_without_loss,
        ),
        "a rank fails in a step": case(  # on 2 ranks SkipReduce leaves one out, which would not notice
            unlucky,
            claim=f"{FAILURE}, after reset_iter_state()",
            judge=failed_on_all_ranks,
            P=3 if axis == "shard" else 2,
        ),
        "resuming after a restart": case(
            resumed, claim="the same bits as without an interruption", judge=resumed_to_the_same_bits
        ),
        "resuming with another number of ranks": Case(
            f"2 {parts} take over the residuals of 3 with the same mean", partial(resized, integration=integration)
        ),
    }


SHARDS, REPLICAS, BOTH = cases("shard"), cases("replicate"), cases("both")

"""The integrations of `Steps` and `LocalSteps`: each training runs in processes and in a LocalWorld, with the same bits."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from helpers.ddp_training import COUNT, NAMES, N
from helpers.distributed import run
from helpers.known_gradients import KnownGradients, row
from helpers.resized import check_resized
from integrations.attach import stepping, with_mixed_precision
from integrations.failing import FAILURE, Failure, fail_once, failed_on_all_ranks, failing
from integrations.situations import (
    STEPS,
    accumulated,
    compiled,
    frozen_model,
    in_a_group,
    in_channels_last,
    nothing,
    of_three,
    overflowing,
    several_types,
    sparse,
    tied,
    trained,
    trained_by,
    two,
    typed,
    uneven,
    with_infinity,
)
from integrations.stepped import EVERY, ByAdamW, ByReplicas, Locally, SteppedTraining, StepsSeen, UnderDdp
from integrations.table import SAME, Case, TrialVerdict, absent, refusals, trial
from sparsync import Steps, attach
from sparsync.attached import checkpoint
from sparsync.comm import LocalWorld
from sparsync.testing.world import same_bits
from test_ddp import UNUSED, used

LEFT = 2  # the step from which no rank has a gradient of the LATE parameters
LATE = ("block2.weight", "block5.bias")
NEVER = ("embed.weight", UNUSED)
OPTION = absent("an option of DistributedDataParallel")


Make = Callable[..., SteppedTraining]  # (id of the scheme, ...)
Body = Callable[..., Any]  # (id of the scheme, integration=Make)
Judge = Callable[[list[Any]], None]


def plain(id: str, integration: Make) -> StepsSeen:
    return trained(integration(id))


def at_once(id: str, integration: Make) -> StepsSeen:
    """Train with the sums of the same gradients."""
    return trained_by(integration(id), of_three)


UNUSED_FOUND = {"find_unused_parameters": True}  # of DDP


def in_part(id: str, integration: Make) -> StepsSeen:
    """Train while one of two ranks leaves out some parameters, and both leave out one always and one from a step on."""
    training = integration(id)
    for step in range(STEPS):
        inputs = training.model.inputs(training.rank, step)
        gone = (*NEVER, *(LATE if step >= LEFT else ()))
        training.step({name: x for name, x in inputs.items() if used(training.rank, step, name) and name not in gone})
    return training.seen


def frozen(id: str, integration: Make) -> StepsSeen:
    """Freeze some parameters from the beginning, and some from a step on."""
    training = integration(id, model=frozen_model(NEVER))
    for step in range(STEPS):
        for name in LATE if step == LEFT else ():
            training.model.get_parameter(name).requires_grad_(False).grad = None
        training.step(training.model.inputs(training.rank, step))
    return training.seen


def unfrozen(id: str, integration: Make) -> StepsSeen:
    """Train some parameters from a step on."""
    training = integration(id, model=frozen_model(NEVER))
    trained(training, range(LEFT))
    for name in NEVER:
        training.model.get_parameter(name).requires_grad_(True)
    with refusals():
        return trained(training, range(LEFT, STEPS))


def left_alone(ranks: list[StepsSeen]) -> None:
    """Check that a parameter without a gradient on any rank neither decays nor moves, and keeps its residual."""
    for seen in ranks:
        for name in NEVER:
            assert all((weights[name] == 1).all() for weights in (*seen.own, *seen.common)), f"{name} has moved"
            assert not any(residual[name].any() for residual in seen.residual if name in residual), name
        for name in LATE:
            for what in (seen.own, seen.common, *([seen.residual] if name in seen.residual[-1] else [])):
                for step in range(LEFT, STEPS):
                    assert same_bits(what[step][name], what[LEFT - 1][name]), f"{name} has moved at step {step}"
        assert all((seen.own[-1][name] != 1).any() for name in NAMES if name not in NEVER), "something has not moved"


def rebucketed(id: str, integration: Make) -> StepsSeen:
    """Train two steps in four buckets, and from that state two in one bucket."""
    first, second = integration(id), integration(id, bucket_mb=25.0)
    trained(first, range(STEPS // 2))
    second.steps.load_state_dict(first.steps.state_dict())
    second.record()
    for what in ("common", "residual"):
        ours, theirs = getattr(second.seen, what)[0], getattr(first.seen, what)[-1]
        assert all(same_bits(ours[name], theirs[name]) for name in theirs), f"{what} of the state changed"
    return trained(second, range(STEPS // 2, STEPS))


def finite(ranks: list[StepsSeen]) -> None:
    for seen in ranks:
        for what in (seen.own[EVERY:], seen.common, seen.residual):
            assert all(part.isfinite().all() for each in what for part in each.values())
        assert any((seen.common[-1][name] != seen.common[1][name]).any() for name in NAMES), "nothing has moved since"


def scaled(id: str, integration: Make) -> StepsSeen:
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=100)
    training = integration(id, scaler=scaler)
    for step in range(STEPS):
        training.model.zero_grad()
        inputs = {name: with_infinity(training.rank, step, name) for name in NAMES}
        scaler.scale(training.forward(inputs)).backward()
        training.take(scaler)
        scaler.update()
        training.seen.scales.append(scaler.get_scale())
        training.record()
    return training.seen


def skipped(ranks: list[StepsSeen]) -> None:
    """Check that only that rank skips, as in torch."""
    assert [seen.scales for seen in ranks] == [[64.0] * STEPS, [64.0] + [32.0] * (STEPS - 1)]
    finite(ranks)


def skipped_by_all(ranks: list[StepsSeen]) -> None:
    assert [seen.scales for seen in ranks] == [[64.0] + [32.0] * (STEPS - 1)] * len(ranks)
    finite(ranks)


def unlucky(id: str, integration: Make) -> list[Tensor | Failure]:
    training = integration(id)
    fail_once(training.steps.state)
    return failing(
        lambda step: training.step(training.model.inputs(training.rank, step)),
        lambda: torch.cat(list(training.seen.common[-1].values())),
    )


def resumed(id: str, integration: Make) -> tuple[StepsSeen, StepsSeen]:
    whole, first, second = (integration(id) for _ in range(3))
    trained(first, range(STEPS // 2))
    second.steps.load_state_dict(first.steps.state_dict())
    second.seen = first.seen
    return trained(whole), trained(second, range(STEPS // 2, STEPS))


def resumed_to_the_same_bits(ranks: list[tuple[StepsSeen, StepsSeen]]) -> None:
    for whole, again in ranks:
        assert same(whole, again)


def saved(ids: Sequence[str], integration: Make) -> dict[str, tuple[Any, StepsSeen]]:
    found = {}
    for id in ids:
        training = integration(id)
        found[id] = trained(training, range(2)), training.steps.state_dict()
    return {id: (state, seen) for id, (seen, state) in found.items()}


def restored(id: str, integration: Make, states: Mapping[str, list[Any]]) -> tuple[StepsSeen, StepsSeen]:
    training = integration(id)
    checkpoint.restore(training.steps, states[id])
    training.record()
    loaded = replace(training.seen)
    training.seen = StepsSeen()
    return loaded, trained(training, range(2, 4))


def resized(ids: Sequence[str], integration: Make) -> dict[str, TrialVerdict]:
    before = run(saved, 3, ids=ids, integration=integration)
    states = {id: [rank[id][0] for rank in before] for id in ids}

    def judge(id: str, after: list[tuple[StepsSeen, StepsSeen]]) -> None:
        old = [rank[id][1].residual[-1] for rank in before]
        for name in old[0]:
            check_resized([each[name] for each in old], [loaded.residual[0][name] for loaded, _ in after], name)
        for loaded, _ in after:
            assert same(loaded.common[0], before[0][id][1].common[-1]), "the common weights of the state changed"
        assert same(after[0][1].common, after[1][1].common)

    return trial(partial(restored, integration=integration, states=states), judge)(ids)


def with_stepping_optimizer(id: str, integration: Make) -> StepsSeen:
    return trained(integration(id, model=stepping(KnownGradients(COUNT, N))))


def with_ddp(id: str, integration: Make) -> None:
    integration(id, model=DistributedDataParallel(KnownGradients(2, N)))


def attached_twice(id: str, integration: Make) -> None:
    training: Any = integration(id)
    with refusals():
        attach(training.forward, row(id).make(), optimizer=training.optimizer, exchange=Steps())


def refused_ddp(id: str, integration: Make, model: Callable[[], DistributedDataParallel]) -> None:
    ddp = model()
    with refusals():
        attach(ddp, row(id).make(), optimizer=torch.optim.AdamW(ddp.parameters()), exchange=Steps())


def same(one: Any, other: Any) -> bool:
    """Tell whether two results, of tensors in dicts, lists, tuples or a StepsSeen, have the same bits."""
    if isinstance(one, Tensor):
        return same_bits(one, other)
    if isinstance(one, StepsSeen):
        one, other = vars(one), vars(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def as_in_a_local_world(id: str, ranks: list[Any], integration: Make, body: Body, also: Judge | None) -> None:
    """Check that all ranks did, bit for bit, what the same training does in a LocalWorld, and have equal common weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about skipped steps
        wanted = LocalWorld(len(ranks)).run(lambda comm: body(id, integration=partial(integration, comm=comm)))
    for rank, (ours, theirs) in enumerate(zip(ranks, wanted, strict=True)):
        assert same(ours, theirs), f"rank {rank} has other bits than in a LocalWorld"
        mine, first = (each if isinstance(each, (list, tuple)) else (each,) for each in (ours, ranks[0]))
        assert all(same(one.common, other.common) for one, other in zip(mine, first, strict=True)), "ranks differ"
        assert not same(first[0].common[0], first[0].common[-1]), "nothing has moved"
    if also is not None:
        also(ranks)


def cases(integration: Make) -> dict[str, Case]:
    local, ddp, sharded = integration is Locally, integration is UnderDdp, integration is ByReplicas
    finding: Make = partial(integration, wrapping=UNUSED_FOUND) if ddp else integration

    def case(
        body: Body,
        claim: str = SAME,
        also: Judge | None = None,
        alone: Body | None = None,
        P: int = 2,
        integration: Make = integration,
    ) -> Case:
        """Make a case; `alone`: the body that gives the expected result, if it differs."""
        judge = partial(as_in_a_local_world, integration=integration, body=alone or body, also=also)
        return Case(claim, trial(partial(body, integration=integration), judge, P))

    def refusal(body: Body, **options: Any) -> Case:
        return Case("-", trial(partial(body, integration=integration, **options), nothing))

    def of_ddp(**wrapping: Any) -> Case:
        return case(plain, integration=partial(integration, wrapping=wrapping)) if ddp else OPTION

    idle = "a parameter that no rank has changed" if local else "a parameter without a gradient on any rank"
    skips = (
        "the exchange is dropped, and all ranks return to the weights of the last one"
        if local
        else "all ranks skip the step"
    )
    return {
        **{
            f"{name} parameters": case(partial(typed, dtype=getattr(torch, name)))
            for name in ("float32", "float64", "bfloat16", "float16")
        },
        "parameters of several types": case(several_types),
        "parameters in channels_last": absent("fully_shard takes contiguous parameters only")
        if sharded
        else case(partial(in_channels_last, flat=torch.flatten)),
        # Gradients that are divided before they are added differ in the last bits from their divided sum.
        "accumulation over backward passes (no_sync)": case(accumulated, alone=at_once if local else accumulated),
        "gradient_as_bucket_view=True": of_ddp(gradient_as_bucket_view=True),
        "static_graph=True": of_ddp(static_graph=True),
        "DDP's mixed_precision": refusal(refused_ddp, model=with_mixed_precision) if ddp else OPTION,
        "parameters that ranks do not use (find_unused_parameters=True)": case(
            in_part, f"{idle} neither decays nor moves, and keeps its residual", left_alone, integration=finding
        ),
        "frozen parameters": case(
            frozen,
            "a parameter that is frozen on all ranks neither decays nor moves, and keeps its residual",
            left_alone,
            integration=finding,
        ),
        "parameters that are trained later": refusal(unfrozen),
        "parameters that share their weights": case(tied, "in one module" if sharded else SAME),
        "ranks that run out of data (join)": case(
            uneven, f"a rank without data continues to call and {'keeps its weights' if local else 'counts as zero'}"
        ),
        "sparse embeddings": absent("FSDP2 cannot cut sparse gradients into shards") if sharded else case(sparse),
        "two models at once": case(two, SAME),
        "a group that is not the world": case(in_a_group, alone=plain, P=3),
        "buckets that change": case(
            rebucketed, f"{SAME} of common weights and residuals from a state saved with buckets of another size"
        ),
        "torch.compile": case(compiled, alone=plain),
        "an optimizer in the backward pass": case(with_stepping_optimizer)
        if local
        else absent("fully_shard makes new parameters, which have none of such an optimizer's hooks")
        if sharded
        else refusal(with_stepping_optimizer),
        "a model that is reduced already": refusal(with_ddp if local else attached_twice),
        "Inf on one rank": case(overflowing, f"{skips}; weights and residuals are finite", finite),
        "a loss scaler skips a step (GradScaler)": case(
            scaled,
            "that rank skips its step, the others do not; its scale is halved"
            if local
            else "all ranks skip the step and halve their scales",
            skipped if local else skipped_by_all,
        ),
        "a rank fails in a step": Case(
            FAILURE,
            trial(
                partial(unlucky, integration=partial(integration, every=1) if local else integration),
                failed_on_all_ranks,
            ),
        ),
        "resuming after a restart": case(resumed, f"{SAME} as without an interruption", resumed_to_the_same_bits),
        "resuming with another number of ranks": Case(
            "2 ranks take over the common weights of 3 and their residuals with the same mean, and continue with the same common weights",
            partial(resized, integration=integration),
        ),
    }


BARE, DDP, REPLICAS, LOCAL = cases(ByAdamW), cases(UnderDdp), cases(ByReplicas), cases(Locally)

"""Situations that all integrations share: a training made by `integration(id, ...)`, and its check."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from helpers.ddp_training import COUNT, NAMES, N, RankRecord, check, known, total
from helpers.distributed import run
from helpers.known_gradients import Gradient, KnownGradients, expected, whole_numbers
from helpers.resized import check_resized
from integrations.failing import FAILURE, Failure, fail_once, failed_on_all_ranks, failing
from integrations.scaled import SCALED, ScalerRecord, scaled, scaled_without_loss
from integrations.table import SAME, Case, RefusedError, TrialVerdict, trial
from sparsync.testing.world import same_bits

BATCHES = 2  # on the rank that runs out of data
OTHER = "skip-default"  # the scheme of the second model
STEPS = 4
FROZEN = ("embed.weight", "block3.bias", "block4.weight")
TRAINED = [name for name in NAMES if name not in FROZEN]


Done = TypeVar("Done")
Done_co = TypeVar("Done_co", covariant=True)


class Training(Protocol[Done_co]):
    """A training of KnownGradients, or of what has its methods; see ddp_training.AttachedTraining and stepped.SteppedTraining."""

    model: Any
    rank: int

    def step(self, inputs: Any = None) -> None: ...

    def accumulate(self, parts: Sequence[Any]) -> None:
        """Take a step whose gradient is the sum over several backward passes."""
        ...

    def done(self) -> Done_co: ...


Making = Callable[..., Training[Done]]  # (id of the scheme, model=..., ...)
Make = Callable[..., Any]  # of a training with table.WithHandle's methods, whose gradients are compared


def common(
    integration: Make, flat: Callable[[Tensor], Tensor], keys: Sequence[str] = (), **stable: Any
) -> dict[str, Case]:
    """Make the cases of an integration whose trainings `integration` makes.

    `keys` name its buckets, which hold gradients in the order of `flat`. `stable` options keep its buckets the same from the first step on,
    also after a restart.
    """
    judged = partial(same_on_all_ranks, keys=keys)

    def case(body: Callable[..., Any], judge: Callable[..., None] = judged, claim: str = SAME, P: int = 2) -> Case:
        return Case(claim, trial(partial(body, integration=integration), judge, P))

    def of_type(name: str) -> Case:
        dtype = getattr(torch, name)
        named = [key.replace("float32", name) for key in keys]
        return case(
            partial(typed, dtype=dtype), partial(same_on_all_ranks, gradient=partial(cast, dtype=dtype), keys=named)
        )

    return {
        **{f"{name} parameters": of_type(name) for name in ("float32", "float64", "bfloat16", "float16")},
        "parameters of several types": case(
            several_types,
            partial(
                same_on_all_ranks,
                gradient=of_several_types,
                keys=[*keys, *[key.replace("float32", "bfloat16") for key in keys]],
            ),
        ),
        "parameters in channels_last": case(
            partial(in_channels_last, flat=flat),
            partial(same_on_all_ranks, gradient=partial(of_channels_last, flat=flat), keys=keys),
        ),
        "accumulation over backward passes (no_sync)": case(
            accumulated, partial(same_on_all_ranks, gradient=of_three, keys=keys), SAME
        ),
        "frozen parameters": case(frozen, partial(same_of_the_others, keys=keys), SAME),
        "parameters that share their weights": case(tied, partial(same_of_tied, keys=keys)),
        "sparse embeddings": Case("-", trial(partial(sparse, integration=integration), nothing)),
        "two models at once": case(partial(two), partial(both_same_on_all_ranks, keys=keys), SAME),
        "Inf on one rank": case(
            overflowing,
            finite_on_all_ranks,
            "all ranks see the same in that step; gradients and residuals are finite from the next step on",
        ),
        "a loss scaler skips a step (GradScaler)": Case(
            SCALED, trial(partial(of_two_types, integration=integration), scaled_without_loss)
        ),
        "a rank fails in a step": Case(FAILURE, trial(partial(unlucky, integration=integration), failed_on_all_ranks)),
        "resuming after a restart": case(
            partial(resumed, **stable), resumed_to_the_same_bits, "the same bits as without an interruption"
        ),
        "resuming with another number of ranks": Case(
            "2 ranks take over the residuals of 3 with the same mean", partial(resized, integration=integration)
        ),
    }


def same_on_all_ranks(id: str, ranks: list[RankRecord], gradient: Gradient = known, keys: Sequence[str] = ()) -> None:
    check(id, [rank for rank in ranks if rank is not None], gradient, keys)


def typed(id: str, integration: Making[Done], dtype: torch.dtype) -> Done:
    return trained(integration(id, dtype=dtype))


def trained(training: Training[Done], steps: Iterable[int] = range(STEPS)) -> Done:
    for step in steps:
        training.step(training.model.inputs(training.rank, step))
    return training.done()


def trained_by(training: Training[Done], gradient: Callable[[int, int, str], Tensor]) -> Done:
    for step in range(STEPS):
        training.step({name: gradient(training.rank, step, name) for name in NAMES})
    return training.done()


def cast(rank: int, step: int, name: str, dtype: torch.dtype) -> Tensor:
    return known(rank, step, name).to(dtype)


def several_types(id: str, integration: Making[Done]) -> Done:
    return trained(integration(id, model=model_of_two_types(torch.bfloat16)))


def model_of_two_types(dtype: torch.dtype) -> KnownGradients:
    model = KnownGradients(COUNT, N)
    for name, module in model.named_children():
        if of_bfloat16(name):
            module.to(dtype)
    return model


def of_bfloat16(name: str) -> bool:
    return name.startswith(("block1", "head"))


def of_several_types(rank: int, step: int, name: str) -> Tensor:
    return cast(rank, step, name, torch.bfloat16 if of_bfloat16(name) else torch.float32)


def frozen(id: str, integration: Make) -> RankRecord:
    done = trained(integration(id, model=frozen_model(FROZEN)))
    of_name = done.grads.view(len(done.grads), COUNT, N)
    assert all(of_name[:, NAMES.index(name)].isnan().all() for name in FROZEN)  # no gradient
    done.grads = of_name[:, [NAMES.index(name) for name in TRAINED]].flatten(1)
    return done


def frozen_model(names: Iterable[str]) -> KnownGradients:
    model = KnownGradients(COUNT, N)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def same_of_the_others(
    id: str, ranks: list[RankRecord], keys: Sequence[str], names: Sequence[str] = TRAINED, gradient: Gradient = known
) -> None:
    wanted = expected(id, len(ranks), ranks[0].steps, names, gradient, keys)
    for rank, residual in zip(ranks, wanted.residuals, strict=True):
        rank.check(wanted.grads, residual)


def unfrozen(id: str, integration: Make) -> tuple[RankRecord, Tensor]:
    """Train some parameters only from the middle on; return what else was reduced, and the last gradients of these."""
    model = frozen_model(FROZEN)
    training = integration(id, model=model)
    trained(training, range(STEPS // 2))
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(True)
    done = trained(training, range(STEPS // 2, STEPS))
    of_name = done.grads.view(len(done.grads), COUNT, N)
    late = of_name[-1, [NAMES.index(name) for name in FROZEN]]
    done.grads = of_name[:, [NAMES.index(name) for name in TRAINED]].flatten(1)
    return done, late


class Tied(KnownGradients):
    """The head's weight is the embedding's, whose gradient doubles."""

    def __init__(self) -> None:
        super().__init__(COUNT, N)
        self.head.weight = self.embed.weight

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return super().forward(inputs) + (self.head.weight * inputs["embed.weight"]).sum()


def tied(id: str, integration: Making[Done]) -> Done:
    return trained(integration(id, model=Tied()))


def of_tied(rank: int, step: int, name: str) -> Tensor:
    return known(rank, step, name) * (2 if name == "embed.weight" else 1)


def same_of_tied(id: str, ranks: list[RankRecord], keys: Sequence[str]) -> None:
    same_of_the_others(id, ranks, keys, [name for name in NAMES if name != "head.weight"], of_tied)


def accumulated(id: str, integration: Making[Done]) -> Done:
    training = integration(id)
    for step in range(STEPS):
        training.accumulate([training.model.inputs(training.rank, 3 * step + part) for part in range(3)])
    return training.done()


def of_three(rank: int, step: int, name: str) -> Tensor:
    return total(known(rank, 3 * step + part, name) for part in range(3))


class ChannelsLast(KnownGradients):
    """Convolution weights. `flat` is their order in the integration's buckets: memory order, or that of flatten()."""

    def __init__(self, flat: Callable[[Tensor], Tensor]) -> None:
        super().__init__(COUNT, 60)
        self.flat = flat
        for module in self.children():
            for name in ("weight", "bias"):
                setattr(module, name, nn.Parameter(channels_last(torch.ones(60))))

    def inputs(self, rank: int, step: int) -> dict[str, Tensor]:
        return {name: channels_last(whole_numbers(60, rank, step, name)) for name in self.names}

    def gradients(self) -> Tensor:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        assert all(grad.is_contiguous(memory_format=torch.channels_last) for grad in grads)
        return torch.cat([self.flat(grad) for grad in grads])


def channels_last(memory: Tensor) -> Tensor:
    return memory.view(3, 2, 2, 5).permute(0, 3, 1, 2)


def as_in_memory(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).flatten()


def in_channels_last(id: str, integration: Making[Done], flat: Callable[[Tensor], Tensor]) -> Done:
    return trained(integration(id, model=ChannelsLast(flat)))


def of_channels_last(rank: int, step: int, name: str, flat: Callable[[Tensor], Tensor]) -> Tensor:
    return flat(channels_last(whole_numbers(60, rank, step, name)))


def uneven(id: str, integration: Making[Done]) -> Done:
    training = integration(id)
    for step in range(STEPS):
        more = training.rank == 0 or step < BATCHES
        training.step(training.model.inputs(training.rank, step) if more else None)
    return training.done()


def in_a_group(id: str, integration: Making[Done]) -> Done | None:
    group = dist.new_group([0, 2])
    return trained(integration(id, group=group)) if isinstance(group, dist.ProcessGroup) else None


def compiled(id: str, integration: Making[Done]) -> Done:
    torch._dynamo.reset()
    training: Any = integration(id)
    training.forward = torch.compile(training.forward, backend="aot_eager")
    return trained(training)


class Words(nn.Module):
    """An embedding with sparse gradients before a dense layer; replaces KnownGradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layer = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 50)

    def forward(self, words: Tensor) -> Tensor:
        return self.layer(self.words(words)).square().sum()

    def inputs(self, rank: int, step: int) -> Tensor:
        return torch.tensor([rank, step, step])

    def gradients(self) -> Tensor:
        return torch.cat([torch.zeros(0) if p.grad is None else p.grad.to_dense().flatten() for p in self.parameters()])


def sparse(id: str, integration: Making[Done]) -> Done:
    return trained(integration(id, model=Words()))


def nothing(id: str, ranks: list[Any]) -> None:
    raise AssertionError("it should have been refused")


def two(id: str, integration: Making[Done]) -> list[Done]:
    """Train two models in alternation."""
    both = [integration(id), integration(OTHER)]
    for step in range(STEPS):
        for training in both:
            training.step(training.model.inputs(training.rank, step))
    return [training.done() for training in both]


def both_same_on_all_ranks(id: str, ranks: list[list[RankRecord]], keys: Sequence[str]) -> None:
    same_on_all_ranks(id, [rank[0] for rank in ranks], keys=keys)
    same_on_all_ranks(OTHER, [rank[1] for rank in ranks], keys=keys)


def with_infinity(rank: int, step: int, name: str) -> Tensor:
    """Put Inf into one element of one parameter, on rank 1 at step 1."""
    gradient = known(rank, step, name)
    if (rank, step, name) == (1, 1, "block3.bias"):
        gradient[7] = torch.inf
    return gradient


def overflowing(id: str, integration: Making[Done]) -> Done:
    return trained_by(integration(id), with_infinity)


def finite_on_all_ranks(id: str, ranks: list[RankRecord]) -> None:
    for rank in ranks:
        assert same_bits(rank.grads, ranks[0].grads)
        assert all(grads.isfinite().all() for step, grads in enumerate(rank.grads) if step != 1)
        assert all(part.isfinite().all() for part in rank.residual.values())


def of_two_types(id: str, integration: Make) -> ScalerRecord:
    """Train in several buckets with every integration, since one of them makes a bucket per dtype."""
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=3)
    training = integration(id, model=model_of_two_types(torch.float64), scaler=scaler)
    came = scaled(training, scaler, NAMES, known, "block3.bias")
    layouts = training.buckets[came.overflowing_step]
    came.non_finite = next(names for layout in layouts if "block3.bias" in (names := {slot.name for slot in layout}))
    return came


def unlucky(id: str, integration: Make) -> list[Tensor | Failure]:
    training = integration(id)
    fail_once(training.handle.state)

    def step(number: int) -> None:
        training.step(training.model.inputs(training.rank, number))

    return failing(step, training.model.gradients)


def resumed(id: str, integration: Make, **stable: Any) -> tuple[Tensor, Tensor]:
    """Train four steps at once, and two and two with a saved state between them."""
    whole, first, second = (integration(id, **stable) for _ in range(3))
    trained(first, range(STEPS // 2))
    second.load(first.state())
    again = trained(second, range(STEPS // 2, STEPS))
    return trained(whole).grads, torch.cat([first.done().grads, again.grads])


def resumed_to_the_same_bits(id: str, ranks: list[tuple[Tensor, Tensor]]) -> None:
    for whole, again in ranks:
        assert same_bits(whole, ranks[0][0])
        assert same_bits(again, whole)


def saved(ids: Sequence[str], integration: Make) -> dict[str, tuple[Any, Any]]:
    found = {}
    for id in ids:
        with suppress(RefusedError):
            training = integration(id)
            trained(training, range(2))
            found[id] = training.state(), training.residual()
    return found


def restored(id: str, integration: Make, states: Mapping[str, list[Any]]) -> tuple[Any, RankRecord]:
    training = integration(id)
    training.load_any(states[id])
    return training.residual(), trained(training)


def resized(ids: Sequence[str], integration: Make) -> dict[str, TrialVerdict]:
    before = run(saved, 3, ids=ids, integration=integration)
    states = {id: [rank[id][0] for rank in before] for id in before[0]}

    def judge(id: str, after: list[Any]) -> None:
        for name in before[0][id][1]:
            check_resized([rank[id][1][name] for rank in before], [kept[name] for kept, _ in after], name)
        assert same_bits(after[0][1].grads, after[1][1].grads)

    return trial(partial(restored, integration=integration, states=states), judge)(ids)

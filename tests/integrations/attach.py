"""The integration `attach` with DistributedDataParallel."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import sparsync
from helpers.ddp_training import NAMES, TIMEOUT_S, AttachedTraining, N, RankRecord, known, step_at_once
from helpers.known_gradients import KnownGradients, expected, row
from integrations.situations import (
    BATCHES,
    OTHER,
    SAME,
    STEPS,
    as_in_memory,
    both_same_on_all_ranks,
    common,
    nothing,
    same_of_the_others,
    same_on_all_ranks,
    trained,
    unfrozen,
)
from integrations.table import Case, WithHandle, refusals, trial
from test_ddp import UNUSED, used

STABLE: dict[str, Any] = {"find_unused_parameters": True}


class Attached(WithHandle, AttachedTraining):
    """A training with attach, which may refuse it."""

    def __init__(self, *settings: Any, **options: Any) -> None:
        with refusals():
            super().__init__(*settings, **options)

    def accumulate(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        self.ddp.zero_grad()
        for part in parts[:-1]:
            with self.ddp.no_sync():
                self.ddp(part).backward()
        self.ddp(parts[-1]).backward()
        self.rows.append(self.model.gradients().clone())


def with_options(id: str, **options: Any) -> RankRecord:
    return trained(Attached(id, **options))


def in_part(id: str) -> RankRecord:
    training = Attached(id, **STABLE)
    done = trained_in_part(training)
    assert training.model.get_parameter(UNUSED).grad is None
    done.grads.nan_to_num_(nan=0.0)  # of the parameter that no rank uses
    return done


def trained_in_part(training: Any) -> RankRecord:
    """Train while one of two ranks leaves out some parameters, and both leave out one always."""
    for step in range(STEPS):
        inputs = training.model.inputs(training.rank, step)
        training.step({name: x for name, x in inputs.items() if used(training.rank, step, name)})
    return training.done()


def of_used(rank: int, step: int, name: str) -> Tensor:
    return known(rank, step, name) if used(rank, step, name) else torch.zeros(N)


def uneven(id: str) -> RankRecord:
    training = Attached(id)
    with training.ddp.join():
        trained(training, range(BATCHES if training.rank else STEPS))
    return training.done()


def zero_afterwards(rank: int, step: int, name: str) -> Tensor:
    return torch.zeros(N) if rank and step >= BATCHES else known(rank, step, name)


def uneven_as_expected(id: str, ranks: list[RankRecord]) -> None:
    wanted = expected(id, 2, ranks[0].steps, NAMES, zero_afterwards)
    ranks[0].check(wanted.grads, wanted.residuals[0])
    ranks[1].check(wanted.grads[:BATCHES], wanted.residuals[1])


def same_without_late(id: str, ranks: list[tuple[RankRecord, Tensor]]) -> None:
    same_of_the_others(id, [done for done, _ in ranks], keys=())


def two_at_once(id: str) -> list[RankRecord]:
    """Train two models in one backward pass."""
    both = [Attached(id, 8), Attached(OTHER, 32)]
    for step in range(STEPS):
        step_at_once(both, step)
    return [training.done() for training in both]


def in_a_group(id: str) -> RankRecord | None:
    group = dist.new_group([0, 2])
    return trained(Attached(id, process_group=group)) if isinstance(group, dist.ProcessGroup) else None


def rebucketed(id: str) -> RankRecord:
    """Train two steps in one bucket and then four; from that state, a step in the same four, and one in two."""
    first = Attached(id)
    trained(first, range(2))
    second = Attached(id, buckets=2, **STABLE)
    second.load(first.state())
    second.rows += first.rows
    second.buckets |= first.buckets
    done = trained(second, range(2, STEPS))
    assert [len(second.buckets[step]) for step in range(STEPS)] == [1, 4, 4, 2]
    return done


def compiled(id: str) -> RankRecord:
    torch._dynamo.reset()
    training = Attached(id)
    # Prevents graph breaks in the compiler; DDP has its buckets already.
    training.ddp.bucket_bytes_cap = 2**20
    training.ddp = torch.compile(training.ddp, backend="aot_eager")  # pyright: ignore[reportAttributeAccessIssue]
    return trained(training)


def refused(id: str, model: Callable[[], DistributedDataParallel]) -> None:
    ddp = model()
    with refusals():
        sparsync.attach(ddp, row(id).make(), options=sparsync.Options(timeout_s=TIMEOUT_S))


def with_mixed_precision() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(3, 3), mixed_precision=_MixedPrecision())


def stepping(model: nn.Module) -> Any:  # Any: the type of the model
    """Give the model an optimizer that steps in the backward pass, and leaves no gradient."""
    # Imported here, because it compiles TorchScript for seconds; the ranks' fork server has done so.
    from torch.distributed.optim import _apply_optimizer_in_backward  # pyright: ignore[reportPrivateImportUsage]

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.125})
    return model


def with_stepping_optimizer() -> DistributedDataParallel:
    return DistributedDataParallel(stepping(nn.Linear(3, 3)))


def with_hook() -> DistributedDataParallel:
    model = DistributedDataParallel(KnownGradients(2, N))
    sparsync.attach(model, sparsync.schemes.Dense(), options=sparsync.Options(timeout_s=TIMEOUT_S))
    return model


def refusal(model: Callable[[], DistributedDataParallel]) -> Case:
    return Case("-", trial(partial(refused, model=model), nothing))


CASES: dict[str, Case] = common(Attached, as_in_memory, **STABLE) | {
    **{
        f"{option}=True": Case(SAME, trial(partial(with_options, **{option: True}), same_on_all_ranks))
        for option in ("gradient_as_bucket_view", "static_graph")
    },
    "parameters that ranks do not use (find_unused_parameters=True)": Case(
        "an unused parameter counts as zero, and one that no rank uses keeps its gradient",
        trial(in_part, partial(same_on_all_ranks, gradient=of_used)),
    ),
    "parameters that are trained later": Case(
        "DDP does not reduce them", trial(partial(unfrozen, integration=partial(Attached, **STABLE)), same_without_late)
    ),
    "ranks that run out of data (join)": Case(
        "the gradients of a joined rank count as zero", trial(uneven, uneven_as_expected)
    ),
    "two models at once": Case(SAME, trial(two_at_once, partial(both_same_on_all_ranks, keys=()))),
    "a group that is not the world": Case(SAME, trial(in_a_group, same_on_all_ranks, P=3)),
    "buckets that change": Case("no residual is lost", trial(rebucketed, same_on_all_ranks)),
    "torch.compile": Case(SAME, trial(compiled, same_on_all_ranks)),
    "DDP's mixed_precision": refusal(with_mixed_precision),
    "an optimizer in the backward pass": refusal(with_stepping_optimizer),
    "a model that is reduced already": refusal(with_hook),
}

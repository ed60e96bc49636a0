"""The integration of a bare model, `GradientReducer`, in a training loop without DistributedDataParallel."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from helpers.ddp_training import COUNT, TIMEOUT_S, N, RankRecord
from helpers.known_gradients import KnownGradients, noted, row
from integrations.attach import of_used, stepping, trained_in_part, zero_afterwards
from integrations.situations import SAME, common, compiled, in_a_group, nothing, same_on_all_ranks, uneven, unfrozen
from integrations.table import Case, WithHandle, absent, refusals, trial
from sparsync import Gradients, Options, attach
from sparsync.testing.world import same_bits

KEYS = ("float32",)
OPTION = absent("an option of DistributedDataParallel; this integration takes the bare module")


class Manual(WithHandle):
    """A training of a bare model on this rank, and the record of its steps."""

    def __init__(
        self,
        id: str,
        dtype: torch.dtype = torch.float32,
        model: KnownGradients | None = None,
        group: dist.ProcessGroup | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        self.model = model or KnownGradients(COUNT, N, dtype)
        self.forward: Any = self.model  # or its compiled version
        self.rank = dist.get_rank(group)
        self.rows: list[Tensor] = []
        with refusals():
            self.reducer: Any = attach(
                self.model,
                row(id).make(),
                exchange=Gradients(),
                group=group,
                scaler=scaler,
                options=Options(timeout_s=TIMEOUT_S),
            )
        self.handle, self.buckets = self.reducer, noted(self.reducer.state)

    def step(self, inputs: Mapping[str, Tensor] | None = None) -> None:
        """Take a step; without inputs, that of a rank without data."""
        self.accumulate([] if inputs is None else [inputs])

    def accumulate(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        self.model.zero_grad()
        for part in parts:
            self.forward(part).backward()
        self.reducer.reduce()
        self.rows.append(self.model.gradients().clone())

    def done(self) -> RankRecord:
        return RankRecord(torch.stack(self.rows), self.buckets, self.reducer.reports(), self.residual())


def in_part(id: str) -> RankRecord:
    return trained_in_part(Manual(id))


def reduced_later(id: str, ranks: list[tuple[RankRecord, Tensor]]) -> None:
    for done, late in ranks:
        assert same_bits(done.grads, ranks[0][0].grads)
        assert same_bits(late, ranks[0][1])


def with_stepping_optimizer(id: str) -> None:
    Manual(id, model=stepping(KnownGradients(2, N)))


def with_ddp(id: str) -> None:
    with refusals():
        attach(nn.Sequential(DistributedDataParallel(KnownGradients(2, N))), row(id).make(), exchange=Gradients())


CASES: dict[str, Case] = common(Manual, torch.flatten, KEYS) | {
    "gradient_as_bucket_view=True": OPTION,
    "static_graph=True": OPTION,
    "DDP's mixed_precision": OPTION,
    "buckets that change": absent("there is always one bucket for each type of gradient"),
    "parameters that ranks do not use (find_unused_parameters=True)": Case(
        "an unused parameter counts as zero, and one that no rank uses gets zero",
        trial(in_part, partial(same_on_all_ranks, gradient=of_used, keys=KEYS)),
    ),
    "parameters that are trained later": Case(
        "they are reduced from then on", trial(partial(unfrozen, integration=Manual), reduced_later)
    ),
    "ranks that run out of data (join)": Case(
        "a rank without data continues to call and counts as zero",
        trial(partial(uneven, integration=Manual), partial(same_on_all_ranks, gradient=zero_afterwards, keys=KEYS)),
    ),
    "a group that is not the world": Case(
        SAME, trial(partial(in_a_group, integration=Manual), partial(same_on_all_ranks, keys=KEYS), P=3)
    ),
    "torch.compile": Case(SAME, trial(partial(compiled, integration=Manual), partial(same_on_all_ranks, keys=KEYS))),
    "an optimizer in the backward pass": Case("-", trial(with_stepping_optimizer, nothing)),
    "a model that is reduced already": Case("-", trial(with_ddp, nothing)),
}

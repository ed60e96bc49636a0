"""Shared by the tests of adapters: a world as torchrun makes it, a small model, and a check for any training."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sparsync import Report
from sparsync.testing.world import same_bits

DENSITY = 0.05
BATCH = 4
MICRO = f"exact_micro:density={DENSITY}"  # the value of the environment variable SPARSYNC_SCHEME


def as_torchrun() -> int:
    """Set the environment as torchrun does, for frameworks to find; return the rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": 29500}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "tests", "ACCELERATE_USE_CPU": "true"}
    return rank


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def examples(batches: int) -> DataLoader:
    """Make `batches` batches for each of two ranks, always in the same order."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * BATCH * batches, 20, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].sin()), batch_size=BATCH)


def lightning_module(
    batches: int, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **settings: Any
) -> Any:  # Any: a LightningModule, of a package that may be missing
    """Make a module of `network` that trains and validates on `examples` with this optimizer."""
    from lightning.pytorch import LightningModule  # pyright: ignore[reportMissingImports]

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
            return nn.functional.mse_loss(self.network(batch[0]), batch[1])

        def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
            self.training_step(batch, number)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return kind(self.parameters(), **{"lr": 0.01, **settings})

        def train_dataloader(self) -> DataLoader:
            return examples(batches)

    return Module()


class Collected:
    """A recorder that keeps all reports."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def record(self, reports: Iterable[Report], **more: float) -> None:
        self.reports += reports


@dataclass
class AdapterResult:
    """The final state of one rank."""

    weights: list[Tensor]
    reports: list[Report]

    @classmethod
    def of(cls, model: nn.Module, reports: Sequence[Report]) -> "AdapterResult":
        return cls([parameter.detach().clone() for parameter in model.parameters()], list(reports))

    def same_weights(self, other: "AdapterResult") -> bool:
        return all(map(same_bits, self.weights, other.weights))


def check(ranks: Sequence[AdapterResult], steps: int) -> None:
    """Check that the scheme reduced every step's gradients, with fewer bytes than a dense sum, to the same bits on all ranks."""
    count, P = sum(parameter.numel() for parameter in ranks[0].weights), len(ranks)
    dense = 2 * (P - 1) * count * 4 // P
    for rank in ranks:
        assert rank.same_weights(ranks[0])
        assert sorted({report.step for report in rank.reports}) == list(range(steps))
        assert sum(report.elements for report in rank.reports) == steps * count
        for report in rank.reports:
            assert report.sent is not None
            assert 0 < report.sent.nbytes == report.cost.nbytes
            assert report.selected < report.union < report.elements / 2
        assert sum(report.sent.nbytes for report in rank.reports if report.sent) < steps * dense / 2

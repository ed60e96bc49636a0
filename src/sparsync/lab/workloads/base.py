"""What a training job offers the lab, and the few rules that all jobs share: equal shares, exact sums, seeded weights.

The training loop knows nothing of a job but `Workload`; data, models and hyperparameters live in the other files here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sparsync.core import Span, generator, spans

Metric = Literal["perplexity", "accuracy"]
Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Batch:
    """One rank's samples of one step: what the model is given, and what it should say to it."""

    input: Tensor
    target: Tensor


@runtime_checkable
class Workload(Protocol):
    """A training job on real data. All of it is a function of the options, the seed and the step; nothing communicates."""

    name: ClassVar[str]
    metric: ClassVar[Metric]
    better: ClassVar[Better]
    unit: ClassVar[str]  # the quality with its unit, as an axis of a plot says it

    def prepare(self) -> None:
        """Leaves the data checked and in place; called once, before any worker starts.

        Raises DataMissingError, which lists every cure, where the data cannot be had.
        """
        ...

    def model(self, seed: int) -> nn.Module:
        """A new model in training mode, with the same weights for the same seed.

        torch's global generator is neither used nor moved. The model has no buffers: it is its parameters.
        """
        ...

    def batch(self, seed: int, step: int, rank: int, ranks: int) -> Batch:
        """Rank `rank`'s share of global batch `step`; the shares in rank order are the same batch for any number of ranks.

        Raises ValueError where the ranks cannot have equal shares.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the share, so that the mean over ranks is the mean over the global batch."""
        ...

    def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
        """The optimizer and its schedule for a run of `steps` steps; the schedule is stepped once after each."""
        ...

    def clip(self, model: nn.Module) -> None:
        """Limits the reduced gradient, in place, before the optimizer's step."""
        ...

    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        """This rank's part of the validation: (sum, count).

        Added in float64, in any order and for any number of ranks, the parts give the same total to the last bit, provided
        that the ranks hold the same parameters.
        """
        ...

    def quality(self, total: float, count: int) -> float:
        """The figure in `unit` that all ranks' sums and counts amount to."""
        ...

    # Any: nested dicts of numbers and strings, as JSON takes them.
    def describe(self) -> dict[str, Any]:
        """The whole configuration, the number of parameters and the fingerprint of the data, for the results file."""
        ...


def share(batch: int, rank: int, ranks: int) -> Span:
    """Which samples of a global batch are rank `rank`'s: equal, adjacent, in rank order. Raises ValueError where they cannot be."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be in [0, {ranks}) for {ranks} ranks, got {rank}")
    if batch % ranks:
        raise ValueError(
            f"a global batch of {batch} samples cannot be split evenly over {ranks} ranks, and unequal shares would make the "
            f"mean over ranks another loss; choose a number of ranks that divides {batch}, or batch_size a multiple of {ranks}"
        )
    return spans(batch, ranks)[rank]


def chunks(count: int, size: int, rank: int, ranks: int) -> Iterator[Span]:
    """Rank `rank`'s spans of [0, count), cut every `size` however many ranks there are; a rank may have none.

    The cuts do not depend on the ranks, because a matrix product may round a row differently in a batch of other height.
    """
    for start in range(rank * size, count, ranks * size):
        yield Span(start, min(start + size, count))


def exactly_addable(x: Float[Tensor, " n"]) -> float:
    """The sum of `x` to the nearest 2**-20: such sums add without rounding, so in any order, up to 2**33. NaN stays NaN."""
    return float(torch.round(x.double().sum() * 2**20) / 2**20)


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """What `build` makes when torch's global generator is seeded by `seed`; the generator is afterwards as it was before."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which reseeds accelerators as well, outside the fork.
        torch.default_generator.manual_seed(generator(seed, "model", 0).initial_seed())
        return build()


def bare(model: nn.Module) -> nn.Module:
    """The model inside a DistributedDataParallel, whose forward may communicate; any other model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, `model` is in evaluation mode and nothing records gradients; afterwards its mode is what it was."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def parameter_count(model: nn.Module) -> int:
    """The number of trained elements of `model`."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def require_positive(**values: int | float) -> None:
    """Raises ValueError naming the first value that is not above zero."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")

"""The base class of training jobs, and rules that all jobs share: equal shares, exact sums, seeded weights.

The training loop uses jobs only through `Workload`; data, models and hyperparameters are in the other files here.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from sparsync.core import generator, spans
from sparsync.exchanges.choice import family_of
from sparsync.recipes import Family
from sparsync.schemes import Span
from sparsync_lab.workloads.job_errors import naming

Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Batch:
    """One rank's samples of one step: the model's input and its target."""

    input: Tensor
    target: Tensor


class Workload(ABC):
    """A training job as the lab uses it: `model`, `batch`, `loss`, `optimizer`, `evaluate` and `quality`.

    Your class need not be a subclass: with `model`, `batch` and `loss` it is wrapped, see `sparsync_lab.workloads.plain`. A subclass, such
    as the lab's jobs, promises more: everything is a function of the options, the seed and the step, and nothing communicates. Options
    are the arguments of the constructor, such as the fields of a frozen dataclass. If there is an option `batch_size`, equal shares are
    checked before the start.
    """

    name: ClassVar[str] = ""  # in results; empty: the class name
    metric: ClassVar[str]  # of the quality, such as "perplexity"
    better: ClassVar[Better]  # which quality is better
    unit: ClassVar[str]  # the quality with its unit, to label an axis
    repeats_passes: ClassVar[bool] = False  # a loss calls the model once, with `batch.input` of a fixed shape
    held_out: ClassVar[bool] = False  # set apart to check claims: no setting of the library may be chosen on this job
    find_unused_parameters: ClassVar[bool] = False  # of DistributedDataParallel: a step may leave some parameters out

    def job_class(self) -> type:
        """Return the class written by the user, for messages."""
        return type(self)

    def prepare(self) -> None:
        """Check the data and put it in place. Called once, before any worker starts.

        Raises DataMissingError, with every fix, if the data cannot be found.
        """
        return

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """Make a model in training mode; equal seeds give equal weights.

        torch's global generator is neither used nor changed (see `seeded`). As under DistributedDataParallel, rank 0's buffers count.
        """

    @abstractmethod
    def batch(self, seed: int, step: int, rank: int, ranks: int) -> Any:  # Any: what `loss` takes
        """Make the share of rank `rank` of global batch `step`; all shares in rank order are the same batch for any number of ranks.

        Raises ValueError if the ranks cannot have equal shares (see `share`).
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:  # Any: of `batch`
        """Compute the mean loss over the share, so that the mean over ranks is the mean over the global batch."""

    @abstractmethod
    def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
        """Make the optimizer and its schedule for a run of `steps` steps; the schedule is stepped once after each step."""

    def clip(self, model: nn.Module, factor: float = 1.0) -> None:
        """Limit the gradient in place, before the optimizer's step, to `factor` times the norm of this job.

        The norm is chosen for the reduced gradient. A rank's local gradient, which is clipped with local steps, is longer by about
        `factor`.
        """
        return

    def at_rate(self, factor: float) -> "Workload":
        """Copy this job with `factor` times its learning rate.

        Raises ValueError unless the job is a dataclass with a number called `learning_rate`.
        """
        rate = getattr(self, "learning_rate", None)
        if not is_dataclass(self) or not isinstance(rate, float):
            raise ValueError(
                f"{type(self).__name__} has no rate to scale; write it as a dataclass with a field learning_rate: float, or define at_rate"
            )
        return replace(self, learning_rate=rate * factor)

    @abstractmethod
    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        """Compute the sum and the count over the share of rank `rank` of the validation data.

        Added in float64, in any order and for any number of ranks, the sums give a bit-identical total if the ranks have the same
        parameters (see `chunks` and `exactly_addable`).
        """

    @abstractmethod
    def quality(self, total: float, count: int) -> float:
        """Compute the quality in `unit` from the sums and counts of all ranks."""

    def describe(self) -> dict[str, Any]:  # Any: nested dicts of numbers and strings, as JSON takes them
        """Describe the configuration for the results file: the options, the number of parameters and the fingerprint of the data."""
        options = {key: value for key, value in vars(self).items() if isinstance(value, int | float | str)}
        return {
            "workload": self.name or type(self).__qualname__,
            "metric": self.metric,
            "options": asdict(self) if is_dataclass(self) else options,
            "parameters": parameter_count(self.model(seed=0)),
        }


def with_data(described: dict[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    """Replace the option `data` in a description by the fingerprint of the data."""
    source = described["options"].pop("data") or "package"
    return {**described, "data": {"source": source, **data}}


def loss_of(workload: Workload, model: nn.Module, seed: int, step: int, rank: int, ranks: int) -> Tensor:
    """Compute the loss of one rank's share of the batch, whose tensors are moved to the model's device.

    Raises JobError with class, method, step and rank if the job fails.
    """
    with naming(workload.job_class(), "batch", step, rank, ranks):
        batch = moved(workload.batch(seed, step, rank, ranks), device_of(model))
    with naming(workload.job_class(), "loss", step, rank, ranks):
        return workload.loss(model, batch)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter; a job's model has one."""
    return next(model.parameters()).device


def mixed_precision(device: str) -> torch.autocast:
    """Make the context of a forward pass: float32 on "cpu", torch's bfloat16 autocast on "cuda" and "cpu-bfloat16"."""
    return torch.autocast("cuda" if device == "cuda" else "cpu", torch.bfloat16, enabled=device != "cpu")


def moved(batch: Any, device: torch.device) -> Any:  # Any: a batch of any form
    """Move everything with a method `to`, in dicts, tuples, lists and dataclasses, to the device."""
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if type(batch) is dict:
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [moved(each, device) for each in batch]
        make: Any = getattr(type(batch), "_make", type(batch))  # _make: of a named tuple
        return make(parts)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(
            batch, **{each.name: moved(getattr(batch, each.name), device) for each in fields(batch) if each.init}
        )
    return batch


def model_and_optimizer(workload: "Workload") -> tuple[nn.Module, Optimizer]:
    """Make both as at the start of a training with seed 0. Raises JobError if a method of the job fails."""
    with naming(workload.job_class(), "model"):
        model = workload.model(0)
    with naming(workload.job_class(), "optimizer"):
        return model, workload.optimizer(model, 1)[0]


def family_of_job(workload: "Workload") -> Family:
    """Find the family of recipes for the job's optimizer. Prepares its data."""
    workload.prepare()
    return family_of(model_and_optimizer(workload)[1])


def share(batch: int, rank: int, ranks: int) -> Span:
    """Compute the span of rank `rank` in a global batch: equal, adjacent, in rank order. Raises ValueError if they cannot be equal."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be in [0, {ranks}) for {ranks} ranks, got {rank}")
    if batch % ranks:
        raise ValueError(
            f"a global batch of {batch} samples cannot be split evenly over {ranks} ranks, and unequal shares would make the "
            f"mean over ranks another loss; choose a number of ranks that divides {batch}, or batch_size a multiple of {ranks}"
        )
    return spans(batch, ranks)[rank]


def chunks(count: int, size: int, rank: int, ranks: int) -> Iterator[Span]:
    """Yield the spans of rank `rank` in [0, count), cut every `size`; a rank may have none.

    The cuts do not depend on the ranks, because a matrix product may round a row differently in a batch of another height.
    """
    for start in range(rank * size, count, ranks * size):
        yield Span(start, min(start + size, count))


def exactly_addable(x: Float[Tensor, " n"]) -> float:
    """Sum `x` to the nearest 2**-20: such sums add exactly, hence in any order, up to 2**33. NaN stays NaN."""
    return float(torch.round(x.double().sum() * 2**20) / 2**20)


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Call `build` with torch's global generator seeded by `seed`; the generator is restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which reseeds accelerators as well, outside the fork.
        torch.default_generator.manual_seed(generator(seed, "model", 0).initial_seed())
        return build()


def rise_and_cosine(optimizer: Optimizer, steps: int, warmup: int, lowest: float) -> LRScheduler:
    """Make the schedule of a linear rise over `warmup` steps, then half a cosine from the full rate to `lowest` of it."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / (steps - warmup))
        return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


def bare(model: nn.Module) -> nn.Module:
    """Unwrap the model in a DistributedDataParallel, whose forward may communicate; return any other model unchanged."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode, without gradients, for the block; then restore the mode of each module."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, before in training.items():
            module.training = before


def parameter_count(model: nn.Module) -> int:
    """Count the trained elements of `model`."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

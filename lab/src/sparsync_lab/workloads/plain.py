"""Wrap plain classes with `model`, `batch` and `loss` as Workloads, with defaults for everything else."""

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from sparsync.core import generator
from sparsync_lab.workloads.base import (
    Better,
    Workload,
    bare,
    device_of,
    evaluating,
    exactly_addable,
    loss_of,
    moved,
    parameter_count,
    seeded,
)
from sparsync_lab.workloads.job_errors import naming

HELD_OUT = 1_000_000  # first step of the batches for the default evaluation, beyond any training
HELD_OUT_BATCHES = 16
LEARNING_RATE = 1e-3  # PyTorch's default for AdamW, if the job has none


# The signature of each method, and the arguments passed by name if it has such parameters.
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "model": ("def model(self) -> nn.Module", ("seed",)),
    "batch": ("def batch(self, step, rank, ranks)", ("step", "rank", "ranks", "seed")),
    "loss": ("def loss(self, model, batch) -> Tensor", ()),
    "optimizer": ("def optimizer(self, model) -> Optimizer", ("steps",)),
    "schedule": ("def schedule(self, optimizer, steps) -> LRScheduler", ("steps",)),
    "clip": ("def clip(self, model, factor) -> None", ("factor",)),
    "evaluate": ("def evaluate(self, model) -> float", ()),
    "prepare": ("def prepare(self) -> None", ()),
}
REQUIRED = ("model", "batch", "loss")


def check_class(kind: object, name: str) -> None:
    """Raise ValueError unless `kind`, which the user called `name`, is a class with `model`, `loss` and a `batch` of step and rank."""
    if not inspect.isclass(kind):
        raise ValueError(f"workload {name!r} must be a class with the methods model, batch and loss, got {kind!r}")
    where = f"workload {name!r}: class {kind.__qualname__}"
    for method in REQUIRED:
        if not callable(getattr(kind, method, None)):
            raise ValueError(f"{where} has no method {method!r}; {_written_as(method)}")
    # Otherwise all ranks would train on the same samples in all steps.
    if not {"step", "rank"} <= _taken(kind, "batch"):
        raise ValueError(f"{where} has a 'batch' without step or rank; {_written_as('batch')}")


def adapted(job: object, name: str) -> "PlainJob":
    """Wrap an object whose class has passed `check_class` as a Workload.

    Raises ValueError for a quality without `evaluate`, for methods that would be ignored, and if `better` is neither lower nor higher.
    """
    where = f"workload {name!r}: class {type(job).__qualname__}"
    better = getattr(job, "better", "lower")
    if better not in get_args(Better):
        raise ValueError(f"{where} has better {better!r}; write one of {', '.join(get_args(Better))}")
    if not hasattr(job, "evaluate") and any(hasattr(job, each) for each in ("metric", "better")):
        raise ValueError(
            f"{where} names a quality and has no method 'evaluate'; {_written_as('evaluate')}, or leave "
            "metric and better out: then the quality is the mean loss of held-out batches"
        )
    if unused := [each for each in ("quality", "describe") if hasattr(job, each)]:
        raise ValueError(
            f"{where} has a method {unused[0]!r}, which only a subclass of sparsync_lab.workloads.base.Workload may have; return the "
            "quality from 'evaluate', or write such a subclass"
        )
    return PlainJob(job)


@dataclass(frozen=True)
class PlainJob(Workload):
    """A plain class as a Workload. Defaults for what the class lacks:

    - optimizer: AdamW with the job's `learning_rate`, or 1e-3; schedule: none; clip: nothing.
    - evaluate: the mean loss over 16 batches of steps from 1,000,000 on, each as for a single rank.
    - seeds: torch's global generator is seeded by the seed before `model`, and by seed, step and rank before each batch, so that `batch`
      and `loss` draw the same for every scheme and in each comparison.
    """

    job: Any  # the user's object
    rate: float = 1.0  # factor on the learning rate of the job's optimizer

    @property
    def metric(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # a class attribute elsewhere
        """The name of the quality: "loss" by default, or "held-out loss" without `evaluate`."""
        return getattr(self.job, "metric", "loss") if self._has("evaluate") else "held-out loss"

    @property
    def better(self) -> Better:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Which quality is better; lower by default."""
        return getattr(self.job, "better", "lower")

    @property
    def unit(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The quality as an axis label."""
        return getattr(self.job, "unit", self.metric if self._has("evaluate") else "mean loss of held-out batches")

    @property
    def find_unused_parameters(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The argument of this name for DistributedDataParallel."""
        return bool(getattr(self.job, "find_unused_parameters", False))

    def job_class(self) -> type:
        return type(self.job)

    def prepare(self) -> None:
        """Call the job's method, if any."""
        if self._has("prepare"):
            self._call("prepare")

    def model(self, seed: int) -> nn.Module:
        """Make the job's model in training mode; parts that the job has put into evaluation mode stay in it."""
        made = seeded(lambda: self._call("model", seed=seed), seed)
        return made if made.training else made.train()

    def batch(self, seed: int, step: int, rank: int, ranks: int) -> Any:  # Any: whatever the job's loss takes
        """Make the job's batch, with torch's global generator seeded by seed, step and rank."""
        drawn = generator(seed, f"batch/{rank}", step).initial_seed()
        # Not torch.manual_seed, which takes a stack trace for every accelerator that is not yet in use.
        torch.default_generator.manual_seed(drawn)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(drawn)
        return self._call("batch", step=step, rank=rank, ranks=ranks, seed=seed)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:  # Any: of the job's `batch`
        """Compute the job's loss of a batch. Raises TypeError unless it is a tensor with one element."""
        loss = self._call("loss", model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise TypeError(
                f"it must return the mean loss as a tensor with one element, got {got}; {_written_as('loss')}"
            )
        return loss.reshape(())

    def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
        """Make the job's optimizer and schedule, by default AdamW at a constant rate."""
        if steps > HELD_OUT and not self._has("evaluate"):
            raise ValueError(
                f"a training of {steps} steps reaches the held-out batches, from step {HELD_OUT} on; write `evaluate`"
            )
        model = bare(model)
        if not self._has("optimizer"):
            made = AdamW(model.parameters(), lr=getattr(self.job, "learning_rate", LEARNING_RATE))
        else:
            made = self._call("optimizer", model, steps=steps)
        optimizer: Optimizer
        optimizer, schedule = made if isinstance(made, tuple) else (made, None)
        if schedule is not None and self.rate != 1:
            raise ValueError(
                "the rate of an optimizer that comes with its schedule cannot be scaled; write a method "
                f"`{METHODS['schedule'][0]}`, or a dataclass with a field learning_rate: float"
            )
        for group in optimizer.param_groups:
            group["lr"] *= self.rate
        if schedule is None and self._has("schedule"):
            schedule = self._call("schedule", optimizer, steps=steps)
        return optimizer, ConstantLR(optimizer, factor=1.0) if schedule is None else schedule

    def clip(self, model: nn.Module, factor: float = 1.0) -> None:
        """Call the job's method, if any; without a parameter `factor` it clips a rank's gradient like the mean."""
        if self._has("clip"):
            self._call("clip", bare(model), factor=factor)

    def at_rate(self, factor: float) -> "PlainJob":
        """Copy this job with `factor` times the learning rate, in its field `learning_rate` or in its optimizer."""
        rate = getattr(self.job, "learning_rate", None)
        if is_dataclass(self.job) and isinstance(rate, float):
            return replace(self, job=replace(cast(Any, self.job), learning_rate=rate * factor))
        return replace(self, rate=self.rate * factor)

    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        """Compute this rank's sum and count: by the job's method on rank 0 alone, or over held-out batches."""
        model = bare(model)
        with evaluating(model), naming(self.job_class(), "evaluate", rank=rank, ranks=ranks):
            if not self._has("evaluate"):
                return self._held_out(model, rank, ranks)
            if rank != 0:
                return 0.0, 0
            on_cpu = device_of(model).type == "cpu"
            return float(self._call("evaluate", model if on_cpu else _TakesAnyDevice(model))), 1

    def quality(self, total: float, count: int) -> float:
        return total / count

    def describe(self) -> dict[str, Any]:
        """Describe the options, the number of parameters and a fingerprint of the job's file."""
        options = asdict(cast(Any, self.job)) if is_dataclass(self.job) else vars(self.job)
        return {
            "workload": getattr(self.job, "name", type(self.job).__qualname__),
            "metric": self.metric,
            "options": {key: value for key, value in options.items() if isinstance(value, int | float | str)},
            "parameters": parameter_count(self.model(seed=0)),
            "source": _fingerprint(type(self.job)),
        }

    def _held_out(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        total, count = 0.0, 0
        for number in range(rank, HELD_OUT_BATCHES, ranks):
            total += exactly_addable(loss_of(self, model, -1, HELD_OUT + number, 0, 1).flatten())
            count += 1
        return total, count

    @cached_property
    def _takes(self) -> Mapping[str, frozenset[str]]:
        """The named parameters of each existing method."""
        return {method: _taken(self.job, method) for method in METHODS if self._has(method)}

    def _has(self, method: str) -> bool:
        return hasattr(self.job, method)

    def _call(self, method: str, *given: Any, **named: Any) -> Any:  # Any: as the job's method takes and returns
        taken = {key: value for key, value in named.items() if key in self._takes[method]}
        if method in ("batch", "loss"):  # named by the loops, which know step and rank
            return getattr(self.job, method)(*given, **taken)
        with naming(self.job_class(), method):
            return getattr(self.job, method)(*given, **taken)


class _TakesAnyDevice(nn.Module):
    """A model on a GPU that takes tensors of any device and returns results there, since jobs evaluate where their data are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:  # Any: what the job gives its model, and what that returns
        given = next((each.device for each in inputs if isinstance(each, Tensor)), torch.device("cpu"))
        return moved(self.model(*(moved(each, device_of(self.model)) for each in inputs)), given)


def _written_as(method: str) -> str:
    return f"write it as: {METHODS[method][0]}"


def _taken(job: Any, method: str) -> frozenset[str]:  # Any: a job or its class
    """List the parameters that the method takes by name."""
    parameters = inspect.signature(getattr(job, method)).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return frozenset(METHODS[method][1])
    names = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return frozenset(names.intersection(METHODS[method][1]))


def _fingerprint(kind: type) -> str:
    """Compute the SHA-256 digest of the class's file: an edited job is another job."""
    try:
        return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return "none"

"""Plain classes as jobs: `model`, `batch` and `loss`, and a default for everything else that the lab asks of a Workload."""

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

HELD_OUT = 1_000_000  # the first step of the batches of the default evaluation, beyond the end of trainings
HELD_OUT_BATCHES = 16
LEARNING_RATE = 1e-3  # of AdamW in PyTorch, where the job has none


# How each method is written, and what it is given by name where it has a parameter of that name.
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "model": ("def model(self) -> nn.Module", ("seed",)),
    "batch": ("def batch(self, step, rank, ranks)", ("step", "rank", "ranks", "seed")),
    "loss": ("def loss(self, model, batch) -> Tensor", ()),
    "optimizer": ("def optimizer(self, model) -> Optimizer", ("steps",)),
    "schedule": ("def schedule(self, optimizer, steps) -> LRScheduler", ("steps",)),
    "clip": ("def clip(self, model, factor) -> None", ("factor",)),
    "evaluate": ("def evaluate(self, model) -> float", ("rank", "ranks")),
    "quality": ("def quality(self, total, count) -> float", ()),
    "prepare": ("def prepare(self) -> None", ()),
    "describe": ("def describe(self) -> dict", ()),
}
REQUIRED = ("model", "batch", "loss")


def check_class(kind: object, name: str) -> None:
    """Raise ValueError unless `kind`, which the user called `name`, is a class with `model`, `loss` and a `batch` of its step and rank."""
    if not inspect.isclass(kind):
        raise ValueError(f"workload {name!r} must be a class with the methods model, batch and loss, got {kind!r}")
    where = f"workload {name!r}: class {kind.__qualname__}"
    for method in REQUIRED:
        if not callable(getattr(kind, method, None)):
            raise ValueError(f"{where} has no method {method!r}; {_written_as(method)}")
    # Without them all ranks would train on the same samples in all steps.
    if not {"step", "rank"} <= _taken(kind, "batch"):
        raise ValueError(f"{where} has a 'batch' without step or rank; {_written_as('batch')}")


def adapted(job: object, name: str) -> "PlainJob":
    """Return the Workload of an object whose class has passed `check_class`.

    Raises ValueError for a quality that nothing evaluates, or whose `better` is neither lower nor higher.
    """
    where = f"workload {name!r}: class {type(job).__qualname__}"
    better = getattr(job, "better", "lower")
    if better not in get_args(Better):
        raise ValueError(f"{where} has better {better!r}; write one of {', '.join(get_args(Better))}")
    if not hasattr(job, "evaluate") and any(hasattr(job, each) for each in ("metric", "better", "quality")):
        raise ValueError(
            f"{where} names a quality and has no method 'evaluate'; {_written_as('evaluate')}, or leave "
            "metric, better and quality out: then the quality is the mean loss of held-out batches"
        )
    return PlainJob(job)


@dataclass(frozen=True)
class PlainJob(Workload):
    """A plain class as a Workload. What the class does not say:

    - optimizer: AdamW with `learning_rate` of the job, or 1e-3; schedule: none; clip: nothing.
    - evaluate: the mean loss over 16 batches of steps from 1,000,000 on, each as the only rank of one would have it.
    - seeds: `model` runs with torch's global generator seeded by the seed; before each batch it is seeded by seed, step and rank, so what
      `batch` and `loss` draw is the same in each comparison, for every scheme.
    """

    job: Any  # the user's object
    rate: float = 1.0  # times the learning rate that the job's optimizer has

    @property
    def metric(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # a class attribute elsewhere
        """Return the name of the quality: "loss" where the job does not name its own, "held-out loss" where it has no `evaluate`."""
        return getattr(self.job, "metric", "loss") if self._has("evaluate") else "held-out loss"

    @property
    def better(self) -> Better:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return which quality is better: the lower one, where the job does not say."""
        return getattr(self.job, "better", "lower")

    @property
    def unit(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the label of an axis of the quality."""
        return getattr(self.job, "unit", self.metric if self._has("evaluate") else "mean loss of held-out batches")

    @property
    def find_unused_parameters(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the argument of this name for DistributedDataParallel."""
        return bool(getattr(self.job, "find_unused_parameters", False))

    def job_class(self) -> type:
        """Return the user's class."""
        return type(self.job)

    def prepare(self) -> None:
        """Call the job's own, if it has one."""
        if self._has("prepare"):
            self._call("prepare")

    def model(self, seed: int) -> nn.Module:
        """Return the job's model in training mode; parts that the job has put into evaluation mode stay in it."""
        made = seeded(lambda: self._call("model", seed=seed), seed)
        return made if made.training else made.train()

    def batch(self, seed: int, step: int, rank: int, ranks: int) -> Any:  # Any: whatever the job's loss takes
        """Return the job's batch, with torch's global generator seeded by seed, step and rank."""
        drawn = generator(seed, f"batch/{rank}", step).initial_seed()
        # Not torch.manual_seed, which takes a stack trace wherever an accelerator is not in use yet.
        torch.default_generator.manual_seed(drawn)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(drawn)
        return self._call("batch", step=step, rank=rank, ranks=ranks, seed=seed)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:  # Any: of the job's `batch`
        """Return the job's loss of a batch. Raises TypeError where it is no tensor with one element."""
        loss = self._call("loss", model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise TypeError(
                f"it must return the mean loss as a tensor with one element, got {got}; {_written_as('loss')}"
            )
        return loss.reshape(())

    def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
        """Return the job's optimizer and schedule, or AdamW at a constant rate."""
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
        """Call the job's own, if it has one; one without `factor` clips a rank's own gradient as the mean one."""
        if self._has("clip"):
            self._call("clip", bare(model), factor=factor)

    def at_rate(self, factor: float) -> "PlainJob":
        """Return this job with `factor` times the learning rate: its field `learning_rate`, or what its optimizer has."""
        rate = getattr(self.job, "learning_rate", None)
        if is_dataclass(self.job) and isinstance(rate, float):
            return replace(self, job=replace(cast(Any, self.job), learning_rate=rate * factor))
        return replace(self, rate=self.rate * factor)

    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        """Return this rank's sum and count: of the job's `evaluate` with `rank`, of one without on rank 0 alone, or of held-out batches."""
        model = bare(model)
        with evaluating(model), naming(self.job_class(), "evaluate", rank=rank, ranks=ranks):
            if not self._has("evaluate"):
                return self._held_out(model, rank, ranks)
            shared = "rank" in self._takes["evaluate"]
            if not shared and rank != 0:
                return 0.0, 0
            on_cpu = device_of(model).type == "cpu"
            found = self._call("evaluate", model if on_cpu else _TakesAnyDevice(model), rank=rank, ranks=ranks)
            total, count = found if shared else (found, 1)
            return float(total), int(count)

    def quality(self, total: float, count: int) -> float:
        """Return the job's quality of the sum and count of all ranks; their quotient, if it defines none."""
        if self._has("quality"):
            return float(self._call("quality", total, count))
        return total / count

    def describe(self) -> dict[str, Any]:
        """Return the options, the number of parameters and a fingerprint of the job's file, and what the job says itself."""
        options = asdict(cast(Any, self.job)) if is_dataclass(self.job) else vars(self.job)
        described = {
            "workload": getattr(self.job, "name", type(self.job).__qualname__),
            "metric": self.metric,
            "options": {key: value for key, value in options.items() if isinstance(value, int | float | str)},
            "parameters": parameter_count(self.model(seed=0)),
            "source": _fingerprint(type(self.job)),
        }
        return {**described, **(self._call("describe") if self._has("describe") else {})}

    def _held_out(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        total, count = 0.0, 0
        for number in range(rank, HELD_OUT_BATCHES, ranks):
            total += exactly_addable(loss_of(self, model, -1, HELD_OUT + number, 0, 1).flatten())
            count += 1
        return total, count

    @cached_property
    def _takes(self) -> Mapping[str, frozenset[str]]:
        """What each method that there is takes by name."""
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
    """A model on a GPU that takes tensors of any device, and returns its result on theirs: jobs evaluate where their data are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:  # Any: what the job gives its model, and what that returns
        given = next((each.device for each in inputs if isinstance(each, Tensor)), torch.device("cpu"))
        return moved(self.model(*(moved(each, device_of(self.model)) for each in inputs)), given)


def _written_as(method: str) -> str:
    return f"write it as: {METHODS[method][0]}"


def _taken(job: Any, method: str) -> frozenset[str]:  # Any: a job or its class
    """Return the parameters that the method takes by name."""
    parameters = inspect.signature(getattr(job, method)).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return frozenset(METHODS[method][1])
    names = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return frozenset(names.intersection(METHODS[method][1]))


def _fingerprint(kind: type) -> str:
    """Return the SHA-256 digest of the file of the class: a job that is edited is another job."""
    try:
        return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return "none"

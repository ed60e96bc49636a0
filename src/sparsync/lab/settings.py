"""What a comparison is asked to do: parsed, checked and tried out in this process before anything is started."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparsync import schemes
from sparsync.base.scheme import Scheme
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Bucket
from sparsync.lab import workloads
from sparsync.lab.netlab import parse_rate
from sparsync.lab.workloads.base import Workload, share

UNLIMITED = "none"
TRIAL_ELEMENTS = 64  # of the bucket every scheme is tried on before processes are started


@dataclass(frozen=True)
class SchemeChoice:
    """One scheme of a comparison: how it is called in tables, its name in the registry and its settings."""

    label: str
    name: str
    config: dict[str, Any] = field(default_factory=dict)  # Any: the fields of the scheme's own config

    def make(self) -> Scheme:
        """A new scheme; every rank and every run makes its own."""
        return schemes.get(self.name, **self.config)


@dataclass(frozen=True)
class Settings:
    """One comparison. Raises ValueError, in `check`, for whatever could not run."""

    schemes: tuple[SchemeChoice, ...]
    workload: str = "shakespeare"
    options: dict[str, Any] = field(default_factory=dict)  # Any: options of the workload, checked by its constructor
    ranks: int = 4
    link: str = "100mbit"  # each way, of every rank; "none": loopback without limits
    density: float = 0.01  # for the schemes that take one
    target: float | None = None  # quality to reach
    steps: int = 300
    eval_every: int = 10  # steps
    seeds: tuple[int, ...] = (0,)
    bucket_mb: float = 25.0  # DDP's bucket_cap_mb
    timeout_s: float = 120.0  # for one operation of a rank

    @property
    def rate_bits_per_s(self) -> float | None:
        """The rate of every link each way; None without limits."""
        return None if self.link == UNLIMITED else parse_rate(self.link)

    def check(self) -> Workload:
        """The workload, its data at hand, after every setting has been looked at and every scheme tried once."""
        for name, value in (("ranks", self.ranks), ("steps", self.steps), ("eval-every", self.eval_every)):
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if not self.schemes or not self.seeds:
            raise ValueError("a comparison needs at least one scheme and one seed")
        check_labels(self.schemes)
        if self.timeout_s <= 0 or self.bucket_mb <= 0:
            raise ValueError(f"--timeout and --bucket-mb must be above 0, got {self.timeout_s} and {self.bucket_mb}")
        assert self.rate_bits_per_s is None or self.rate_bits_per_s > 0
        for choice in self.schemes:
            try_out(choice, self.ranks)
        workload = workloads.get(self.workload, **self.options)
        share(getattr(workload, "batch_size", self.ranks), 0, self.ranks)
        workload.prepare()
        return workload


def parse_schemes(text: str, density: float, skip: int | float | None = None) -> tuple[SchemeChoice, ...]:
    """The schemes of "dense,topk,skip_reduce:skip=2:form=direct"; `density` and `skip` go to those that take them and do not name them.

    Lists are joined by "+": "protect=*.bias+norm.*". Raises ValueError for an unknown scheme or setting, suggesting the nearest.
    """
    return tuple(_parse_scheme(item.strip(), density, skip) for item in text.split(",") if item.strip())


def check_labels(schemes: Sequence[SchemeChoice]) -> None:
    """Raises ValueError where two schemes would be called the same in tables."""
    labels = [choice.label for choice in schemes]
    if len(set(labels)) < len(labels):
        raise ValueError(f"--schemes names one twice: {', '.join(labels)}")


def try_out(choice: SchemeChoice, ranks: int) -> None:
    """Reduces one small bucket on as many ranks as will train, so that a setting that cannot work is found now."""

    def reduce(comm: LocalComm) -> None:
        choice.make().reduce(Bucket("trial", torch.zeros(TRIAL_ELEMENTS), 0), comm)

    try:
        LocalWorld(ranks).run(reduce)
    except ValueError as error:
        raise ValueError(f"scheme {choice.label!r} cannot run on {ranks} ranks: {error}") from error


def _parse_scheme(text: str, density: float, skip: int | float | None) -> SchemeChoice:
    name, *settings = text.split(":")
    config: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"a setting of a scheme is written key=value, got {setting!r} in {text!r}")
        parsed = _value(value)
        config[key] = (
            [parsed] if key in ("protect", "dense") and isinstance(parsed, str) and parsed != "auto" else parsed
        )
    for key, value in (("density", density), ("skip", skip)):
        if value is not None and key not in config and key in schemes.settings(name):
            config[key] = value
    choice = SchemeChoice(text, name, config)
    try:
        choice.make()
    except TypeError as error:
        raise ValueError(f"a setting in {text!r} is of the wrong type: {error}; see `sparsync schemes`") from error
    return choice


def _value(text: str) -> Any:  # Any: whatever the text looks like
    if "+" in text:
        return [part for part in text.split("+") if part]
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

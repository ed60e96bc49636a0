"""The settings of a comparison, checked in this process before any rank starts."""

from dataclasses import dataclass, field
from typing import Any

from sparsync_lab import workloads
from sparsync_lab.netlab import Delay, delay_of, rates
from sparsync_lab.netlab.delay import check_delay
from sparsync_lab.scheme_choice import SchemeChoice, check_labels, check_optimizer, try_out
from sparsync_lab.workloads.base import Workload, model_and_optimizer, share


@dataclass(frozen=True)
class CompareSettings:
    """One comparison. `check` raises ValueError for settings that cannot run."""

    schemes: tuple[SchemeChoice, ...]
    workload: str = "shakespeare"  # a name, package.module:Class or path/to/file.py:Class
    options: dict[str, Any] = field(default_factory=dict)  # Any: options of the workload, checked by its constructor
    ranks: int = 4
    link: str = "100mbit"  # each way, of every rank; "none": loopback without limits
    up: str | None = None  # rate at which a rank sends, if not `link`
    down: str | None = None  # rate at which it receives, if not `link`
    delay: str | None = None  # one-way, between any two ranks
    jitter: str | None = None  # of the delay
    density: float = 0.01  # for the schemes that take one
    target: float | None = None  # quality to reach
    steps: int = 300
    eval_every: int = 10  # steps
    seeds: tuple[int, ...] = (0,)
    bucket_mb: float = 25.0  # DDP's bucket_cap_mb
    timeout_s: float = 120.0  # for one operation of a rank

    @property
    def rates_bits_per_s(self) -> tuple[float | None, float | None]:
        """The upload and download rates of every link; None without limits."""
        return rates(self.link, self.up, self.down)

    @property
    def rate_bits_per_s(self) -> float | None:
        """The slower direction's rate, since every byte sent is also received. None without limits."""
        up, down = self.rates_bits_per_s
        return None if up is None or down is None else min(up, down)

    @property
    def between(self) -> Delay:
        return delay_of(self.delay, self.jitter)

    def check(self) -> Workload:
        """Check the settings together, try every scheme once, and return the workload with its data prepared."""
        check_labels(self.schemes)
        check_delay(self.between, self.rate_bits_per_s is not None)
        for choice in self.schemes:
            try_out(choice, self.ranks)
        workload = workloads.get(self.workload, **self.options)
        share(getattr(workload, "batch_size", self.ranks), 0, self.ranks)
        workload.prepare()
        check_optimizer(self.schemes, lambda: model_and_optimizer(workload))
        return workload


def settings_from_json(plain: dict[str, Any]) -> CompareSettings:  # Any: JSON, as dataclasses.asdict makes it
    """Rebuild settings from the JSON form of `dataclasses.asdict`."""
    choices = tuple(SchemeChoice(**each) for each in plain["schemes"])
    return CompareSettings(**{**plain, "schemes": choices, "seeds": tuple(plain["seeds"])})

"""Results files with exact numbers, for tests of their readers: times and sizes are small multiples of powers of two."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparsync_lab.report.results import End, Quality, Record, Run, SchemeStart, StepRecord, append, read
from sparsync_lab.report.summary import RunSummary, summarise

RUN = Run(
    run="one",
    time="2024-02-29T12:00:00+00:00",
    command=["/somewhere/bin/sparsync", "compare", "--target", "150", "--out", "my results"],
    config={
        "workload": "shakespeare",
        "ranks": 4,
        "link": "8mbit",
        "rate_bits_per_s": 8_000_000,
        "target": 150.0,
        "steps": 4,
        "seeds": [0],
    },
    workload={
        "metric": "perplexity",
        "better": "lower",
        "unit": "validation perplexity",
        "parameters": 500_000,
        "data": {"words": 3},
    },
    versions={"python": "3.11.0", "torch": "2.13.0", "commit": None},
    machine={"cpu": "a processor", "cores": 2},
    limited=True,
)
NETWORK = replace(
    RUN, config={**RUN.config, "link": "none", "rate_bits_per_s": None}, limited=False, network="4 hosts, TCP over eth0"
)
UNLIMITED = replace(RUN, config={**RUN.config, "link": "none", "rate_bits_per_s": None}, limited=False)


def run(target: float | None = 150.0, **changes: Any) -> Run:  # Any: fields of Run
    """Copy RUN with another target, and other fields if given."""
    made = replace(RUN, **changes)
    return replace(made, config={**made.config, "target": target})


@dataclass(frozen=True)
class Made:
    """The records of one scheme with one seed: steps of `step_s` seconds, each followed by an evaluation."""

    scheme: str
    values: tuple[float, ...]  # quality after each step
    loss: float = 2.0  # of each step
    step_s: float = 1.0
    seed: int = 0
    compute_s: float = 0.25
    own_compute_s: float | None = None
    wait_s: float = 0.5
    reduce_s: float = 0.625
    sent_bytes: float = 1000.0
    interface_bytes: float | None = 1250.0
    status: str | None = "finished"  # None: no end record
    replicas_identical: bool | None = True
    exchanges: int | None = None
    missed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)  # in addition to the name

    def records(self, run_id: str = "one") -> list[Record]:
        who: dict[str, Any] = {"run": run_id, "scheme": self.scheme, "seed": self.seed}
        times = {"compute_s": self.compute_s, "own_compute_s": self.own_compute_s}
        made: list[Record] = [SchemeStart(**who, config={"name": self.scheme, **self.config}, **times)]
        for step, value in enumerate(self.values, start=1):
            seconds = step * self.step_s
            made += [
                StepRecord(
                    **who,
                    step=step,
                    loss=self.loss,
                    seconds=seconds,
                    step_s=self.step_s,
                    wait_s=self.wait_s,
                    reduce_s=self.reduce_s,
                    sent_bytes=self.sent_bytes,
                    interface_bytes=self.interface_bytes,
                    messages=6.0,
                    union_density=0.5,
                ),
                Quality(**who, step=step, seconds=seconds, value=value),
            ]
        if self.status is not None:
            counts = {"exchanges": self.exchanges, "missed": self.missed}
            made.append(End(**who, replicas_identical=self.replicas_identical, status=self.status, **counts))
        return made


DENSE = Made("dense", (400.0, 200.0, 100.0, 90.0), step_s=4.0, wait_s=3.0, reduce_s=3.5, sent_bytes=3_000_000.0)
BF16 = Made("bf16", (400.0, 200.0, 100.0, 90.0), step_s=2.0, wait_s=1.0, reduce_s=1.5, sent_bytes=1_500_000.0)
SPARSE = Made("topk", (400.0, 200.0, 100.0, 90.0), step_s=1.0)


def write(folder: Path, *made: Made, run: Run = RUN) -> Path:
    """Append a run with these schemes to the results in `folder`."""
    append(folder, run, *(record for each in made for record in each.records(run.run)))
    return folder


def summary(folder: Path, *made: Made, run: Run = RUN) -> RunSummary:
    return summarise(read(write(folder, *made, run=run)).runs[-1])

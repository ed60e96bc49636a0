"""The display of a comparison while it runs, from the start of the ranks on: how far all trainings are, and a line for each evaluation."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sparsync_lab.labels import short_labels
from sparsync_lab.progress import Progress, progress
from sparsync_lab.workers.process import Message


@dataclass
class ComparisonDisplay:
    """Is given every message of a comparison, in order."""

    bar: Progress
    names: dict[str, str]
    trainings: int
    steps: int  # of each
    metric: str
    number: int = 0  # of the training that runs now, from 1 on
    name: str = ""

    def update(self, message: Message) -> None:
        """Show a message."""
        kind, before = message["kind"], max(0, self.number - 1) * self.steps
        if kind == "scheme":
            self.number, self.name = self.number + 1, self.names[message["scheme"]]
        elif kind == "alive":  # before each training a copy of the model computes by itself
            self.bar.at(self.number * self.steps, f"{self.number + 1}/{self.trainings} computing alone")
        elif kind == "progress":
            self.bar.at(before + message["step"], f"{self.number}/{self.trainings} {self.name}")
        elif kind == "quality":
            print(
                f"[{self.number}/{self.trainings}] {self.name}  step {message['step']}/{self.steps}  {self.metric} "
                f"{message['value']:.2f}  {message['seconds']:.1f} s trained",
                file=sys.stderr,
                flush=True,
            )


@contextmanager
def shown(labels: Sequence[str], seeds: int, steps: int, metric: str) -> Iterator[ComparisonDisplay]:
    """Yield a display on standard error. `labels`: of the schemes, each of which trains with `seeds` seeds."""
    trainings = len(labels) * seeds
    print("starting the ranks", file=sys.stderr, flush=True)
    with progress("steps of all trainings", trainings * steps) as bar:
        yield ComparisonDisplay(bar, short_labels(labels), trainings, steps, metric)

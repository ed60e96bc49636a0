"""The display of a comparison while it runs, from the start of the ranks on: live bars on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from sparsync_lab.labels import short_labels
from sparsync_lab.workers.process import Message

WIDE = 100  # columns, from which on the loss has room


class ComparisonDisplay(Protocol):
    """A display that is given every message of a comparison, in order."""

    def update(self, message: Message) -> None: ...


@contextmanager
def shown(labels: Sequence[str], seeds: int, steps: int, metric: str) -> Iterator[ComparisonDisplay]:
    """Yield a live display on standard error when that is a terminal, else one that prints a line for each evaluation.

    `labels`: of the schemes, each of which trains with `seeds` seeds.
    """
    clock, names = _Clock(len(labels) * seeds, steps), short_labels(labels)
    if not sys.stderr.isatty():
        yield _ComparisonLines(clock, names, metric)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.table import Column

    console = Console(stderr=True)
    quality = TextColumn("{task.fields[quality]}", table_column=Column(justify="right", no_wrap=True))
    loss = TextColumn("training loss {task.fields[loss]}", table_column=Column(no_wrap=True))
    bars = (
        TextColumn("{task.description}", markup=False, table_column=Column(max_width=console.width * 4 // 9)),
        BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8)),
        TextColumn("{task.fields[count]}", table_column=Column(justify="right", no_wrap=True)),
        *([loss] if console.width >= WIDE else []),
        TextColumn(metric, table_column=Column(no_wrap=True)),
        quality,
        TextColumn("{task.fields[time]}", table_column=Column(justify="right", no_wrap=True)),
    )
    with Bars(*bars, console=console, expand=True) as display:
        yield _Bars(display, clock, names)


class _Clock:
    """Counts the trainings, and estimates how long the rest of the current one takes."""

    def __init__(self, trainings: int, steps: int) -> None:
        self.trainings = trainings
        self.steps = steps
        self.number = 0
        self._began = 0.0

    @property
    def preparing(self) -> str:
        """What happens before the next training: of each, a copy of the model first computes by itself."""
        return f"{self.number + 1}/{self.trainings} computing alone"

    def begin(self) -> None:
        self.number += 1
        self._began = time.monotonic()

    def left(self, step: int) -> str:
        """Return the time left for this scheme at the pace so far, evaluations included."""
        return _minutes((time.monotonic() - self._began) / max(1, step) * (self.steps - step))

    def passed(self) -> str:
        """Return the time since this training began."""
        return _minutes(time.monotonic() - self._began)


def _minutes(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"


class _ComparisonLines:
    def __init__(self, clock: _Clock, names: Mapping[str, str], metric: str) -> None:
        self._clock, self._names, self._metric = clock, names, metric
        print("starting the ranks", file=sys.stderr, flush=True)

    def update(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "scheme":
            self._clock.begin()
        elif kind == "quality":
            print(
                f"[{self._clock.number}/{self._clock.trainings}] {self._names[message['scheme']]}  "
                f"step {message['step']}/{self._clock.steps}  {self._metric} {message['value']:.2f}  "
                f"{message['seconds']:.1f} s trained  {self._clock.left(message['step'])} left",
                file=sys.stderr,
                flush=True,
            )


class _Bars:
    def __init__(
        self, bars: Any, clock: _Clock, names: Mapping[str, str]
    ) -> None:  # Any: rich's Progress, imported late
        self._bars, self._clock, self._names = bars, clock, names
        self._task: Any = None
        self._phase: Any = self._waiting("starting the ranks")  # a bar without an end, between two trainings

    def update(self, message: Message) -> None:
        kind, steps = message["kind"], self._clock.steps
        if kind == "alive":
            if self._phase is None:
                self._phase = self._waiting("")
            self._bars.update(self._phase, description=self._clock.preparing)
        elif kind == "scheme":
            if self._phase is not None:
                self._bars.remove_task(self._phase)
                self._phase = None
            self._clock.begin()
            title = f"{self._clock.number}/{self._clock.trainings} {self._names[message['scheme']]}"
            self._task = self._bars.add_task(title, total=steps, count=f"0/{steps}", loss="-", quality="-", time="")
        elif kind == "progress":
            step = message["step"]
            told = f"{self._clock.left(step)} left" if step < steps else f"in {self._clock.passed()}"
            self._bars.update(
                self._task, completed=step, count=f"{step}/{steps}", loss=f"{message['loss']:.3f}", time=told
            )
        elif kind == "quality":
            self._bars.update(self._task, quality=f"{message['value']:.2f}")

    def _waiting(self, what: str) -> Any:  # Any: rich's id of a task
        return self._bars.add_task(what, total=None, count="", loss="-", quality="-", time="")

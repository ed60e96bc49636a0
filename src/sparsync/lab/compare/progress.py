"""The display of a comparison while it runs, from the start of the ranks on: live bars on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol

from sparsync.lab.workers.process import Message


class Progress(Protocol):
    """A display that is given every message of a comparison, in order."""

    def update(self, message: Message) -> None: ...


@contextmanager
def shown(trainings: int, steps: int, metric: str) -> Iterator[Progress]:
    """Yield a live display on standard error when that is a terminal, else one that prints a line for each evaluation."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield _Lines(trainings, steps, metric)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:<24}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  " + metric + " {task.fields[quality]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]} left"),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        yield _Bars(bars, trainings, steps)


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
        seconds = (time.monotonic() - self._began) / max(1, step) * (self.steps - step)
        return f"{int(seconds // 60)}:{int(seconds % 60):02d}"


class _Lines:
    def __init__(self, trainings: int, steps: int, metric: str) -> None:
        self._clock = _Clock(trainings, steps)
        self._metric = metric
        self._loss = float("nan")
        print("starting the ranks", file=sys.stderr, flush=True)

    def update(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "scheme":
            self._clock.begin()
        elif kind == "progress":
            self._loss = message["loss"]
        elif kind == "quality":
            print(
                f"[{self._clock.number}/{self._clock.trainings}] {message['scheme']}  "
                f"step {message['step']}/{self._clock.steps}  loss {self._loss:.3f}  {self._metric} {message['value']:.2f}  "
                f"{message['seconds']:.1f} s trained  {self._clock.left(message['step'])} left",
                file=sys.stderr,
                flush=True,
            )


class _Bars:
    def __init__(self, bars: Any, trainings: int, steps: int) -> None:  # Any: rich's Progress, imported late
        self._bars = bars
        self._clock = _Clock(trainings, steps)
        self._task: Any = None
        self._phase: Any = self._waiting("starting the ranks")  # a bar without an end, between two trainings

    def update(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "alive":
            if self._phase is None:
                self._phase = self._waiting("")
            self._bars.update(self._phase, description=self._clock.preparing)
        elif kind == "scheme":
            if self._phase is not None:
                self._bars.remove_task(self._phase)
                self._phase = None
            self._clock.begin()
            title = f"{self._clock.number}/{self._clock.trainings} {message['scheme']}"
            self._task = self._bars.add_task(title, total=self._clock.steps, loss="-", quality="-", left="-:--")
        elif kind == "progress":
            left = self._clock.left(message["step"])
            self._bars.update(self._task, completed=message["step"], loss=f"{message['loss']:.3f}", left=left)
        elif kind == "quality":
            self._bars.update(self._task, quality=f"{message['value']:.2f}")

    def _waiting(self, what: str) -> Any:  # Any: rich's id of a task
        return self._bars.add_task(what, total=None, loss="-", quality="-", left="-:--")

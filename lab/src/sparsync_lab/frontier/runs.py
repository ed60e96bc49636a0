"""Finished trainings: the key that identifies one, and the file that keeps them, one JSON object per line."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsync_lab import json_lines
from sparsync_lab.checked import checked
from sparsync_lab.workloads.one_process import Trained

FILE_NAME = "frontier.jsonl"


@dataclass(frozen=True)
class Key:
    """All that determines the result of a training. `job` and `method` are full descriptions, as JSON."""

    job: str
    method: str
    ranks: int
    steps: int
    seed: int
    rate: float  # factor on the job's learning rate
    device: str = "cpu"


@dataclass(frozen=True)
class Finished:
    """A training and its result."""

    key: Key
    elements: int  # parameters of the model
    seconds: float
    trained: Trained
    failed: str = ""  # the cause; a failed training is not kept, and its quality is NaN

    @property
    def end(self) -> float:
        return self.trained.quality[-1][1]

    @property
    def bits(self) -> float:
        """Bits that a rank sends per parameter per step."""
        return self.trained.nbytes * 8 / self.elements


def described(content: Mapping[str, Any]) -> str:  # Any: JSON
    """Write a job or method as the text used in keys."""
    return json.dumps(content, sort_keys=True)


def read(folder: Path) -> dict[Key, Finished]:
    """Read the finished trainings in `folder`; none if there is no file. An incomplete last line is ignored.

    Raises ValueError as `json_lines.read`.
    """
    return {finished.key: finished for _, finished in _labelled(folder)}


def rows(folder: Path) -> list[dict[str, Any]]:  # Any: numbers, texts, None
    """Read the trainings as rows of plain values, in file order. Raises ValueError as `read`."""
    return [
        {
            "workload": json.loads(each.key.job).get("workload", ""),
            "scheme": label,
            "ranks": each.key.ranks,
            "steps": each.key.steps,
            "seed": each.key.seed,
            "rate": each.key.rate,
            "quality": each.end,
            "parameters": each.elements,
            "bits": each.bits,
            "sent_bytes": each.trained.nbytes,
            "rounds": each.trained.rounds,
            "messages": each.trained.messages,
            "union_density": each.trained.union,
            "exchanges": each.trained.exchanges,
            "seconds": each.seconds,
            "device": each.key.device,
        }
        for label, each in _labelled(folder)
    ]


def _labelled(folder: Path) -> list[tuple[str, Finished]]:
    return json_lines.read(folder / FILE_NAME, _from_json, "finished training")


def append(folder: Path, finished: Finished, label: str) -> None:
    """Append a finished training to the file in `folder`; `label` is only for human readers.

    A failed training is not written, so the next study repeats it. An incomplete last line is removed first. Raises RuntimeError if
    writing fails.
    """
    if finished.failed:
        return
    content = {"label": label, **asdict(finished)}
    del content["failed"]
    content["trained"]["quality"] = [[step, _plain(value)] for step, value in finished.trained.quality]
    json_lines.append(folder / FILE_NAME, content)


def _plain(value: float) -> float | str:
    """Convert NaN and infinities to text, since strict JSON lacks them."""
    return value if math.isfinite(value) else str(value)


def _from_json(content: Mapping[str, Any]) -> tuple[str, Finished]:
    finished = checked(Finished, content)
    if not finished.trained.quality:
        raise ValueError("a training without quality")
    return str(content.get("label", "")), finished

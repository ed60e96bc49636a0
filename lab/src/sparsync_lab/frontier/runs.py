"""Finished trainings: what tells one from another, and the file that keeps them, a JSON object a line."""

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
    """One training: nothing else decides its result. `job` and `method` are described in full, as JSON."""

    job: str
    method: str
    ranks: int
    steps: int
    seed: int
    rate: float  # times the job's own learning rate
    device: str = "cpu"


@dataclass(frozen=True)
class Finished:
    """A training, and what came out."""

    key: Key
    elements: int  # parameters of the model
    seconds: float
    trained: Trained
    failed: str = ""  # why it broke off; such a training is not kept, and its quality is not a number

    @property
    def end(self) -> float:
        """The quality after the last step."""
        return self.trained.quality[-1][1]

    @property
    def bits(self) -> float:
        """What a rank sends for each parameter in a step."""
        return self.trained.nbytes * 8 / self.elements


def described(content: Mapping[str, Any]) -> str:  # Any: JSON
    """Return the text that stands for a job or a method in keys."""
    return json.dumps(content, sort_keys=True)


def read(folder: Path) -> dict[Key, Finished]:
    """Return the finished trainings in `folder`; none where there is no file. A last line that breaks off is left out.

    Raises ValueError as `json_lines.read`.
    """
    return {finished.key: finished for _, finished in _labelled(folder)}


def rows(folder: Path) -> list[dict[str, Any]]:  # Any: numbers, texts, None
    """Return the trainings as rows of plain values, in the order of the file. Raises ValueError as `read`."""
    return [
        {
            "workload": json.loads(each.key.job).get("workload", ""),
            "scheme": label,
            "ranks": each.key.ranks,
            "steps": each.key.steps,
            "seed": each.key.seed,
            "rate": each.key.rate,
            "quality": each.end,
            "quality_error": each.trained.quality_error,
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
    """Append a finished training to the file in `folder`; `label` is for people who read it.

    One that failed is not: the next study tries it again. A line that broke off is cut off first. Raises RuntimeError where it cannot be
    written.
    """
    if finished.failed:
        return
    content = {"label": label, **asdict(finished)}
    del content["failed"]
    content["trained"]["quality"] = [[step, _plain(value)] for step, value in finished.trained.quality]
    json_lines.append(folder / FILE_NAME, content)


def _plain(value: float) -> float | str:
    """Return the value as strict JSON, which has no infinity or not-a-number."""
    return value if math.isfinite(value) else str(value)


def _from_json(content: Mapping[str, Any]) -> tuple[str, Finished]:
    finished = checked(Finished, content)
    if not finished.trained.quality:
        raise ValueError("a training without quality")
    return str(content.get("label", "")), finished

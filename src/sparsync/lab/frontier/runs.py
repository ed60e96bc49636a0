"""Finished trainings: what tells one from another, and the file that keeps them, a JSON object a line."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsync.lab import json_lines
from sparsync.lab.workloads.one_process import Trained

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
    follow_rate: bool = False


@dataclass(frozen=True)
class Finished:
    """A training, and what came out."""

    key: Key
    elements: int  # parameters of the model
    seconds: float
    trained: Trained

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

    Raises ValueError, with its number, for any other line that is not of this format.
    """
    path = folder / FILE_NAME
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    found: dict[Key, Finished] = {}
    for number, line in enumerate(lines, start=1):
        try:
            finished = _from_json(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise ValueError(
                f"{path}, line {number} is no finished training ({error!r}); delete it, or choose another --out"
            ) from None
        found[finished.key] = finished
    return found


def append(folder: Path, finished: Finished, label: str) -> None:
    """Append a finished training to the file in `folder`; `label` is for people who read it.

    A line that broke off is cut off first. Raises RuntimeError where it cannot be written.
    """
    content = {"label": label, **asdict(finished)}
    content["trained"]["quality"] = [[step, _plain(value)] for step, value in finished.trained.quality]
    json_lines.append(folder / FILE_NAME, content)


def _plain(value: float) -> float | str:
    """Return the value as strict JSON, which has no infinity or not-a-number."""
    return value if math.isfinite(value) else str(value)


def _from_json(content: Mapping[str, Any]) -> Finished:
    trained = dict(content["trained"])
    trained["quality"] = tuple((int(step), float(value)) for step, value in trained["quality"])
    if not trained["quality"]:
        raise ValueError("a training without quality")
    return Finished(Key(**content["key"]), content["elements"], content["seconds"], Trained(**trained))

"""Finished trials, and the file that keeps them, a JSON object a line."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsync.lab import json_lines
from sparsync.lab.campaign.trials import Trial
from sparsync.lab.campaign.verdict import VERDICTS, Verdict

FILE_NAME = "campaign.jsonl"


@dataclass(frozen=True)
class Finished:
    """A trial with the library's timeout, and what came out."""

    trial: Trial
    timeout_s: float
    commit: str | None  # of the library; None outside a checkout
    verdict: Verdict
    why: str  # "" where all is as it should be
    seen: Mapping[str, Any]  # Any: JSON, supervisor.Seen

    @property
    def key(self) -> tuple[Trial, float, str | None]:
        return self.trial, self.timeout_s, self.commit


def read(folder: Path) -> list[Finished]:
    """Return the finished trials in `folder`; none where there is no file. A last line that breaks off is left out.

    Raises ValueError, with its number, for any other line that is not of this format.
    """
    path = folder / FILE_NAME
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    found: list[Finished] = []
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
            finished = Finished(**{**content, "trial": Trial(**content["trial"])})
            if finished.verdict not in VERDICTS:
                raise ValueError(f"verdict {finished.verdict!r}")
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise ValueError(
                f"{path}, line {number} is no finished trial ({error!r}); delete it, or choose another --out"
            ) from None
        found.append(finished)
    return found


def append(folder: Path, finished: Finished) -> None:
    """Append a finished trial to the file in `folder`. A line that broke off is cut off first.

    Raises RuntimeError where it cannot be written.
    """
    json_lines.append(folder / FILE_NAME, asdict(finished))

"""Finished trials, and the file that keeps them, a JSON object a line."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sparsync_lab import json_lines
from sparsync_lab.checked import checked
from sparsync_lab.netlab import NO_DELAY, Delay
from studies.campaign.trials import Trial
from studies.campaign.verdict import Verdict

FILE_NAME = "campaign.jsonl"


@dataclass(frozen=True)
class FinishedTrial:
    """A trial with the library's timeout, and what came out."""

    trial: Trial
    timeout_s: float
    commit: str | None  # of the library; None outside a checkout
    verdict: Verdict
    why: str  # "" where all is as it should be
    seen: Mapping[str, Any]  # Any: JSON, supervisor.TrialSeen
    delay: Delay = NO_DELAY  # between the ranks

    @property
    def key(self) -> tuple[Trial, float, str | None, Delay]:
        return self.trial, self.timeout_s, self.commit, self.delay


def read(folder: Path) -> list[FinishedTrial]:
    """Return the finished trials in `folder`; none where there is no file. A last line that breaks off is left out.

    Raises ValueError as `json_lines.read`.
    """
    return json_lines.read(folder / FILE_NAME, partial(checked, FinishedTrial), "finished trial")


def append(folder: Path, finished: FinishedTrial) -> None:
    """Append a finished trial to the file in `folder`. A line that broke off is cut off first.

    Raises RuntimeError where it cannot be written.
    """
    json_lines.append(folder / FILE_NAME, asdict(finished))

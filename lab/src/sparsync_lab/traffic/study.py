"""Several schemes on one stream, step by step side by side, and a summary of their steps."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsync_lab.scheme_choice import SchemeChoice, check_labels, try_out
from sparsync_lab.traffic.observe import Observed, Record
from sparsync_lab.traffic.stream import Stream, Synthetic, recorded

WINDOWS = {"after_1": 1, "after_50": 50}  # the steps a summary leaves out at the start
RANKS, ELEMENTS, STEPS = 4, 100_000, 300


@dataclass(frozen=True)
class Study:
    """Schemes, a stream of gradients, and the number of steps. Raises ValueError where they do not fit together."""

    schemes: tuple[SchemeChoice, ...]
    stream: Stream
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"--steps must be at least 1, got {self.steps}")
        check_labels(self.schemes)
        for choice in self.schemes:
            if choice.local is not None:
                raise ValueError(f"schemes reduce gradients here, got {choice.label!r}; leave out local_steps(...)/")
            try_out(choice, self.stream.ranks)

    @property
    def elements(self) -> int:
        return self.stream.layout[-1].span.stop

    def records(self) -> Iterator[Record]:
        """Yield a record for each step and scheme, step by step."""
        observed = [Observed(choice, self.stream.ranks, self.stream.layout) for choice in self.schemes]
        for step in range(self.steps):
            gradients = self.stream.gradients(step)
            for each in observed:
                yield each.reduce(step, gradients)

    def summary(self, label: str, records: Sequence[Record]) -> Record:
        """Return the summary of one scheme: over all steps but the first, and but the first 50."""
        mine = [record for record in records if record["scheme"] == label]
        about = {"ranks": self.stream.ranks, "elements": self.elements, "asked": mine[0]["asked"], "steps": len(mine)}
        windows = {name: _window(mine[start:]) for name, start in WINDOWS.items()}
        return {"kind": "summary", "scheme": label, **about, **windows}


def synthetic_study(
    schemes: tuple[SchemeChoice, ...],
    ranks: int | None = None,
    elements: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    jump: int | None = None,
) -> Study:
    """Return a study of drawn gradients; arguments that are None take their defaults."""
    steps = STEPS if steps is None else steps
    if jump is not None and jump >= steps:
        raise ValueError(
            f"--jump must come before the last of {steps} steps, got {jump}; choose an earlier one or more steps"
        )
    ranks, elements = RANKS if ranks is None else ranks, ELEMENTS if elements is None else elements
    return Study(schemes, Synthetic(ranks, elements, seed, jump), steps)


def recorded_study(
    schemes: tuple[SchemeChoice, ...],
    path: Path,
    ranks: int | None = None,
    elements: int | None = None,
    steps: int | None = None,
) -> Study:
    """Return a study of recorded gradients. None: as recorded. Raises ValueError where an argument differs from the recording."""
    stream = recorded(path)
    T, P, n = stream.values.shape
    for name, asked, found in (("ranks", ranks, P), ("elements", elements, n)):
        if asked is not None and asked != found:
            raise ValueError(
                f"--{name} must be {found}, as in {path}, got {asked}; leave it out, or record again by `sparsync gradients`"
            )
    if steps is not None and steps > T:
        raise ValueError(f"--steps must be at most {T}, as many as {path} has, got {steps}")
    return Study(schemes, stream, T if steps is None else steps)


def _window(records: Sequence[Record]) -> Record | None:
    """Return means and extremes over some steps; None over none."""
    if not records:
        return None
    off = [abs(record["union"] / record["asked"] - 1) for record in records if record["asked"]]
    nbytes = [each for record in records for each in record["bytes"]]
    return {
        "density_mean": statistics.fmean(record["density"] for record in records),
        "density_error_mean": statistics.fmean(off) if off else None,
        "density_error_worst": max(off, default=None),
        "bytes_mean": statistics.fmean(nbytes),
        "bytes_max": max(nbytes),
        "bits_mean": statistics.fmean(nbytes) * 8 / records[0]["elements"],
        "messages_max": max(each for record in records for each in record["messages"]),
        "padding_mean": _mean(records, "padding"),
        "imbalance_mean": _mean(records, "imbalance"),
        "error_mean": _mean(records, "error"),
        "captured_mean": _mean(records, "captured"),
        "best_mean": _mean(records, "best"),
        "residual_norm_last": records[-1]["residual_norm"],
        "staleness_max": max(record["staleness_max"] for record in records),
    }


def _mean(records: Sequence[Record], name: str) -> float | None:
    """Return the mean over the steps that have a value; None where none has."""
    found: list[Any] = [record[name] for record in records if record[name] is not None]  # Any: JSON
    return statistics.fmean(found) if found else None

"""What a step may cost on a GPU: the goals, and which of them each method has."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from sparsync.recipes import bits_of, recipe

KINDS = ("default", "0.8 bits", "int4 gradients", "papers' schemes")


@dataclass(frozen=True)
class Goal:
    """The most that methods of each of KINDS may take; None: no goal."""

    name: str
    about: str
    limits: tuple[float | None, float | None, float | None, float | None]

    def of(self, kind: str) -> float | None:
        return self.limits[KINDS.index(kind)]


BYTES = Goal("bytes", "GPU time in bytes per parameter at copy bandwidth", (60, 120, 45, 100))
LAUNCHES = Goal("launches", "launches", (40, 120, 30, 150))
SYNCS = Goal("syncs", "host syncs", (0, 0, 0, None))  # the papers' schemes exchange counts
WALL = Goal("wall", "`optimizer.step()`, wall time over that of fused AdamW", (2.5, 5, None, None))
MEMORY = Goal("memory", "memory beyond that of fused AdamW, bytes per parameter", (5, 9, 5, 5))
POWERSGD = Goal("powersgd", "GPU time over that of PowerSGD of rank 8", (0.25, 0.5, 0.25, None))
GOALS = (BYTES, LAUNCHES, SYNCS, WALL, MEMORY, POWERSGD)

Measured = Mapping[tuple[str, str], float]  # (name of the goal, kind) -> the most of any step


def kind_of(text: str) -> str:
    """Return which goals a method has, by its text, such as "steps/two_shot:density=0.03:values=sign", "default" or "bits=0.8"."""
    with suppress(LookupError):
        text = recipe("steps", 4, bits_of(text)).text
    around, _, scheme = text.rpartition("/")
    every_element = "density=1.0" in scheme or scheme.partition(":")[0] in (
        "in_turn",
        "dense",
        "bf16",
        "quantized",
        "int4",
    )
    if around:
        return KINDS[0] if every_element else KINDS[1]
    return KINDS[2] if every_element else KINDS[3]


def table(measured: Measured) -> list[list[str]]:
    """Return a row for each goal: what it is about, and for each kind the goal and what was measured."""
    return [[goal.about, *(_cell(goal, kind, measured) for kind in KINDS)] for goal in GOALS]


def _cell(goal: Goal, kind: str, measured: Measured) -> str:
    limit, found = goal.of(kind), measured.get((goal.name, kind))
    if limit is None:
        return "" if found is None else f"{found:.3g}"
    return f"{limit:g}: {'not measured' if found is None else f'{found:.3g}'}"

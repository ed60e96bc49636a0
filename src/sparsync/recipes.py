"""The recipes: the exchange and the scheme that `sparsync.attach` takes for a number of bits. Their figures stand in this table only.

A text is in the form of the commands, "steps(KEY=VALUE)/SCHEME:KEY=VALUE", or only a scheme for gradients. Published systems that combine
steps and a scheme have names. This file imports nothing of sparsync: `sparsync.exchanges.choice` finds an optimizer's family.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

# "auto": chosen by the times of the first steps, not below a floor
Bits = float | Literal["auto"] | tuple[Literal["auto"], float]
Family = Literal["steps", "muon", "linear", "other", "shard"]
FAMILIES: dict[Family, str] = {
    "steps": "Adam and AdamW",
    "muon": "Muon",  # also with an AdamW for the rest
    "linear": "SGD",  # linear in the gradient
    "other": "gradients of an optimizer whose steps cannot be exchanged, or of none",
    "shard": "FSDP2's shard axis",
}
_ANY = 10**9  # ranks


@dataclass(frozen=True)
class Recipe:
    """One row: the exchange, its bits per parameter per step, and how far training ends behind dense.

    `bits` counts all that a rank sends with 4 ranks, both ways. P ranks send (P-1)/P / 0.75 of it.
    """

    bits: float
    family: Family
    text: str
    # After 1000 steps, against the job's optimizer with dense gradients, held out against the best of that, AdamW with beta2 0.999 and
    # LaProp where trained (gradients: against dense); and the part of docs/frontier.md.
    quality: str
    least_ranks: int = 1
    most_ranks: int = _ANY
    parameters: Literal["int4"] | None = None  # of FSDP2's all-gather
    shown_to: float = 1e6  # parameters of the largest model with that quality on the page; inf: of none
    beyond: str = ""  # what is known of larger models
    most_parameters: float = math.inf  # beyond, training ends so far behind dense that this is no recipe

    @property
    def name(self) -> str:
        """The text by which `attach` and the commands ask for it."""
        return f"bits={self.bits:g}"

    def bits_with(self, ranks: int) -> float:
        """Compute the bits per parameter per step that a rank of `ranks` sends."""
        return self.bits * (ranks - 1) / ranks / 0.75

    def shows(self, parameters: int) -> bool:
        """Tell whether the quality was shown for a model of about this size; twice the size still counts."""
        return parameters <= 2 * self.shown_to

    def quality_at(self, parameters: int) -> str:
        """Say how far training ends behind dense for a model with this many parameters, or that nobody knows."""
        if self.shows(parameters):
            return self.quality
        return self.beyond or f"unknown above {self.shown_to / 1e6:.3g} million parameters, where it is {self.quality}"

    def __str__(self) -> str:
        most = f", up to {self.most_ranks} ranks" if self.most_ranks < _ANY else ""
        least = f", {self.least_ranks} ranks or more" if self.least_ranks > 1 else ""
        return f"{self.name} for {FAMILIES[self.family]}{least}{most}: {self.text}"


_INT3 = "steps(keep=0.0)/two_shot:density=1.0:values=int3"
_SIGN = "two_shot:density=1.0:values=sign"
_SELDOM = "steps(measure_every=16)/"
_INT4 = "two_shot:density=1.0:values=int4"
_SPARSE = "steps/two_shot:density=0.03:values=sign:density_down=0.12"
_BEYOND = "in an earlier form 7 % behind dense after 300 steps of 111 million parameters"
_LOWEST_MUON = "steps(keep=0.2:measure_every=16)/two_shot:density=0.012:values=sign"
_LOWEST_BEYOND = "in an earlier form with AdamW and 4 ranks 42 % behind dense after 300 steps of 111 million parameters"
_LOWEST: dict[str, Any] = {"beyond": _LOWEST_BEYOND, "most_parameters": 21.6e6}  # Any: numbers and texts

# The first row of a family is its default. Of rows with the same bits, the last one that suits the number of ranks counts.
TABLE = (
    Recipe(4.6, "steps", _INT3, "0.7 % ahead (gpt-10m-1000), held out 0.7 % ahead to 0.9 % behind", shown_to=10.7e6),
    Recipe(
        3.1,
        "steps",
        _SELDOM + _SIGN + ":values_down=int3",
        "with 4 ranks 2.3 % ahead (gpt-1000-others), held out 1.2 % ahead (10 M), 3.5 % behind and 1.6 % ahead (1 M)",
        shown_to=10.4e6,
    ),
    Recipe(
        1.6,
        "steps",
        _SELDOM + _SIGN,
        "0.3 % behind with one seed (code-10m-1000), held out level (rivals, 0.2 M)",
        most_ranks=15,
        shown_to=10.8e6,
    ),
    Recipe(
        0.8,
        "steps",
        _SPARSE,
        "0.3 % ahead (gpt-10m-1000), held out 0.1 % behind (10 M), 0.6 to 6.3 % behind (1 M)",
        shown_to=10.7e6,
        beyond=_BEYOND,
    ),
    Recipe(
        0.2,
        "steps",
        "steps(keep=0.35:measure_every=16)/two_shot:density=0.006:values=sign:density_down=0.018",
        "1.0 % ahead (gpt-1000-others), held out 2.9 % behind (10 M), 4.2 to 11 % behind (1 M)",
        shown_to=10.7e6,
        **_LOWEST,
    ),
    Recipe(4.6, "steps", _INT3, "0.2 % behind (gpt-16-1000), held out 0.2 % behind", least_ranks=16),
    Recipe(0.8, "steps", _SPARSE, "2.2 % behind (gpt-16-1000), held out 12 % behind", least_ranks=16, beyond=_BEYOND),
    # Many ranks: a mean of many signs loses less if more comes down than goes up.
    Recipe(
        1.4,
        "steps",
        "steps/two_shot:density=0.06:values=sign:density_down=0.3",
        "0.5 % behind (gpt-tiny-16-down)",
        least_ranks=16,
        shown_to=0.1e6,
    ),
    Recipe(
        0.2,
        "steps",
        "steps(keep=0.1:measure_every=16)/two_shot:density=0.005:values=sign:density_down=0.02",
        "17 % behind (gpt-tiny-16-low)",
        least_ranks=16,
        shown_to=0.1e6,
        **_LOWEST,
    ),
    Recipe(4.6, "muon", _INT3, "0.9 % behind (gpt-muon-10m-1000)", shown_to=10.7e6),
    Recipe(3.1, "muon", f"steps/{_SIGN}:values_down=int3", "0.9 % behind (log, Muon)"),
    Recipe(1.6, "muon", "steps/in_turn:every=2", "3.4 % behind (log, Muon)"),
    Recipe(0.8, "muon", "steps/in_turn:every=4:decay=0.9", "5.6 % behind without decay (log, Muon)"),
    Recipe(0.2, "muon", _LOWEST_MUON, "11 % behind (log, Muon)", **_LOWEST),
    Recipe(6.1, "linear", _INT4, "not measured on 1000 steps of SGD", shown_to=math.inf),
    Recipe(0.8, "linear", "two_shot:density=0.05:values=int4", "2.0 % behind after 300 steps (shakespeare-small)"),
    # Its bytes grow with the number of ranks.
    Recipe(
        0.5, "linear", "topk:density=0.01:values=int8", "5.7 % behind after 300 steps (shakespeare-small)", most_ranks=4
    ),
    Recipe(6.1, "other", _INT4, "4.2 % behind AdamW (log), held out 0.2 % (rivals)", shown_to=2e5),
    Recipe(12.1, "other", "two_shot:density=1.0:values=int8", "held out level with AdamW (rivals)", shown_to=2e5),
    Recipe(6.1, "shard", _INT4, "not measured on 1000 steps", parameters="int4", shown_to=math.inf),
)

# name -> (text, description)
PUBLISHED = {
    "diloco": (
        "local_steps(every=50:keep=0.0:outer_rate=0.7:outer_momentum=0.9)/dense",
        "DiLoCo (arXiv 2311.08105), every 50 steps, the shortest interval that its authors tried",
    ),
    "streaming_diloco": (
        "local_steps(every=50:keep=0.0:fragments=4:delay=5:mixing=0.5:outer_rate=0.7:outer_momentum=0.9)/int4",
        "Streaming DiLoCo (2501.18512): fragments in 4 bits that arrive while training continues",
    ),
}


def rows(family: Family, ranks: int, parameters: int = 0) -> list[Recipe]:
    """List the recipes of a family for this number of ranks and of parameters, its default first."""
    fitting = (row for row in TABLE if row.least_ranks <= ranks <= row.most_ranks and parameters <= row.most_parameters)
    return list({row.bits: row for row in fitting if row.family == family}.values())


def candidates(family: Family, ranks: int, bits: Bits | None, parameters: int = 0) -> list[Recipe]:
    """List the recipes among which `bits`, "auto" or ("auto", floor), chooses: with at least the bits of the default or the floor.

    The default comes first; the list is empty if `bits` is a number. Raises ValueError for a family whose exchange is not measured.
    """
    if bits is None or isinstance(bits, int | float):
        return []
    floor = bits[1] if isinstance(bits, tuple) and len(bits) == 2 and bits[0] == "auto" else None
    if bits != "auto" and (isinstance(floor, bool) or not isinstance(floor, int | float)):
        raise ValueError(
            f'bits must be a number above 0, such as 0.8, or "auto", or ("auto", the fewest bits to choose), got {bits!r}'
        )
    if family not in ("steps", "muon"):
        raise ValueError(
            f"bits={bits!r} measures the exchange of an optimizer's steps, which comes after the backward pass, and these are "
            f"{FAMILIES[family]}; pass a number of bits"
        )
    known = rows(family, ranks, parameters)
    recipe(family, ranks, floor, parameters)
    return [each for each in known if each.bits >= (known[0].bits if floor is None else floor) or each is known[0]]


def recipe(family: Family, ranks: int, bits: Bits | None = None, parameters: int = 0) -> Recipe:
    """Choose the row with the most bits up to `bits`; None and "auto": the default. Raises ValueError below the fewest bits."""
    known = rows(family, ranks, parameters)
    if bits is None or candidates(family, ranks, bits, parameters):
        return known[0]
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not bits > 0:
        raise ValueError(f"bits must be a number above 0, such as 0.8, got {bits!r}")
    below = [each for each in known if each.bits <= bits]
    if not below:
        there = ", ".join(f"{each.bits:g}" for each in sorted(known, key=lambda each: -each.bits))
        raise ValueError(
            f"no recipe for {FAMILIES[family]} sends as few as bits={bits:g} per parameter per step; there are {there}, counted with 4 "
            f"ranks (P ranks send (P-1)/P / 0.75 of it, on {ranks} {(ranks - 1) / ranks / 0.75:.2f}); choose one of these, or pass a scheme"
            f"{_left_out(family, ranks, bits, parameters)}"
        )
    return max(below, key=lambda each: each.bits)


def _left_out(family: Family, ranks: int, bits: float, parameters: int) -> str:
    """Say which rows with so few bits are for smaller models."""
    small = [each for each in rows(family, ranks) if each.bits <= bits and each.most_parameters < parameters]
    return "".join(
        f". {each.name} is for models of up to {each.most_parameters / 1e6:g} million parameters, and this one has "
        f"{parameters / 1e6:.3g}: {each.beyond}; to try it, pass {each.text}"
        for each in small
    )


def bits_of(text: str) -> Bits | None:
    """Read the bits from "bits=0.8", "bits=auto" or "bits=auto:0.8", and None from "default".

    Raises LookupError for any other text, and ValueError without a number.
    """
    if text == "default":
        return None
    match = re.fullmatch(r"bits=(.*)", text)
    if match is None:
        raise LookupError(text)
    word, _, floor = match[1].partition(":")
    try:
        if word == "auto":
            return ("auto", float(floor)) if floor else "auto"
        return float(match[1])
    except ValueError:
        raise ValueError(
            f"bits= takes a number, such as bits=0.8, or auto, or auto:0.8 with the fewest bits, got {text!r}"
        ) from None

"""Parse and check one-way delays. This module touches no interface."""

import re
from dataclasses import dataclass

S_OF = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
LONGEST_S = 10.0
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", re.IGNORECASE)


@dataclass(frozen=True)
class Delay:
    """The delay of a packet between any two ranks, in addition to its transmission time."""

    one_way_s: float = 0.0
    jitter_s: float = 0.0  # maximum deviation from the delay; packets stay in order

    def __post_init__(self) -> None:
        if not 0 <= self.one_way_s <= LONGEST_S:
            raise ValueError(f"a one-way delay must be in [0, {LONGEST_S:g}] s, got {self.one_way_s:g} s")
        if not 0 <= self.jitter_s <= self.one_way_s:
            raise ValueError(
                f"jitter must be in [0, {self.one_way_s:g}] s, so that no packet arrives before it leaves, got {self.jitter_s:g} s; "
                "give a longer delay, or less jitter"
            )

    def __bool__(self) -> bool:
        return self.one_way_s > 0


NO_DELAY = Delay()


def parse_delay(text: str) -> float:
    """Parse a time into seconds: "25ms", "25 ms" and "0.025s" are 0.025. Only 0 needs no unit.

    Raises ValueError for anything else.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None and text.strip() != "0":
        raise ValueError(f"a delay is a number with one of the units {', '.join(S_OF)}, such as 25ms, got {text!r}")
    return float(match[1]) * S_OF[match[2].lower()] if match else 0.0


def delay_of(delay: str | None, jitter: str | None) -> Delay:
    """Build the delay of the options --delay and --jitter; None is 0. Raises ValueError that names the option."""
    times = []
    for option, text in (("--delay", delay), ("--jitter", jitter)):
        try:
            times.append(parse_delay(text or "0"))
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None
    return Delay(*times)


def check_delay(delay: Delay, limited: bool) -> Delay:
    """Check that there are links for the delay, and return it. Raises ValueError otherwise."""
    if delay and not limited:
        raise ValueError(
            f"a delay of {1e3 * delay.one_way_s:g} ms needs links with a rate, and ranks without one share loopback; give --link a rate, "
            "such as 10gbit"
        )
    return delay

"""For how long a rank stood still after a fault: from the looks at its interface."""

from collections.abc import Sequence
from dataclasses import dataclass

QUIET = 0.1  # of its usual rate: the store, and the heads of connections, are below
LEAST_S = 0.5  # of an interval that says something; a look takes 0.25 s
BEFORE_S = 10.0  # of the interval before the first fault, to compare with

Look = tuple[float, float, int]  # from and to, in seconds of the run, and the bytes that went by


@dataclass(frozen=True)
class Pause:
    """A time with hardly any traffic, in seconds of the run; `ongoing`: it had not ended when it was last looked."""

    from_s: float
    to_s: float
    ongoing: bool

    @property
    def seconds(self) -> float:
        return self.to_s - self.from_s


def usual_rate(looks: Sequence[Look], until_s: float) -> float:
    """Return the mean bytes per second from the first one up to this time; 0 before it."""
    seen = [look for look in looks if look[1] <= until_s]
    first = next((since_s for since_s, _, nbytes in seen if nbytes), None)
    if first is None:
        return 0.0
    return sum(nbytes for _, _, nbytes in seen) / (seen[-1][1] - first)


def longest_pause(looks: Sequence[Look], from_s: float, to_s: float, done: bool) -> Pause | None:
    """Return the longest time of a rank with less than a tenth of its usual traffic between two times.

    None where the rank had no traffic before, or has ended: `done` says that it ended well, and no pause follows its last traffic.
    """
    rate = usual_rate(looks, from_s)
    quiets = [nbytes < QUIET * rate * (end_s - begin_s) for begin_s, end_s, nbytes in looks]
    if done:
        to_s = min(
            to_s, max((look[1] for look, is_quiet in zip(looks, quiets, strict=True) if not is_quiet), default=0.0)
        )
    within = [
        (max(begin_s, from_s), min(end_s, to_s), is_quiet)
        for (begin_s, end_s, _), is_quiet in zip(looks, quiets, strict=True)
        if end_s > from_s and begin_s < to_s
    ]
    if rate == 0 or not within or within[-1][1] - from_s < LEAST_S:
        return None
    longest, begun_s = Pause(from_s, from_s, False), None
    for begin_s, end_s, is_quiet in within:
        begun_s = (begin_s if begun_s is None else begun_s) if is_quiet else None
        if begun_s is not None and end_s - begun_s > longest.seconds:
            longest = Pause(begun_s, end_s, end_s == within[-1][1])
    return longest


def pause_text(found: Pause | None) -> str | None:
    """Return a pause in words; None for none that could be seen."""
    return None if found is None else f"{'over ' if found.ongoing else ''}{found.seconds:.1f}"

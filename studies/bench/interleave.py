"""The loop of all benchmarks: every case is measured once per round, so that a disturbance of the machine meets all of them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Case = TypeVar("Case")
Measured = TypeVar("Measured")


Tell = Callable[[int, int], None]
"""(how many measurements are done, of how many) is called after each of them."""


def interleaved(
    cases: Sequence[Case],
    measure: Callable[[Case, int], Measured],
    rounds: int,
    warmup: int,
    tell: Tell = lambda done, total: None,
) -> list[list[Measured]]:
    """Return the measurements of each case, in the order of `cases`: one for each of `rounds` rounds, after `warmup` more.

    `measure(case, number)` is called in an order that changes from round to round and is the same on every rank: each round begins
    with another case, and every second one goes backwards, so that no case always follows the same one. `number` counts from 0,
    warm-up included.
    """
    found: list[list[Measured]] = [[] for _ in cases]
    done, total = 0, (warmup + rounds) * len(cases)
    for number in range(warmup + rounds):
        order = [(number + place) % len(cases) for place in range(len(cases))]
        for place in order if number % 2 else reversed(order):
            measured = measure(cases[place], number)
            done += 1
            tell(done, total)
            if number >= warmup:
                found[place].append(measured)
    return found

"""The loop of all benchmarks: every case is measured once per round, so that a disturbance of the machine meets all of them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Case = TypeVar("Case")
Measured = TypeVar("Measured")


def interleaved(
    cases: Sequence[Case], measure: Callable[[Case, int], Measured], rounds: int, warmup: int
) -> list[list[Measured]]:
    """Return the measurements of each case, in the order of `cases`: one for each of `rounds` rounds, after `warmup` more.

    `measure(case, number)` is called in an order that changes from round to round and is the same on every rank: each round begins
    with another case, and every second one goes backwards, so that no case always follows the same one. `number` counts from 0,
    warm-up included.
    """
    found: list[list[Measured]] = [[] for _ in cases]
    for number in range(warmup + rounds):
        order = [(number + place) % len(cases) for place in range(len(cases))]
        for place in order if number % 2 else reversed(order):
            measured = measure(cases[place], number)
            if number >= warmup:
                found[place].append(measured)
    return found

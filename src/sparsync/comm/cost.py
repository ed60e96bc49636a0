"""The closed-form cost of collectives, added up while they run.

A collective is decorated with its closed form, so algorithms that call it hold no cost arithmetic. A collective inside another one is
part of the outer one's closed form and is not added again. Tests compare the sum with what MeteredComm counts.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from sparsync.core import Cost

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass
class CostLedger:
    """The sum of the closed forms of all collectives that ran inside `recorded_cost()` on this thread."""

    total: Cost = Cost()  # noqa: RUF009  # frozen


_THREAD = threading.local()  # .ledger: the innermost open ledger of this thread, None inside a collective


@contextmanager
def recorded_cost() -> Iterator[CostLedger]:
    """Open a ledger for this thread; an outer ledger is not charged for what an inner one records."""
    outer = getattr(_THREAD, "ledger", None)
    _THREAD.ledger = ledger = CostLedger()
    try:
        yield ledger
    finally:
        _THREAD.ledger = outer


def costs(
    closed_form: Callable[Concatenate[Result, Arguments], Cost],
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator that charges `closed_form(result, *arguments)` to the open ledger when the collective has returned."""

    def decorate(collective: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @wraps(collective)
        def charged(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            ledger: CostLedger | None = getattr(_THREAD, "ledger", None)
            if ledger is None:
                return collective(*args, **kwargs)
            _THREAD.ledger = None
            try:
                result = collective(*args, **kwargs)
            finally:
                _THREAD.ledger = ledger
            ledger.total += closed_form(result, *args, **kwargs)
            return result

        return charged

    return decorate

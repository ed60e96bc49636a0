"""Which of a test's parameters `make test` takes; the others wait for the slow tests."""

from collections.abc import Iterable
from typing import Any  # Any: what tests are parametrized by

import pytest
from _pytest.mark import ParameterSet


def one_in(number: int, values: Iterable[Any]) -> list[ParameterSet]:
    """Return all the values, for `parametrize`. One in `number` of them is quick, from the first on; the others are slow."""
    params = [each if isinstance(each, ParameterSet) else pytest.param(each) for each in values]
    return [each if place % number == 0 else slow(each) for place, each in enumerate(params)]


def slow(param: ParameterSet) -> ParameterSet:
    """Return the parameter, marked as slow."""
    return pytest.param(*param.values, marks=(*param.marks, pytest.mark.slow), id=param.id)

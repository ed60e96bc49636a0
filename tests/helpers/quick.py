"""Select the parameters of a test that `make test` runs; the others are left to the slow tests."""

from collections.abc import Iterable
from typing import Any  # Any: what tests are parametrized by

import pytest
from _pytest.mark import ParameterSet


def one_in(number: int, values: Iterable[Any]) -> list[ParameterSet]:
    """List all values for `parametrize`: the first of every `number` values is quick, the others are slow."""
    params = [each if isinstance(each, ParameterSet) else pytest.param(each) for each in values]
    return [each if place % number == 0 else slow(each) for place, each in enumerate(params)]


def slow(param: ParameterSet) -> ParameterSet:
    """Mark the parameter as slow."""
    return pytest.param(*param.values, marks=(*param.marks, pytest.mark.slow), id=param.id)

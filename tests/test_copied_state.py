"""What a copy of a scheme keeps, and what reaches a waiting backward pass when the runtime itself fails."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from sparsync.runtime.ownership import check_free, take
from torch import nn

from sparsync import Bucket, TopK
from sparsync.core import laid_out
from sparsync.runtime.connection import Connection, Reduction
from sparsync.runtime.optimizers import ResidualUnits
from sparsync.runtime.step_in_flight import StepInFlight


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scheme: pickle.loads(pickle.dumps(scheme))])
def test_the_units_of_a_residual_stay_with_its_copies(copied: Callable[[TopK], TopK]) -> None:
    scheme = TopK(0.1)
    units = ResidualUnits.of(scheme)
    units.scale, units.rates = 65536.0, {"weight": 0.5}
    other = ResidualUnits.of(copied(scheme))
    assert (other.scale, other.rates) == (65536.0, {"weight": 0.5})
    other.scale = 1.0
    assert ResidualUnits.of(scheme).scale == 65536.0


class Equal(nn.Module):
    """Equal to every other one, as a class with an `__eq__` of settings may be."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = nn.Module.__hash__


class Closed:
    """A driver that drives nothing any more."""

    closed, origin = True, "sparsync.attach"


def test_a_residual_of_another_model_is_refused_though_the_models_are_equal() -> None:
    scheme, mine, other, driver = TopK(0.5), Equal(), Equal(), Closed()
    take(scheme, driver, mine)
    scheme.feedback.load_state_dict({"weight": torch.ones(3)})
    check_free(scheme, mine)
    with pytest.raises(ValueError, match="holds residuals of another model"):
        check_free(scheme, other)


class Broken(Connection):
    """A connection whose handling of failures fails."""

    def __init__(self) -> None:
        pass

    def overlaps(self, bucket: Bucket, scheme: Reduction) -> bool:
        return False

    def abort(self) -> None:
        return

    def close(self, cause: BaseException | str) -> str:
        raise OSError("no more files")


@pytest.mark.timeout(60)
def test_a_failure_of_the_runtime_itself_reaches_whoever_waits() -> None:
    flight = StepInFlight(Broken(), lambda report: None)
    bucket = Bucket("all", torch.ones(3), 0, laid_out([("weight", (3,))]))
    try:
        with pytest.raises(RuntimeError, match="bucket 'all' was not reduced: OSError: no more files"):
            flight.submit(bucket, TopK(0.5)).wait()
    finally:
        flight.stop()

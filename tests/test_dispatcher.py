"""What reaches a waiting backward pass when the runtime itself fails."""

from collections.abc import Callable

import pytest
import torch
from sparsync.runtime.dispatcher import Dispatcher

from sparsync import Bucket, TopK
from sparsync.core import laid_out
from sparsync.runtime.connection import Connection, Reduction


class Broken(Connection):
    """A connection whose handling of failures fails."""

    def __init__(self) -> None:
        pass

    def overlaps(self, bucket: Bucket, scheme: Reduction) -> bool:
        return False

    def attempt(self, work: Callable[[], None], caught: type[BaseException] = BaseException) -> str:
        raise OSError("no more files")


@pytest.mark.timeout(60)
def test_a_failure_of_the_runtime_itself_reaches_whoever_waits() -> None:
    dispatcher = Dispatcher(Broken(), lambda report: None)
    bucket = Bucket("all", torch.ones(3), 0, laid_out([("weight", (3,))]))
    try:
        with pytest.raises(RuntimeError, match="bucket 'all' was not reduced: OSError: no more files"):
            dispatcher.submit(bucket, TopK(0.5).start()).wait()
    finally:
        dispatcher.stop()

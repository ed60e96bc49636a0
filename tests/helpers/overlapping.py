"""A scheme that proves that the backward pass continues while a bucket is reduced."""

import threading

from torch import Tensor

from helpers.ddp_training import TIMEOUT_S
from sparsync import Bucket, Report
from sparsync.base.scheme import Scheme
from sparsync.core import Comm
from sparsync.schemes import State
from sparsync.schemes.dense import Dense

IN_ORDER = ["communication begins", "the first layer's gradient is there", "communication ends"]


class Overlapping(Scheme):
    """While `watched`, holds the bucket `key` until the first layer's gradient is ready, and that until the bucket is in transit."""

    name = "overlapping"

    def __init__(self, key: str, watched: bool = True) -> None:
        self.key, self.watched = key, watched
        self.events: list[str] = []
        self.begun, self.computed = threading.Event(), threading.Event()

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        if not self.watched or bucket.key != self.key:
            return Dense().reduce(state, bucket, comm)
        self.events.append("communication begins")
        self.begun.set()
        if not self.computed.wait(TIMEOUT_S / 2):
            raise RuntimeError("the backward pass did not go on during communication")
        report = Dense().reduce(state, bucket, comm)
        self.events.append("communication ends")
        return report

    def first_layer(self, _: Tensor) -> None:
        """Hook of the first layer's gradient, which comes last."""
        if self.watched:
            assert self.begun.wait(TIMEOUT_S / 2), "communication did not begin during the backward pass"
            self.events.append("the first layer's gradient is there")
            self.computed.set()

"""A step of which every element is sent, in few bits: one pass makes and encodes it, one sums up, and one moves the weights.

The packets are those of `quantized_all_reduce_`, and so are the bits of what arrives; nothing is kept between the passes but the residual.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from sparsync.collectives.values import QuantizedMean
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Comm, Report, Span, phase, spans
from sparsync.exchanges.sender import Skip, StepsToMake
from sparsync.kernels import operations as kernels
from sparsync.kernels.value_reference import nan_packet
from sparsync.runtime.connection import Reduction
from sparsync.wire import ValueCodec, Values


@dataclass(eq=False)
class WholeStep(Reduction):
    """The reduction of one bucket's step; `steps` None: this rank's gradient is not finite, and it sends NaN.

    With `skip` that is decided on the device: nothing changes there where a rank's gradient is not finite, and the host does not know.
    """

    name: str  # of the scheme
    values: tuple[Values, Values]  # up and down
    steps: StepsToMake | None
    skip: Skip | None = None
    mean: QuantizedMean | None = field(default=None, init=False)  # that has arrived, unless it is to be skipped
    # Not in a cycle with this, which would keep gradients.
    _undo: list[Callable[[], None]] = field(default_factory=list, init=False)

    @property
    def has_residual(self) -> bool:
        return True

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        """Exchange the step; `bucket.grad` is the residual, which keeps what is not sent. As it was where the report has "overflow"."""
        comm, rank, P, residual, n = MeteredComm(comm), comm.rank, comm.size, bucket.grad, bucket.grad.numel()
        up, down = map(ValueCodec, self.values)
        chunks, dtype = spans(n, P), residual.dtype
        sizes = [up.nbytes(len(chunk), dtype) * (owner != rank) for owner, chunk in enumerate(chunks)]
        mine, bits, bits_down = chunks[rank], up.kernel_bits, down.kernel_bits
        assert bits is not None and bits_down is not None
        flag = None if self.skip is None else self.skip.agree(comm)
        with phase("encode"):
            if self.steps is None:
                lengths = [len(chunk) for owner, chunk in enumerate(chunks) if owner != rank]
                sent = [nan_packet(length, bits, residual.device) for length in lengths]
                sent.insert(rank, residual.new_empty(0, dtype=torch.uint8))
            else:
                sent = list(self.steps.encode(residual, rank, P, bits, flag).split(sizes))
                self._undo.append(partial(_take_back, residual, chunks, rank, sent, up))
        try:
            size = up.nbytes(len(mine), dtype)
            received = comm.all_to_all(sent, [size * (source != rank) for source in range(P)])
            with phase("decode"):
                others = [packet for source, packet in enumerate(received) if source != rank]
                if self.steps is None or (
                    flag is None and not kernels.packets_fit(others, [len(mine)] * len(others), bits, P)
                ):
                    packet = nan_packet(len(mine), bits_down, residual.device)
                else:
                    packet = kernels.reduce_shares_(mine.of(residual), others, bits, P, bits_down, flag)
                    self._undo.append(partial(_take_sum_back, mine.of(residual), packet, others, up, down, P))
            mean = QuantizedMean(
                comm.all_gather(packet, [down.nbytes(len(chunk), dtype) for chunk in chunks]), down, n, dtype
            )
            overflow = flag is None and not mean.fits(P)
        except BaseException:
            if self.skip is None:  # else the connection is lost, and with it whether there is anything to return
                self._forget(bucket)
            raise
        if overflow:
            self._forget(bucket)
        else:
            self.mean = mean
        return Report(self.name, bucket.key, bucket.step, n, n, n, comm.sent, details={"overflow": overflow})

    def rollback(self, bucket: Bucket) -> None:
        """Return to the residual what was sent: of a step that a device skips, nothing, for its packets are of NaN."""
        self.mean = None
        before = None if self.skip is None or not self._undo else bucket.grad.clone()
        while self._undo:
            self._undo.pop()()
        if before is not None and self.skip is not None:
            bucket.grad.copy_(torch.where(self.skip.flag == 0, bucket.grad, before))

    def _forget(self, bucket: Bucket) -> None:
        """Leave the residual as it was before the step, up to rounding."""
        made = bool(self._undo)
        self.rollback(bucket)
        if made and self.steps is not None:
            bucket.grad.sub_(self.steps.again())


@dataclass
class WholeMean:
    """The mean step of a bucket whose residual is in `bucket`, as `step` has exchanged it."""

    bucket: Bucket
    step: WholeStep

    def arrived(self) -> QuantizedMean | None:
        """Return what moves the weights; None where the step is skipped."""
        return self.step.mean

    def whole(self) -> Tensor | None:
        """Return it as a vector, [n]."""
        return None if self.step.mean is None else self.step.mean.decoded()

    def rollback(self) -> None:
        """Return to the residual what was sent."""
        self.step.rollback(self.bucket)


def _take_back(residual: Tensor, chunks: Sequence[Span], rank: int, sent: Sequence[Tensor], codec: ValueCodec) -> None:
    for owner, (chunk, packet) in enumerate(zip(chunks, sent, strict=True)):
        if owner != rank:
            chunk.of(residual).add_(codec.decode(packet, len(chunk), residual.dtype), alpha=len(chunks))


def _take_sum_back(
    own: Tensor, packet: Tensor, others: Sequence[Tensor], up: ValueCodec, down: ValueCodec, P: int
) -> None:
    total = own.double().add_(down.decode(packet, len(own), own.dtype), alpha=P)
    for each in others:
        total.sub_(up.decode(each, len(own), own.dtype), alpha=P)
    own.copy_(total)

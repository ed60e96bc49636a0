"""The two interfaces everything hangs on: a communicator and a scheme."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from sparsync.core import Bucket, Report


class Comm(Protocol):
    """One rank's view of a group of P ranks. Every call is collective but `send_recv`, and returns when its result is there.

    All tensors are one-dimensional and contiguous, of one dtype and device on all ranks. What a call returns is for reading only: a
    transport inside one process may hand the same tensor to every rank. `counts`, where all ranks know them, are the numbers of
    elements that come from each rank; without them the transport exchanges them first, at 8 bytes a rank pair.
    Failures raise RuntimeError and name the ranks; nothing waits without a timeout.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send_recv(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        """Sends `out` to rank `to` while `into` is filled with what rank `source` sends; nothing is sent or awaited for an empty one."""
        ...

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        """Every rank's `x`, in rank order; lengths may differ. Bytes sent per rank: (P-1) * nbytes(x)."""
        ...

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        """What each rank sent here, in rank order; `parts[r]` goes to rank r, may be empty. Bytes sent per rank: all parts' but its own."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same bits on every rank. Bytes sent per rank: 2 (P-1)/P * nbytes(x)."""
        ...


class Scheme(Protocol):
    """One way to reduce gradients. Holds the state of one rank; every rank makes its own, alike."""

    @property
    def name(self) -> str: ...

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        """Replaces `bucket.grad`, on every rank, by the same estimate of the mean gradient."""
        ...

    # Any: nested dicts of tensors, numbers and strings, as torch.load(weights_only=True) accepts them.
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        """Multiplies what is kept back for each named parameter; without effect in a scheme that keeps nothing back."""
        ...

    def begin_anew(self) -> None:
        """Forgets all that ranks must hold alike, thresholds and partitions, but no residual: after a failure they may differ."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether anything is kept back from step to step."""
        ...

    def put_back(self, bucket: Bucket) -> None:
        """Keeps back what `reduce` has just written to `bucket`, alike on all ranks, because the step will not be applied."""
        ...

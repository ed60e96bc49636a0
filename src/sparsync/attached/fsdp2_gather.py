"""The all-gather of FSDP2's parameters in few bits."""

from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.attached.fsdp2_units import Unit, inside_backward
from sparsync.collectives.values import gather_differences
from sparsync.comm.group import GroupComm
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Comm, Report
from sparsync.runtime.connection import Connection, Reduction
from sparsync.runtime.summary import MAX_REPORTS
from sparsync.wire import ValueCodec, Values

_EXACT = ValueCodec("float32")


class ParameterGather:
    """Replaces the all-gather of these units until `detach`. Collective over their shard axis, as is every gather that sends.

    The first gather of a unit, and the first after `forget`, sends exact shards; later gathers in a forward pass send rounded differences.
    A gather inside a backward pass sends nothing, and returns the bits that the forward pass got.
    """

    def __init__(self, units: list[Unit], values: Values, comm: GroupComm) -> None:
        """Take over the gathers. `comm` connects the shard axis, for these gathers alone."""
        self._shared = SharedShards(values)
        self._connection = Connection(self._shared, comm, "parameters")
        self.reports: deque[Report] = deque(maxlen=MAX_REPORTS)  # of each gather that sent something
        self._step, self._seen = -1, set[str]()  # the pass since the last failure, and its units so far
        # The CUDA event after the latest gather: FSDP2 may use another stream for the next. Any: torch's stubs know two such classes.
        self._last: Any = None
        self._undo = [unit.replace_all_gather(partial(self.gather, unit)) for unit in units]
        for unit in units:
            forget = partial(self._loaded, unit.key)
            self._undo += [each.register_load_state_dict_post_hook(forget).remove for each in unit.owners]

    def forget(self, key: str | None = None) -> None:
        """Send exact shards in the next gather of a unit (None: of all units). Call it on all ranks."""
        self._shared.forget(key)

    def detach(self) -> None:
        """Restore the all-gathers of the units."""
        while self._undo:
            self._undo.pop()()
        self.forget()
        self.close()

    def close(self) -> None:
        """Close the connections; a gather that would send raises RuntimeError from then on."""
        self._connection.shut()

    def gather(self, unit: Unit, out: Tensor, shard: Tensor, op: object) -> None:
        """Write the shards of all ranks, as every rank holds them from here on, to `out` [P m]; `shard` is this rank's chunk of it."""
        if out.is_cuda and self._last is not None:
            self._last.wait()
        held = self._shared.held(unit.key, out)
        if held is not None and inside_backward():
            out.copy_(held)
        else:
            self._exchange(unit, out)
        if out.is_cuda:
            self._last = torch.cuda.current_stream(out.device).record_event()

    def _loaded(self, key: str, module: nn.Module, incompatible: object) -> None:
        self.forget(key)

    def _exchange(self, unit: Unit, out: Tensor) -> None:
        if not self._seen or unit.key in self._seen:
            self._seen.clear()
            self._step += 1
        self._seen.add(unit.key)
        number = self._step

        def exchange() -> None:
            self.reports.append(self._connection.reduce(Bucket(unit.key, out, number), self._shared))

        try:
            failure = self._connection.attempt(exchange, Exception)
        except BaseException as error:  # Ctrl-C
            self._connection.close(error)
            self._begin_anew()
            raise
        if failure:
            self._begin_anew()
            raise RuntimeError(
                f"the parameters of module {unit.key!r} were not gathered in pass {number}: {failure}; call reset_iter_state() on the "
                "model, then continue"
            )

    def _begin_anew(self) -> None:
        """Drop the held shards after a failure: the ranks may be in different passes."""
        self._step = -1
        self._seen.clear()
        self.forget()
        self._connection.continue_after(-1)


class SharedShards(Reduction):
    """The shards of each unit as all ranks hold them; a Connection updates them."""

    name = "parameters"

    def __init__(self, values: Values) -> None:
        self._codec = ValueCodec(values)
        self._held: dict[str, Tensor] = {}  # by unit, [P m]

    def held(self, key: str, like: Tensor) -> Tensor | None:
        """Get the shards of a unit that all ranks hold, read-only; None if there are none of this size and type."""
        held = self._held.get(key)
        same = held is not None and (held.shape, held.dtype, held.device) == (like.shape, like.dtype, like.device)
        return held if same else None

    def forget(self, key: str | None) -> None:
        """Drop the held shards of a unit (None: of all units)."""
        if key is None:
            self._held.clear()
        else:
            self._held.pop(key, None)

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        """Gather into `bucket.grad` [P m], which has this rank's shard as a chunk; see ParameterGather.gather."""
        out, held, codec = bucket.grad, self.held(bucket.key, bucket.grad), self._codec_of(bucket, comm.size)
        self._held.pop(bucket.key, None)  # until complete: a failure may leave it different between ranks
        m = out.numel() // comm.size
        held = torch.zeros_like(out) if held is None else held
        comm = MeteredComm(comm)
        gather_differences(out.view(comm.size, m)[comm.rank], held, codec, comm)
        out.copy_(held)
        self._held[bucket.key] = held
        n = out.numel()
        return Report(self.name, bucket.key, bucket.step, n, m, n, comm.sent, details={"exact": codec.exact})

    def shared_text(self, bucket: Bucket) -> str:
        held = self.held(bucket.key, bucket.grad)
        return "nothing is held yet" if held is None else "differences to what is held"

    def reset_shared_state(self) -> None:
        self._held.clear()

    def _codec_of(self, bucket: Bucket, P: int) -> ValueCodec:
        """Choose the codec of the next gather: exact if there is nothing to subtract from, or nothing to save."""
        m, dtype = bucket.grad.numel() // P, bucket.grad.dtype
        known = self.held(bucket.key, bucket.grad) is not None
        small = self._codec.nbytes(m, dtype) < _EXACT.nbytes(m, dtype)
        return self._codec if known and small else _EXACT

"""One exchange of a fragment of the weights: agree, reduce the buckets by the scheme, and write the new own weights."""

import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.base.state import State, overflowed
from sparsync.comm.group import GroupComm
from sparsync.comm.worker import Origin, Worker
from sparsync.core import Bucket, Comm, Cost, Report, exact_divisor
from sparsync.exchanges.agreement import CHANGED, FROZEN, IDLE, Agreement, CommonBuffers
from sparsync.exchanges.steps_options import LocalSteps, MakeOptimizer
from sparsync.exchanges.weights import WeightBucket, Weights, copied_by_name
from sparsync.kernels import operations as kernels
from sparsync.runtime.comparison import Compared
from sparsync.runtime.connection import Connection


@dataclass
class PendingExchange:
    """The changes of some buckets on their way, and after `wait` the result."""

    buckets: Sequence[WeightBucket]
    due: int  # applied after this many steps
    background: bool  # the own weights change before this is applied
    own: list[Tensor] = field(default_factory=list)  # the own weights when it was sent, [n] each
    changes: list[Bucket] = field(default_factory=list)  # start - own, and afterwards the mean over ranks
    # The part of the unsent changes that stays in the own weights; None: nothing.
    held: list[Tensor | None] = field(default_factory=list)
    dropped: bool = False  # NaN or Inf somewhere
    not_finite: list[int] = field(default_factory=list)  # ranks whose weights hold NaN or Inf
    idle: frozenset[str] = frozenset()  # parameters that were not exchanged: frozen, or changed by no rank
    buffers: list[Tensor] = field(default_factory=list)  # the common ones, if they were exchanged
    reports: list[Report] = field(default_factory=list)
    raised: bool = False  # an error was raised for it already
    agreement: Agreement | None = None  # before it is sent
    compared: Compared = field(default_factory=Compared)
    job: "Future[str] | None" = None
    ended: dict[torch.device, Any] = field(default_factory=dict)  # torch's stubs know two unrelated Event classes
    _origin: Origin = field(default_factory=Origin)

    def wait(self) -> str:
        """Wait for the end of the exchange, and return its failure as text, "" if it succeeded."""
        if self.job is not None:
            self._origin.check()
            if failure := self.job.result():
                return failure
        for device, ended in self.ended.items():
            torch.cuda.current_stream(device).wait_event(ended)
            for tensor in (*(each.grad for each in self.changes), *(each for each in self.held if each is not None)):
                if tensor.device == device:
                    tensor.record_stream(torch.cuda.current_stream(device))
        self.ended = {}
        return ""

    def take(self, number: int) -> tuple[bool, dict[str, int]]:
        """Take this rank's changes for exchange `number` of their fragment; return the arguments `finite` and `parameters` of Agreement."""
        with torch.no_grad():
            self.own = [each.own() for each in self.buckets]
            pairs = zip(self.buckets, self.own, strict=True)
            self.changes = [each.bucket(each.start - now, number) for each, now in pairs]
        finite = all(kernels.all_finite(each.grad) for each in self.changes)
        pairs = zip(self.buckets, self.changes, strict=True)
        return finite, {name: state for bucket, change in pairs for name, state in _states(bucket, change)}

    def write_own(self, mixing: float | None) -> None:
        """Write the new own weights. Changes since the exchange was sent stay, see `LocalTraining.step`."""
        for bucket, held, before in zip(self.buckets, self.held, self.own, strict=True):
            weights, begun = kept(bucket, held), bucket.start
            if not self.background and mixing is None:
                bucket.start = bucket.write(weights, self.idle)
            else:
                now = bucket.own()
                since = before - now
                weights = weights - since if mixing is None else weights.lerp(now, mixing)
                bucket.start = bucket.write(weights, self.idle) + since
            bucket.idle_from(begun, bucket.start, self.idle)

    def return_to_start(self) -> None:
        """Write the own weights as the last exchange left them."""
        for bucket, held in zip(self.buckets, self.held, strict=True):
            weights = kept(bucket, held)
            if self.idle:
                weights = bucket.idle_from(bucket.start, weights.clone(), self.idle)
            bucket.start = bucket.write(weights)

    def state_dict(self) -> dict[str, Any]:  # Any: tensors, numbers and names
        """Return the state of an exchange that has ended and was not applied."""
        return {
            "due": self.due,
            "dropped": self.dropped,
            "not_finite": list(self.not_finite),
            "idle": sorted(self.idle),
            "mean": copied_by_name(self.buckets, [each.grad for each in self.changes]),
            "own": copied_by_name(self.buckets, self.own),
            "buffers": [each.clone() for each in self.buffers],
        }


def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:  # Any: as LocalTraining saves them
    """Merge the states of all ranks into one without own weights: the mean of the ranks' changes moves the common weights."""
    common = {}
    for name, weights in states[0]["common"].items():
        total = torch.zeros_like(weights)
        for one in states:
            sent = [each["own"][name] for each in one["pending"] if name in each["own"]]
            begun = sent[0] if sent else one["start"].get(name, one["common"][name])
            total += begun - one["own"][name].to(weights.dtype)
        common[name] = weights - total / exact_divisor(total, len(states))
    pending = [{**each, "own": {}} for each in states[0]["pending"]]
    return {**states[0], "common": common, "start": {}, "own": {}, "pending": pending}


def kept(bucket: WeightBucket, held: Tensor | None) -> Tensor:
    """Subtract `held` from the common weights."""
    return bucket.common if held is None else bucket.common - held


class OuterOptimizer:
    """The optimizer of the common weights: its parameters are views of them, in the model's order."""

    def __init__(self, make: MakeOptimizer, weights: Weights) -> None:
        self._parameters = {
            entry.name: nn.Parameter(entry.span.of(bucket.common).view(entry.shape))
            for bucket in weights.buckets
            for entry in bucket.layout
        }
        self.optimizer = make(list(self._parameters.values()))

    def step(self, exchange: PendingExchange) -> None:
        """Step with the mean changes as gradients. Idle parameters and other fragments have none, so they stay."""
        for mean in exchange.changes:
            for entry in mean.layout:
                if entry.name not in exchange.idle:
                    parameter = self._parameters[entry.name]
                    parameter.grad = entry.span.of(mean.grad).view(parameter.shape)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Exchanger:
    """Makes exchanges over `connection`, in the same order on all ranks, and applies them. Delayed ones run on a thread."""

    def __init__(
        self, connection: Connection, state: State, comm: Comm, options: LocalSteps, weights: Weights, model: nn.Module
    ) -> None:
        self._connection, self._state, self.comm, self._options = connection, state, comm, options
        self._weights, self.buffers = weights, CommonBuffers(model)
        self.applied = [0] * options.fragments  # exchanges per fragment, also dropped ones; they seed the scheme
        self.pending: dict[int, PendingExchange] = {}  # by fragment, in the order of sending
        self.outer = None if options.outer is None else OuterOptimizer(options.outer, weights)
        # A LocalWorld has one thread for each rank.
        self.worker = Worker() if options.delay > 0 and isinstance(comm, GroupComm) else None
        if self.worker is not None:
            weakref.finalize(self, self.worker.stop)

    def start(self, exchange: PendingExchange, step: int) -> None:
        """Run the exchange; one for the background runs on the thread, and this returns at once.

        `step` goes into the reports. After an error here call `fail`; `PendingExchange.wait` returns an error on the thread.
        """
        if self.worker is None or not exchange.background:
            self._reduce(exchange, step)
            return
        devices = {each.grad.device for each in exchange.changes if each.grad.is_cuda}
        ready = {device: torch.cuda.current_stream(device).record_event() for device in devices}

        def job() -> str:
            failure = self._connection.attempt(lambda: self._reduce_on_streams(exchange, step, ready))
            return failure and f"the exchange of step {step} failed: {failure}"

        exchange.job = self.worker.submit(job)

    def fail(self, exchange: PendingExchange, step: int, error: BaseException) -> None:
        """Close the connection, after the pending exchanges, because `error` on this thread has prevented `exchange`.

        Raises `error`, unless the other ranks notice it only when the exchange is due: then this rank fails at that time too.
        """
        if self.worker is not None and exchange.background and isinstance(error, Exception):
            failure = f"{type(error).__name__}: {error}"  # not the error: its traceback would keep connections open
            exchange.job = self.worker.submit(
                lambda: f"the exchange of step {step} failed: {failure}{self._connection.close(failure)}"
            )
            return
        self._connection.fail(error)
        raise error

    def held(self, bucket: WeightBucket, idle: Collection[str] = ()) -> Tensor | None:
        """Return `keep` times the unsent changes of a bucket, [n], zero for idle parameters; None if there are none."""
        unsent = bucket.unsent(self._state, self.comm, idle) if self._options.keep else None
        return None if unsent is None else unsent * self._options.keep

    def apply(self, exchange: PendingExchange, fragment: int) -> None:
        """Apply an exchange that has ended. One with NaN or Inf returns to the weights after the last exchange."""
        if exchange.dropped:
            exchange.return_to_start()
        else:
            self.apply_to_common(exchange)
            exchange.write_own(self._options.mixing)
            if exchange.buffers:
                self.buffers.take(exchange.buffers)
                self.buffers.show()
        self.applied[fragment] += 1

    def drop_pending(self) -> None:
        """Drop the exchanges on their way, on all ranks: their changes belong to weights that are gone."""
        for fragment, exchange in self.pending.items():
            exchange.wait()  # its outcome does not matter any more
            self.applied[fragment] += 1
        self.pending.clear()

    def recover(self) -> None:
        """Drop this rank's changes since the last exchanges, and restore its buffers."""
        for bucket in self._weights.buckets:
            bucket.start = bucket.write(bucket.start)
        for each in self.pending.values():
            each.own = [bucket.own() for bucket in each.buckets]
        self.buffers.show()

    def apply_to_common(self, exchange: PendingExchange) -> None:
        """Move the common weights by the mean changes of an exchange."""
        if self.outer is not None:
            self.outer.step(exchange)
            return
        for bucket, mean in zip(exchange.buckets, exchange.changes, strict=True):
            bucket.common.sub_(mean.grad)

    def state_dict(self) -> dict[str, Any]:  # Any: as Handle.state_dict
        """Return the state without the common weights. Failed exchanges are left out."""
        pending = {fragment: exchange for fragment, exchange in self.pending.items() if not exchange.wait()}
        begun = [each for each in self._weights.buckets if each.start is not each.common]
        return {
            "start": copied_by_name(begun, [each.start for each in begun]),
            "own": self._weights.saved(each.own() for each in self._weights.buckets),
            "applied": list(self.applied),
            "pending": [{"fragment": each, **exchange.state_dict()} for each, exchange in pending.items()],
            "common_buffers": [each.clone() for each in self.buffers.values],
            "outer": None if self.outer is None else self.outer.optimizer.state_dict(),
        }

    def check(self, saved: Mapping[str, Any]) -> None:  # Any: as `state_dict`
        """Raise ValueError unless a state was saved with these options."""
        if (saved["outer"] is None) != (self.outer is None):
            raise ValueError(
                "either this state or this LocalSteps has an outer optimizer, but not both; use the same `outer`"
            )
        then, now = len(saved["applied"]), len(self._weights.fragments)
        if saved["pending"] and then != now:
            raise ValueError(
                f"this state was saved with {then} fragments, some of them on their way, and there are {now} now; use the saved number, or "
                "call flush() before saving"
            )

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a state, after the common weights were loaded."""
        applied, fragments = saved["applied"], self._options.fragments
        self.applied = list(applied) if len(applied) == fragments else [max(applied)] * fragments
        if self.outer is not None:
            # A copy: an optimizer keeps the tensors that it loads, which may be mapped from a file.
            self.outer.optimizer.load_state_dict(deepcopy(saved["outer"]))
        self.buffers.take(saved["common_buffers"])
        with torch.no_grad():
            for bucket in self._weights.buckets:
                self._restore(bucket, saved)
            self.pending = {each["fragment"]: self._restored(each) for each in saved["pending"]}

    def _restore(self, bucket: WeightBucket, saved: Mapping[str, Any]) -> None:
        """Restore own weights and `start`, or compute them from the common weights if the state has another number of ranks."""
        name = bucket.layout[0].name
        if name in saved["own"]:
            bucket.start = bucket.from_names(saved["start"]) if name in saved["start"] else bucket.common
            bucket.write(bucket.from_names(saved["own"]))
        else:
            bucket.start = bucket.write(kept(bucket, self.held(bucket)))

    def _restored(self, saved: Mapping[str, Any]) -> PendingExchange:
        """Make a pending exchange from its saved state."""
        buckets, number = self._weights.fragments[saved["fragment"]], self.applied[saved["fragment"]]
        exchange = PendingExchange(buckets, saved["due"], background=True, dropped=saved["dropped"])
        exchange.changes = [each.bucket(each.from_names(saved["mean"]), number) for each in buckets]
        # A state of another number of ranks has no own weights.
        exchange.own = [each.from_names(saved["own"]) if saved["own"] else each.own() for each in buckets]
        exchange.not_finite, exchange.idle = list(saved["not_finite"]), frozenset(saved["idle"])
        exchange.buffers = [each.clone() for each in saved["buffers"]]
        exchange.held = [self.held(bucket, exchange.idle) for bucket in buckets]
        return exchange

    def _reduce_on_streams(self, exchange: PendingExchange, step: int, ready: Mapping[torch.device, Any]) -> None:
        """Run the exchange on a new stream per device, after the events `ready`."""
        with ExitStack() as streams:
            for device, event in ready.items():
                stream = torch.cuda.Stream(device)
                streams.enter_context(torch.cuda.stream(stream))
                stream.wait_event(event)
            self._reduce(exchange, step)
            exchange.ended = {device: torch.cuda.current_stream(device).record_event() for device in ready}

    def _reduce(self, exchange: PendingExchange, step: int) -> None:
        """Reduce all buckets, or none if a rank's weights are not finite. A failure loses nothing, and sends nothing twice."""
        agreement, number, reduced = exchange.agreement, exchange.changes[0].step, list[tuple[int, Bucket]]()
        assert agreement is not None
        self._connection.compare_in_next_step(exchange.compared)
        try:
            agreed = self._connection.reduce(agreement.bucket(number, exchange.changes[0].grad.device), agreement)
            exchange.not_finite, exchange.idle = agreement.not_finite, agreement.idle
            exchange.buffers = agreement.buffers
            exchange.dropped = bool(exchange.not_finite)
            for position, (bucket, change) in enumerate(zip(exchange.buckets, exchange.changes, strict=True)):
                part = bucket.part(exchange.idle)
                if exchange.dropped or not part.layout:
                    # The same on all ranks. Residuals hold what other buckets have sent again, see Rollback.
                    report = self._state.scheme.report(
                        change, selected=0, union=0, details={"overflow": exchange.dropped}
                    )
                    report = replace(report, sent=Cost())
                    change.grad.zero_()
                else:
                    sent = part.bucket(change.grad, number)
                    report = self._connection.reduce(sent, self._state)
                    reduced.append((position, sent))
                    exchange.dropped = overflowed(report, sent.grad)
                    change.grad = part.whole(sent.grad, len(change.grad))
                exchange.reports.append(replace(report, step=step))
            with torch.no_grad():
                exchange.held = [self.held(each, exchange.idle) for each in exchange.buckets]
        except BaseException:
            for position, sent in reduced if not exchange.dropped and self._state.has_residual else ():
                # The residual holds again what this bucket sent, so its next change starts here.
                self._state.rollback(sent)
                bucket, begun = exchange.buckets[position], exchange.own[position].clone()
                bucket.start = bucket.idle_from(bucket.start, begun, exchange.idle)
            raise
        self._connection.end_step()  # not after a failure: this step was not reduced here
        exchange.reports[0] = _with_agreement(exchange.reports[0], agreed)


def _with_agreement(report: Report, agreed: Report) -> Report:
    """Add the traffic and time of the agreement to the report of the first bucket."""
    return replace(
        report,
        cost=report.cost + agreed.cost,
        sent=(report.sent or Cost()) + (agreed.sent or Cost()),
        seconds=(report.seconds or 0.0) + (agreed.seconds or 0.0),
        wait_s=(report.wait_s or 0.0) + (agreed.wait_s or 0.0),
    )


def _states(bucket: WeightBucket, change: Bucket) -> list[tuple[str, int]]:
    """Tell for each parameter name whether this rank has left it idle, changed it or frozen it."""
    changed = torch.stack([entry.span.of(change.grad).any() for entry in bucket.layout]).tolist()  # a host sync
    return [
        (name, CHANGED if moved else IDLE) if each.requires_grad else (name, FROZEN)
        for (name, each), moved in zip(bucket.parameters.items(), changed, strict=True)
    ]

"""Record every rank's traffic in each call of a communicator, and compare it with the exchanges of a plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sparsync import Bucket, Report
from sparsync.base.state import State
from sparsync.comm import Cost, LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.core import ParameterSpan
from sparsync_lab.predict.exchanges import Exchange
from studies.papers.oktopk_runs import Call, RecordingComm


@dataclass(frozen=True)
class RecordedStep:
    """One step of a scheme on all ranks."""

    reports: list[Report]
    calls: list[list[Call]]  # of each rank

    def counted(self, rank: int) -> Cost:
        """Add up the costs that a rank's MeteredComm counted."""
        return sum((call.sent for call in self.calls[rank]), Cost())


def recorded_step(
    states: Sequence[State], gradients: Sequence[Tensor], step: int, layout: tuple[ParameterSpan, ...] = ()
) -> RecordedStep:
    """Reduce one bucket in this process, with one rank per state."""

    def reduce(comm: LocalComm) -> tuple[Report, list[Call]]:
        recording = RecordingComm(comm)
        report = states[comm.rank].reduce(Bucket("b", gradients[comm.rank], step, layout), recording)
        return report, recording.calls

    found = LocalWorld(len(states)).run(reduce)
    return RecordedStep([report for report, _ in found], [calls for _, calls in found])


def busiest(recorded: RecordedStep, exchanges: Sequence[Exchange]) -> list[Exchange]:
    """List the recorded counterparts of `exchanges`, with the traffic of their busiest ranks.

    A chain of sends has one call per round of its exchange.
    """
    found: list[Exchange] = []
    position = 0
    for exchange in exchanges:
        calls = round(exchange.rounds) if exchange.kind == "send_recv" else 1
        parts = [own[position : position + calls] for own in recorded.calls]
        position += calls
        if not all(parts):
            raise AssertionError(f"the plan has an exchange {exchange} that did not take place")
        kinds = {part.kind for own in parts for part in own}
        sums = [sum((part.sent for part in own), Cost()) for own in parts]
        kind = exchange.kind if kinds == {exchange.kind} else "/".join(sorted(kinds))
        most = max(cost.nbytes for cost in sums)
        received = most if kind == "all_reduce" else max(sum(part.received for part in own) for own in parts)
        steps = {cost.steps for cost in sums}
        if len(steps) > 1:
            raise AssertionError(f"ranks count different rounds for {exchange}: {sorted(steps)}")
        found.append(
            replace(
                exchange,
                kind=kind,  # pyright: ignore[reportArgumentType]  # a different kind must show
                nbytes=most,
                messages=max(cost.messages for cost in sums),
                rounds=steps.pop(),
                received=received,
            )
        )
    left = [call for call in recorded.calls[0][position:] if call.sent.steps]
    if left:
        raise AssertionError(f"exchanges took place that the plan does not have: {left}")
    return found

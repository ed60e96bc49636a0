"""Reports as numbers over time, for TensorBoard and wandb.

For any integration: `recorder.record(handle.take_reports())` after the optimizer's step, or `recorder.record(reducer.reduce())`.
Nothing here communicates: bytes are the ones sent by this rank.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from sparsync.core import Report

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


@runtime_checkable
class Recorder(Protocol):
    """Records reports somewhere."""

    def record(self, reports: Iterable[Report], **more: float) -> None:
        """Record the `numbers` of the reports by step, and `more` with the last step."""
        ...


def numbers(reports: Iterable[Report]) -> dict[str, float]:
    """Sum bytes_sent, messages, elements, selected, union, seconds, wait_seconds and PHASE_seconds over buckets; compute the density.

    "overflows" counts buckets with NaN or Inf in the result, if the scheme looks for them; `dense` and `skip_reduce` do not.
    """
    sums = {"bytes_sent": 0.0, "messages": 0.0, "elements": 0.0, "selected": 0.0, "union": 0.0}
    sums |= {"seconds": 0.0, "wait_seconds": 0.0, "overflows": 0.0}
    for report in reports:
        sent = report.sent or report.cost
        added = {"bytes_sent": sent.nbytes, "messages": sent.messages, "elements": report.elements}
        added |= {"selected": report.selected, "union": report.union, "overflows": bool(report.details.get("overflow"))}
        added |= {"seconds": report.seconds or 0.0, "wait_seconds": report.wait_s or 0.0}
        added |= {f"{name}_seconds": spent for name, spent in report.phases.items()}
        for name, value in added.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums | {"density": sums["union"] / sums["elements"] if sums["elements"] else 1.0}


class TensorBoard:
    """Records scalars "sparsync/bytes_sent" and so on."""

    def __init__(self, writer: "SummaryWriter") -> None:
        self._writer = writer

    def record(self, reports: Iterable[Report], **more: float) -> None:
        for step, values in _by_step(reports, more).items():
            for name, value in values.items():
                self._writer.add_scalar(f"sparsync/{name}", value, step)


class Wandb:
    """Records the same names in a wandb run, over a separate axis, "sparsync/step", so that the step of the run does not move."""

    def __init__(self, run: Any) -> None:  # Any: wandb is not imported for its class
        self._run = run
        run.define_metric("sparsync/step", hidden=True)
        run.define_metric("sparsync/*", step_metric="sparsync/step")

    def record(self, reports: Iterable[Report], **more: float) -> None:
        for step, values in _by_step(reports, more).items():
            self._run.log({"sparsync/step": step, **{f"sparsync/{name}": value for name, value in values.items()}})


def _by_step(reports: Iterable[Report], more: Mapping[str, float]) -> dict[int, dict[str, float]]:
    steps: dict[int, list[Report]] = {}
    for report in reports:
        steps.setdefault(report.step, []).append(report)
    values = {step: numbers(some) for step, some in steps.items()}
    if values:
        values[max(values)] |= more
    return values

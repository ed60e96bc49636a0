"""Reports as numbers over time, for TensorBoard and wandb.

For any integration: `recorder.record(handle.take_reports())` after the optimizer's step, or `recorder.record(reducer.reduce())`.
Nothing here communicates: bytes are those that this rank sent.
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
        """Record the `numbers` of each step's reports, and `more` with the last step."""
        ...


def numbers(reports: Iterable[Report]) -> dict[str, float]:
    """Return sums over buckets of bytes_sent, messages, elements, selected, union, seconds, wait_seconds and PHASE_seconds, and density.

    "overflows" counts buckets with NaN or Inf in the result, where the scheme looks for them; `dense` and `skip_reduce` do not.
    """
    found = {"bytes_sent": 0.0, "messages": 0.0, "elements": 0.0, "selected": 0.0, "union": 0.0}
    found |= {"seconds": 0.0, "wait_seconds": 0.0, "overflows": 0.0}
    for report in reports:
        sent = report.sent or report.cost
        added = {"bytes_sent": sent.nbytes, "messages": sent.messages, "elements": report.elements}
        added |= {"selected": report.selected, "union": report.union, "overflows": bool(report.details.get("overflow"))}
        added |= {"seconds": report.seconds or 0.0, "wait_seconds": report.wait_s or 0.0}
        added |= {f"{name}_seconds": spent for name, spent in report.phases.items()}
        for name, value in added.items():
            found[name] = found.get(name, 0.0) + value
    return found | {"density": found["union"] / found["elements"] if found["elements"] else 1.0}


class TensorBoard:
    """Scalars "sparsync/bytes_sent" and so on."""

    def __init__(self, writer: "SummaryWriter") -> None:
        self._writer = writer

    def record(self, reports: Iterable[Report], **more: float) -> None:
        for step, found in _by_step(reports, more).items():
            for name, value in found.items():
                self._writer.add_scalar(f"sparsync/{name}", value, step)


class Wandb:
    """Record the same names in a run of wandb, over a separate axis, "sparsync/step": they do not move the run's own step."""

    def __init__(self, run: Any) -> None:  # Any: wandb is not imported for its class
        self._run = run
        run.define_metric("sparsync/step", hidden=True)
        run.define_metric("sparsync/*", step_metric="sparsync/step")

    def record(self, reports: Iterable[Report], **more: float) -> None:
        for step, found in _by_step(reports, more).items():
            self._run.log({"sparsync/step": step, **{f"sparsync/{name}": value for name, value in found.items()}})


def _by_step(reports: Iterable[Report], more: Mapping[str, float]) -> dict[int, dict[str, float]]:
    steps: dict[int, list[Report]] = {}
    for report in reports:
        steps.setdefault(report.step, []).append(report)
    found = {step: numbers(some) for step, some in steps.items()}
    if found:
        found[max(found)] |= more
    return found

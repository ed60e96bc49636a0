"""Reports as numbers over time, for TensorBoard, wandb and Prometheus.

For any integration: `recorder.record(handle.take_reports())` after the optimizer's step, or `recorder.record(reducer.reduce())`.
Nothing here communicates: bytes are those that this rank sent.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from sparsync.adapters.wrapped import needs
from sparsync.base.state import State
from sparsync.core import Report

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
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


def residual_norm(state: State) -> float:
    """Return the Euclidean norm of this rank's residual; 0 where there is none. Call it between steps; copies the residual once."""
    residuals = state.state_dict().get("residual", {}).values()
    return float(torch.stack([each.double().square().sum() for each in residuals]).sum().sqrt()) if residuals else 0.0


class TensorBoard:
    """Scalars "sparsync/bytes_sent" and so on, and with `by_bucket` also "sparsync/bucket0/bytes_sent"."""

    def __init__(self, writer: "SummaryWriter", *, by_bucket: bool = False) -> None:
        self._writer, self._by_bucket = writer, by_bucket

    def record(self, reports: Iterable[Report], **more: float) -> None:
        for step, found in _by_step(reports, self._by_bucket, more).items():
            for name, value in found.items():
                self._writer.add_scalar(f"sparsync/{name}", value, step)


class Wandb:
    """Record the same names in a run of wandb, over a separate axis, "sparsync/step": they do not move the run's own step."""

    def __init__(self, run: Any, *, by_bucket: bool = False) -> None:  # Any: wandb is not imported for its class
        self._run, self._by_bucket = run, by_bucket
        run.define_metric("sparsync/step", hidden=True)
        run.define_metric("sparsync/*", step_metric="sparsync/step")

    def record(self, reports: Iterable[Report], **more: float) -> None:
        for step, found in _by_step(reports, self._by_bucket, more).items():
            self._run.log({"sparsync/step": step, **{f"sparsync/{name}": value for name, value in found.items()}})


class Prometheus:
    """Counters such as sparsync_bytes_sent_total, and gauges for density and whatever else is given.

    Their labels are the scheme and, with `by_bucket`, the bucket. `registry`: where they are registered; None is the process's own.
    Raises ImportError without prometheus-client.
    """

    GAUGES = ("density",)

    def __init__(self, registry: "CollectorRegistry | None" = None, *, by_bucket: bool = False) -> None:
        with needs("prometheus-client", "0.26"):
            import prometheus_client
        self._package = prometheus_client
        self._registry = prometheus_client.REGISTRY if registry is None else registry
        self._labels = ("scheme", "bucket") if by_bucket else ("scheme",)
        self._metrics: dict[str, Any] = {}  # Any: counters and gauges

    def record(self, reports: Iterable[Report], **more: float) -> None:
        kinds: dict[tuple[str, ...], list[Report]] = {}
        for report in reports:
            kinds.setdefault((report.scheme, report.key)[: len(self._labels)], []).append(report)
        for labels, some in kinds.items():
            for name, value in numbers(some).items():
                metric = self._metric(name, self._labels, gauge=name in self.GAUGES).labels(*labels)
                metric.set(value) if name in self.GAUGES else metric.inc(value)
        for name, value in more.items():
            self._metric(name, (), gauge=True).set(value)

    def _metric(self, name: str, labels: tuple[str, ...], gauge: bool) -> Any:
        if name not in self._metrics:
            make = self._package.Gauge if gauge else self._package.Counter
            meaning = f"sparsync: {name.replace('_', ' ')} of gradients, on this rank"
            self._metrics[name] = make(f"sparsync_{name}", meaning, labels, registry=self._registry)
        return self._metrics[name]


def _by_step(reports: Iterable[Report], by_bucket: bool, more: Mapping[str, float]) -> dict[int, dict[str, float]]:
    steps: dict[int, list[Report]] = {}
    for report in reports:
        steps.setdefault(report.step, []).append(report)
    found = {step: numbers(some) for step, some in steps.items()}
    if by_bucket:
        for step, some in steps.items():
            found[step] |= {f"{each.key}/{name}": value for each in some for name, value in numbers([each]).items()}
    if found:
        found[max(found)] |= more
    return found

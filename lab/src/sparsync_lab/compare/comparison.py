"""Run a comparison: start or join the ranks, show progress, and write records as they arrive."""

import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from sparsync_lab import environment
from sparsync_lab.compare.settings import CompareSettings
from sparsync_lab.progress import Progress
from sparsync_lab.report import results
from sparsync_lab.report.format import links_text
from sparsync_lab.workers.group import Here
from sparsync_lab.workers.hosts import Hosts
from sparsync_lab.workers.process import Message
from sparsync_lab.workloads.base import Workload

TASK = "sparsync_lab.compare.train:train_all"
_ADDRESS = r" at 0x[0-9a-f]+"  # in the default repr of an object


def compare(
    settings: CompareSettings, out: Path, command: Sequence[str], where: AbstractContextManager[Here | Hosts]
) -> bool:
    """Train with every scheme and seed in turn on the same ranks; append all records to results.jsonl in `out`.

    `where`: `here`, or `joined` in every process of a launcher. Returns True in the process that has the results.
    Raises ValueError for settings that cannot run or differ between ranks, and RuntimeError if the network cannot be built, a rank ends
    early or replicas differ. Records written until then stay; processes and networks are always cleaned up.
    """
    print("checking the schemes and reading the data", file=sys.stderr, flush=True)
    workload = settings.check()
    with where as ranks:
        ranks.agree(_identity(settings, workload, ranks.device))
        if not ranks.leads:
            ranks.run(TASK, asdict(settings), lambda message: None)
            return False
        run = _run_record(settings, workload, command, ranks.network, ranks.device)
        display = ComparisonDisplay(settings, workload.metric)
        with _recorded(run, out) as records:

            def take(message: Message) -> None:
                display.update(message)
                records.take(message)

            ranks.run(TASK, asdict(settings), take)
    return True


class ComparisonDisplay:
    """Show the progress of all trainings and a line for each evaluation, on standard error."""

    def __init__(self, settings: CompareSettings, metric: str) -> None:
        self.trainings, self.steps = len(settings.schemes) * len(settings.seeds), settings.steps
        self.metric, self.number, self.name = metric, 0, ""
        print("starting the ranks", file=sys.stderr, flush=True)
        self.bar = Progress("steps of all trainings", self.trainings * self.steps)

    def update(self, message: Message) -> None:
        """Show a message. Messages arrive in order."""
        kind, before = message["kind"], max(0, self.number - 1) * self.steps
        if kind == "scheme":
            self.number, self.name = self.number + 1, message["scheme"]
        elif kind == "alive":  # before a training, a copy of the model computes without communication
            self.bar.at(self.number * self.steps, f"{self.number + 1}/{self.trainings} computing alone")
        elif kind == "progress":
            self.bar.at(before + message["step"], f"{self.number}/{self.trainings} {self.name}")
        elif kind == "quality":
            print(
                f"[{self.number}/{self.trainings}] {self.name}  step {message['step']}/{self.steps}  {self.metric} "
                f"{message['value']:.2f}  {message['seconds']:.1f} s trained",
                file=sys.stderr,
                flush=True,
            )


@dataclass
class _Records:
    """Writes the messages of a run and remembers the current scheme."""

    run: str
    out: Path
    current: Message | None = None  # the start of the current scheme

    def take(self, message: Message) -> None:
        if message["kind"] == "scheme":
            self.current = message
        if message["kind"] == "end":
            self.current = None
        if message["kind"] in results.KINDS:
            results.append(self.out, _record(self.run, message))

    def failed(self, why: str) -> None:
        """Record that the current scheme failed."""
        current, self.current = self.current, None
        if current is not None:
            status = f"failed: {why.splitlines()[0]}"
            results.append(self.out, results.End(self.run, current["scheme"], current["seed"], None, status))


@contextmanager
def _recorded(run: results.Run, out: Path) -> Iterator[_Records]:
    """Record the run and yield a writer for its messages; an early exit from the block is recorded, too."""
    results.append(out, run)
    records = _Records(run.run, out)
    try:
        yield records
    except KeyboardInterrupt:
        records.failed("interrupted")
        raise
    except RuntimeError as error:  # of a rank
        records.failed(str(error))
        raise


def _identity(settings: CompareSettings, workload: Workload, device: str) -> Mapping[str, str]:
    """Describe the settings that must agree on all ranks. The data may lie in different places, but must have the same content."""
    plain = asdict(settings)
    plain["options"] = {key: value for key, value in settings.options.items() if key != "data"}
    described = dict(workload.describe())
    described["options"] = {key: value for key, value in described.get("options", {}).items() if key != "data"}
    return {
        **{f"the setting {key}": repr(value) for key, value in plain.items() if key != "schemes"},
        "the schemes": re.sub(_ADDRESS, "", repr([(each.label, each.described()) for each in settings.schemes])),
        "the workload": repr(described),
        **environment.identity(device),
    }


def _run_record(
    settings: CompareSettings, workload: Workload, command: Sequence[str], hosts: str, device: str
) -> results.Run:
    config = asdict(settings)
    config["rate_bits_per_s"] = settings.rate_bits_per_s
    config["links"] = links_text(*settings.rates_bits_per_s, settings.between)
    config["delay_s"], config["jitter_s"] = settings.between.one_way_s, settings.between.jitter_s
    return results.Run(
        run=f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}",
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=list(command),
        config=config,
        workload={"metric": workload.metric, "better": workload.better, "unit": workload.unit, **workload.describe()},
        versions={**environment.versions(), "kernels": environment.kernels(device)},
        machine=environment.machine(),
        limited=settings.rate_bits_per_s is not None,
        network=hosts,
    )


def _record(run: str, message: Message) -> results.Record:
    content = {key: value for key, value in message.items() if key != "kind"}
    return results.KINDS[message["kind"]](run=run, **content)

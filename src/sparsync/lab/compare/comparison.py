"""The comparison itself: starts the ranks, shows their progress, and writes every record to results.jsonl as it comes."""

import secrets
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from sparsync.lab import environment
from sparsync.lab.compare import progress
from sparsync.lab.compare.settings import Settings
from sparsync.lab.netlab import network
from sparsync.lab.progress import progress as waiting
from sparsync.lab.report import results
from sparsync.lab.workers.group import RankFailedError, worker_group
from sparsync.lab.workers.process import Message
from sparsync.lab.workloads.base import Workload

_RECORDS: dict[str, type] = {
    "scheme": results.SchemeStart,
    "step": results.Step,
    "quality": results.Quality,
    "end": results.End,
}


def compare(settings: Settings, out: Path, command: Sequence[str]) -> None:
    """Train with every scheme and seed, one after the other on the same ranks; append all records to results.jsonl in `out`.

    Raises ValueError for settings that cannot run, and RuntimeError when the network cannot be built, a rank ends early or replicas
    differ; what was recorded until then stays. No process and no network is left afterwards, whatever ends it.
    """
    with waiting("checking the schemes and reading the data", announced=True):
        workload = settings.check()
    run = _run_record(settings, workload, command)
    results.append(out, run)
    current: Message | None = None  # the start of the scheme that trains now
    trainings = len(settings.schemes) * len(settings.seeds)
    try:
        with (
            progress.shown(trainings, settings.steps, workload.metric) as display,
            network(settings.ranks, settings.rate_bits_per_s) as links,
            worker_group(
                "sparsync.lab.compare.train:train_all", asdict(settings), links, settings.timeout_s
            ) as workers,
        ):
            for message in workers.messages():
                display.update(message)
                if message["kind"] == "scheme":
                    current = message
                if message["kind"] == "end":
                    current = None
                if message["kind"] in _RECORDS:
                    results.append(out, _record(run.run, message))
    except (RankFailedError, KeyboardInterrupt) as error:
        if current is not None:
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error).splitlines()[0]
            results.append(out, results.End(run.run, current["scheme"], current["seed"], None, f"failed: {why}"))
        raise


def _run_record(settings: Settings, workload: Workload, command: Sequence[str]) -> results.Run:
    config = asdict(settings)
    config["rate_bits_per_s"] = settings.rate_bits_per_s
    return results.Run(
        run=f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}",
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        command=tuple(command),
        config=config,
        workload={"metric": workload.metric, "better": workload.better, "unit": workload.unit, **workload.describe()},
        versions=environment.versions(),
        machine=environment.machine(),
        limited=settings.rate_bits_per_s is not None,
    )


def _record(run: str, message: Message) -> results.Record:
    content = {key: value for key, value in message.items() if key != "kind"}
    return _RECORDS[message["kind"]](run=run, **content)

"""The main job: the same training with each scheme, over links as slow as asked for, written down as it happens."""

import secrets
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsync.lab import environment, progress, results
from sparsync.lab.netlab import network
from sparsync.lab.settings import Settings
from sparsync.lab.worker_group import RankFailedError, fleet
from sparsync.lab.workloads.base import Workload

_RECORDS: dict[str, type] = {
    "scheme": results.SchemeStart,
    "step": results.Step,
    "quality": results.Quality,
    "end": results.End,
}


def compare(settings: Settings, out: Path, command: Sequence[str]) -> None:
    """Trains with every scheme and seed, one after the other on the same ranks, and appends all records to results.jsonl in `out`.

    Raises ValueError for settings that cannot run and RuntimeError when the network cannot be had, a rank ends early or replicas
    differ; what was recorded until then stays. Nothing is left running or configured afterwards, whatever ends it.
    """
    workload = settings.check()
    run = _run_record(settings, workload, command)
    results.append(out, run)
    under_way: dict[str, Any] | None = None
    runs = len(settings.schemes) * len(settings.seeds)
    try:
        with (
            network(settings.ranks, settings.rate_bits_per_s) as net,
            fleet(settings, net) as ranks,
            progress.shown(runs, settings.steps, workload.metric) as display,
        ):
            for message in ranks.messages():
                display.hear(message)
                if message["kind"] == "scheme":
                    under_way = message
                if message["kind"] == "end":
                    under_way = None
                if message["kind"] in _RECORDS:
                    results.append(out, _record(run.run, message))
    except (RankFailedError, KeyboardInterrupt) as error:
        if under_way is not None:
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error).splitlines()[0]
            results.append(
                out,
                results.End(run.run, under_way["scheme"], under_way["seed"], None, f"failed: {why}"),
            )
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


def _record(run: str, message: dict[str, Any]) -> results.Record:  # Any: JSON
    content = {key: value for key, value in message.items() if key != "kind"}
    return _RECORDS[message["kind"]](run=run, **content)

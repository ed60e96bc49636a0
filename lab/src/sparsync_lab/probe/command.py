"""`sparsync probe`: start the ranks, each at its link, or join a launcher's ranks. Rank 0 prints and writes."""

from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path

from sparsync_lab import environment
from sparsync_lab.predict import probe_file
from sparsync_lab.probe.task import Request
from sparsync_lab.progress import Progress
from sparsync_lab.report.format import significant
from sparsync_lab.slow_kernels import SLOW_KERNELS, SLOW_KERNELS_FIX
from sparsync_lab.terminal import NOTHING, Table, show, wrapped
from sparsync_lab.workers.group import Here
from sparsync_lab.workers.hosts import Hosts
from sparsync_lab.workers.process import Message
from sparsync_lab.writable import check_file

TASK = "sparsync_lab.probe.task:probe"


def probe(request: Request, ranks: int, out: Path, where: AbstractContextManager[Here | Hosts]) -> None:
    """Measure the ranks, write the file and print its tables. `where`: as in `compare`.

    Raises ValueError for a request that cannot be measured, and RuntimeError if the file cannot be written, the network cannot be built
    or a rank fails.
    """
    request.check(ranks)
    check_file(out)
    content: list[str] = []
    with where as running:
        plain = {f"the setting {key}": repr(value) for key, value in asdict(request).items()}
        running.agree({**plain, **environment.identity(running.device)})
        request = replace(request, link=running.network or request.link, hosts=running.count)
        if not running.leads:
            running.run(TASK, asdict(request), lambda message: None)
            return
        display = Progress("probe, %", 100)

        def take(message: Message) -> None:
            if message["kind"] == "progress":
                display.at(round(100 * message["done"]), message["text"])
            if message["kind"] == "probe":
                content.append(message["content"])

        running.run(TASK, asdict(request), take)
    _finish(content[-1], out)


def _finish(content: str, out: Path) -> None:
    """Write the file first, so that a failure to print loses no measurement."""
    found = probe_file.parse(content)
    probe_file.write(found, out)
    _print(found)
    print(f"Written to {out}; it also has the kernels and the memory")


def _print(found: probe_file.Probe) -> None:
    group = found.group
    hosts = f"{group.hosts} host{'s' if group.hosts > 1 else ''}"
    kernels = f", kernels {group.kernels}" if group.kernels else ""
    print(
        wrapped(f"{group.ranks} ranks on {hosts}, {group.backend}, {group.link}, {group.cores} cores{kernels}") + "\n"
    )
    if group.kernels == SLOW_KERNELS:
        print(wrapped(f"!!! THE SLOW REFERENCE KERNELS RAN: DO NOT PREDICT WITH THIS PROBE. {SLOW_KERNELS_FIX}") + "\n")
    sent = tuple(
        (
            each.kind,
            str(each.nbytes),
            *(significant(1e3 * value) for value in (each.seconds, each.p20_s, each.p80_s)),
            significant(each.nbytes / each.seconds / 1e6),
        )
        for each in found.operation
    )
    if (job := found.backward) is not None:
        parts = ("forward", job.forward_s), ("backward", job.backward_s), ("optimizer", job.optimizer_s)
        times = ", ".join(f"{name} {significant(1e3 * seconds)} ms" for name, seconds in parts)
        print(wrapped(f"{job.job}: {times}") + "\n")
    tables = [Table("Each rank sends", ("operation", "bytes", "ms", "p20", "p80", "MB/s"), sent)]
    counts = sorted({bucket.elements for each in found.scheme for bucket in each.bucket})
    if counts:
        rows = []
        for each in found.scheme:
            known = {bucket.elements: significant(1e3 * bucket.seconds) for bucket in each.bucket}
            rows.append((each.scheme, *(known.get(count, NOTHING) for count in counts)))
        heads = ("scheme", *map(str, counts))
        tables.append(Table("Time (ms) of a bucket, by its elements", heads, tuple(rows)))
    show(tables)

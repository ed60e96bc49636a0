"""`sparsync probe`: the ranks are started here, each at its own link, or a launcher has started them. Rank 0 prints and writes."""

from dataclasses import asdict, replace
from pathlib import Path

from sparsync_lab import environment
from sparsync_lab.labels import short_labels
from sparsync_lab.netlab import Delay, network
from sparsync_lab.predict import probe_file
from sparsync_lab.probe.task import Request, probe
from sparsync_lab.progress import Progress, progress
from sparsync_lab.report.format import rate_text, significant
from sparsync_lab.slow_kernels import SLOW_KERNELS, SLOW_KERNELS_FIX
from sparsync_lab.terminal import NOTHING, Table, show, wrapped
from sparsync_lab.workers.group import worker_group
from sparsync_lab.workers.hosts import Backend, joined
from sparsync_lab.workers.process import Message
from sparsync_lab.writable import check_file


def probe_here(
    request: Request, ranks: int, speeds: tuple[float | None, float | None], delay: Delay, out: Path
) -> None:
    """Measure `ranks` ranks of this machine over emulated links, write the file and print its tables; `speeds`: see `netlab.rates`.

    Raises ValueError for what cannot be measured, RuntimeError where the file cannot be written, the network cannot be built or a rank
    fails.
    """
    request.check(ranks)
    check_file(out)
    up, down = speeds
    with (
        network(ranks, up, down_bits_per_s=down, delay=delay) as links,
        worker_group("sparsync_lab.probe.task:probe", asdict(request), links, request.timeout_s) as workers,
        progress("probe, %", 100) as display,
    ):
        content = [content for message in workers.messages() if (content := _taken(message, display)) is not None]
    _finish(content[-1], out)


def probe_on_hosts(request: Request, backend: Backend | None, out: Path) -> None:
    """Measure the ranks that a launcher has started; each of them calls this."""
    content: list[str] = []
    with joined(request.timeout_s, backend) as hosts:
        request.check(hosts.place.ranks)
        plain = {f"the setting {key}": repr(value) for key, value in asdict(request).items()}
        hosts.agree({**plain, **environment.identity(hosts.place.device)})
        spec = asdict(replace(request, link=hosts.network or "loopback", hosts=hosts.count))
        if hosts.place.rank:
            hosts.run(probe, spec, lambda message: None)
            return
        check_file(out)
        with progress("probe, %", 100) as display:

            def take(message: Message) -> None:
                content.extend(each for each in [_taken(message, display)] if each is not None)

            hosts.run(probe, spec, take)
    _finish(content[-1], out)


def _taken(message: Message, display: Progress) -> str | None:
    if message["kind"] == "progress":
        display.at(round(100 * message["done"]), message["text"])
    return message["content"] if message["kind"] == "probe" else None


def _finish(content: str, out: Path) -> None:
    found = probe_file.parse(content)
    probe_file.write(found, out)
    _print(found)
    print(f"Written to {out}")


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
    figures = {
        "round trip": f"{_us(found.latency.round_trip_s)}, of the slowest pair {_us(found.latency.slowest_round_trip_s)}"
    }
    if found.link is not None:
        figures["rate of a link, payload"] = rate_text(float(significant(found.link.bits_per_s)))
        figures["one way"] = f"{_us(found.link.one_way_s)}, of the slowest pair {_us(found.link.slowest_one_way_s)}"
    if found.backward is not None:
        times = (found.backward.forward_s, found.backward.backward_s, found.backward.optimizer_s)
        figures[f"{found.backward.job}: forward, backward, optimizer"] = (
            f"{', '.join(f'{significant(1e3 * each)}' for each in times)} ms"
        )
    tables = [
        Table("Each rank sends", ("operation", "bytes", "ms", "p20", "p80", "MB/s"), sent, less=("p80", "p20")),
        Table("Links and job; kernels and memory are in the file", ("", "measured"), tuple(figures.items())),
    ]
    counts = sorted({bucket.elements for each in found.scheme for bucket in each.bucket})
    if counts:
        names = short_labels([each.scheme for each in found.scheme])
        rows = []
        for each in found.scheme:
            known = {bucket.elements: significant(1e3 * bucket.seconds) for bucket in each.bucket}
            rows.append((names[each.scheme], *(known.get(count, NOTHING) for count in counts)))
        heads = ("scheme", *map(str, counts))
        tables.append(Table("Time (ms) of a bucket, by its elements", heads, tuple(rows)))
    show(tables)


def _us(seconds: float) -> str:
    return f"{significant(1e6 * seconds)} us"

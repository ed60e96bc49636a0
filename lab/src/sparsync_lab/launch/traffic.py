"""Count the bytes of each rank's interface while the ranks run, and format the final table."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from sparsync_lab.launch.settings import LaunchSettings
from sparsync_lab.netlab import Forwarded, RunNetwork, interface_counters
from sparsync_lab.netlab.topology import BATCH_FRAMES, MOST_FRAMES
from sparsync_lab.report.format import bytes_text, links_text, significant
from sparsync_lab.terminal import WIDTH, Table, lines_of, manner


@dataclass
class Traffic:
    """The traffic of one interface at the last look; seconds count from the start of the ranks."""

    sent_nbytes: int = 0
    received_nbytes: int = 0
    began_s: float | None = None  # the last look before the first byte
    seen_s: float = 0.0  # the last look
    last_s: float = 0.0  # the look that saw the last byte
    place: int = 0  # of the interface
    before: tuple[int, int] = (0, 0)  # sent and received by earlier ranks there
    ended: bool = False  # then the interface may belong to another rank

    def look(self, sent: int, received: int, now_s: float) -> None:
        sent, received = sent - self.before[0], received - self.before[1]
        if (sent, received) != (self.sent_nbytes, self.received_nbytes):
            self.began_s = self.seen_s if self.began_s is None else self.began_s
            self.last_s = now_s
        self.sent_nbytes, self.received_nbytes, self.seen_s = sent, received, now_s

    @property
    def seconds(self) -> float:
        """Time from the first byte to the last, to the precision of the looks."""
        return 0.0 if self.began_s is None else self.last_s - self.began_s


@dataclass
class Meter:
    """The interfaces of all ranks. Nothing is counted over loopback, which carries the traffic of all programs."""

    settings: LaunchSettings
    links: RunNetwork
    ranks: list[Traffic] = field(default_factory=list)
    carried: Forwarded | None = None  # by the delaying program, once all ranks have ended

    def __post_init__(self) -> None:
        if not self.settings.faults:
            self.ranks = [Traffic(place=place) for place, _ in enumerate(self.links.anchors)]

    def join(self, place: int, now_s: float) -> None:
        """Count the traffic of one more rank, the only one at `place`, from now on."""
        if self.links.anchors:
            counted = interface_counters(self.links.interface, self.links.anchors[place])
            before = (counted.sent_bytes, counted.received_bytes)
            self.ranks.append(Traffic(seen_s=now_s, place=place, before=before))

    def look(self, now_s: float, ended: Collection[int] = ()) -> None:
        """Read the counters; those of `ended` ranks, which may have a successor, for the last time."""
        for rank, traffic in enumerate(self.ranks):
            if not traffic.ended:
                counted = interface_counters(self.links.interface, self.links.anchors[traffic.place])
                traffic.look(counted.sent_bytes, counted.received_bytes, now_s)
                traffic.ended = rank in ended

    def table(self, now_s: float, endings: Sequence[str], readers: Sequence[int], width: int = WIDTH) -> str:
        """Format the summary; `endings`: how each rank ended, `readers`: the ranks that read the scheme."""
        links = links_text(self.settings.up_bits_per_s, self.settings.down_bits_per_s, self.settings.delay)
        scheme = _scheme(self.settings, readers, len(endings))
        about = [
            f"{self.settings.ranks} ranks",
            links or "loopback, without limits",
            *scheme,
            f"{significant(now_s)} s",
        ]
        head = ", ".join(about)
        if not self.ranks:
            lines = [f"rank {rank}: {ending}" for rank, ending in enumerate(endings)]
            return "\n".join(
                [head, *lines, "no link was limited: times prove nothing about a network, and bytes were not counted"]
            )
        up, down = self.settings.up_bits_per_s, self.settings.down_bits_per_s
        heads = ("rank", "ended", "sent", "Mbit/s", "link", "received", "Mbit/s", "link", "seconds")
        rows = tuple(
            (
                *(str(rank), ending, bytes_text(it.sent_nbytes), *_rate_cells(it.sent_nbytes, it.seconds, up)),
                *(bytes_text(it.received_nbytes), *_rate_cells(it.received_nbytes, it.seconds, down)),
                significant(it.seconds),
            )
            for rank, (it, ending) in enumerate(zip(self.ranks, endings, strict=True))
        )
        drawn = lines_of([Table("", heads, rows)], width=width, ascii_only=manner()[2])
        framing = (
            "every frame with its headers"
            if self.settings.exact_framing
            else f"up to {MOST_FRAMES if self.settings.delay else BATCH_FRAMES} frames as one packet, with one header"
        )
        notes = [
            f"bytes of each rank's interface, {framing}",
            "rates from its first byte to its last, and their share of the link's",
        ]
        if self.carried is not None:
            notes.append(
                f"the program that delays packets carried {bytes_text(self.carried.nbytes)} and took "
                f"{significant(self.carried.processor_s)} s of processor time for it"
            )
        return "\n".join([head, drawn, *notes])


def _scheme(settings: LaunchSettings, readers: Sequence[int], ranks: int) -> list[str]:
    """Name the scheme, and the ranks that read it unless all did; [] without a scheme."""
    if settings.scheme is None:
        return []
    some = f" on {'rank' if len(readers) == 1 else 'ranks'} {', '.join(map(str, readers))} only"
    where = "" if len(readers) == ranks else some if readers else " on no rank"
    return [f"scheme {settings.scheme}{where}"]


def _rate_cells(nbytes: int, seconds: float, limit: float | None) -> list[str]:
    """Format the rate in Mbit/s and its share of the link's rate."""
    rate = 8 * nbytes / seconds if seconds else 0.0
    share = "-" if limit is None or math.isinf(limit) or not seconds else f"{rate / limit:.0%}"
    return [significant(rate / 1e6) if seconds else "-", share]

"""Count the bytes of each rank's interface, and format the final table."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from sparsync_lab.launch.settings import LaunchSettings
from sparsync_lab.netlab import Counters, RunNetwork, interface_counters
from sparsync_lab.netlab.topology import BATCH_FRAMES, MOST_FRAMES
from sparsync_lab.report.format import bytes_text, links_text, significant
from sparsync_lab.terminal import WIDTH, Table, lines_of

_NOTHING = Counters(0, 0, 0, 0)


@dataclass
class Traffic:
    """The interface of one rank."""

    place: int
    before: Counters = _NOTHING  # of earlier ranks there
    last: Counters = _NOTHING
    ended: bool = False  # then the interface may belong to another rank


@dataclass
class Meter:
    """The interfaces of all ranks. Nothing is counted over loopback, which carries the traffic of all programs."""

    settings: LaunchSettings
    links: RunNetwork
    ranks: list[Traffic] = field(default_factory=list)

    def join(self, place: int) -> None:
        """Count the traffic of one more rank, the only one at `place`, from now on."""
        if self.links.anchors:
            self.ranks.append(Traffic(place, self._counters(place)))

    def look(self, ended: Collection[int] = ()) -> None:
        """Read the counters; those of `ended` ranks, which may have a successor, for the last time."""
        for rank, traffic in enumerate(self.ranks):
            if not traffic.ended:
                traffic.last, traffic.ended = self._counters(traffic.place), rank in ended

    def _counters(self, place: int) -> Counters:
        return interface_counters(self.links.interface, self.links.anchors[place])

    def table(self, seconds: float, endings: Sequence[str], readers: Sequence[int], width: int = WIDTH) -> str:
        """Format the summary; `endings`: how each rank ended, `readers`: the ranks that read the scheme."""
        links = links_text(self.settings.up_bits_per_s, self.settings.down_bits_per_s, self.settings.delay)
        scheme = _scheme(self.settings, readers, len(endings))
        head = ", ".join(
            [f"{self.settings.ranks} ranks", links or "loopback, without limits", *scheme, f"{significant(seconds)} s"]
        )
        if not self.ranks:
            lines = [f"rank {rank}: {ending}" for rank, ending in enumerate(endings)]
            return "\n".join(
                [head, *lines, "no link was limited: times prove nothing about a network, and bytes were not counted"]
            )
        counted = [each.last - each.before for each in self.ranks]
        rows = tuple(
            (str(rank), ending, bytes_text(each.sent_bytes), bytes_text(each.received_bytes))
            for rank, (each, ending) in enumerate(zip(counted, endings, strict=True))
        )
        drawn = lines_of([Table("", ("rank", "ended", "sent", "received"), rows)], width=width, colour=False)
        framing = (
            "every frame with its headers"
            if self.settings.exact_framing
            else f"up to {MOST_FRAMES if self.settings.delay else BATCH_FRAMES} frames as one packet, with one header"
        )
        return "\n".join([head, drawn, f"bytes of each rank's interface, {framing}"])


def _scheme(settings: LaunchSettings, readers: Sequence[int], ranks: int) -> list[str]:
    """Name the scheme, and the ranks that read it unless all did; [] without a scheme."""
    if settings.scheme is None:
        return []
    some = f" on {'rank' if len(readers) == 1 else 'ranks'} {', '.join(map(str, readers))} only"
    where = "" if len(readers) == ranks else some if readers else " on no rank"
    return [f"scheme {settings.scheme}{where}"]

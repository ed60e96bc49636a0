"""A measured network: interpolates the seconds of an exchange in the tables of a probe."""

from dataclasses import dataclass
from itertools import pairwise

from sparsync_lab.predict.exchanges import Exchange
from sparsync_lab.predict.probe_file import Operation, Probe, never_slower, sizes

FAR = 32  # times the largest measured exchange of a kind; a prediction beyond is a guess


@dataclass(frozen=True)
class ProbedNetwork:
    """The group of `probe`, for the measured number of ranks.

    The time of an exchange is interpolated among the measured ones of its kind: linearly between two sizes, constant below the smallest,
    at the rate of the two largest above them, and never longer than for more bytes. The greater of a rank's sent and received bytes counts.
    More rounds than the measured operation has take the time of several operations, each with its share of the bytes.
    Peers other than the measured ones (send_recv: the next in a ring) are assumed to be as fast.
    """

    probe: Probe

    def seconds(self, exchange: Exchange, P: int) -> float:
        """Predict the time of this exchange; 0 for P = 1.

        Raises ValueError for a number of ranks that was not measured, and for a kind that the probe lacks.
        """
        if P == 1:
            return 0.0
        known, times, nbytes = self._looked_up(exchange, P)
        return times * _interpolated(known, nbytes)

    def is_far(self, exchange: Exchange, P: int) -> bool:
        """Tell whether this exchange is far larger than the measured ones of its kind. Raises ValueError as `seconds`."""
        known, _, nbytes = self._looked_up(exchange, P)
        return nbytes > FAR * known[-1].nbytes

    def _looked_up(self, exchange: Exchange, P: int) -> tuple[list[Operation], float, float]:
        """Look up the measured operations of the exchange's kind, smallest first, the number of them it takes, and the bytes of each."""
        measured = self.probe.group.ranks
        if measured != P:
            raise ValueError(
                f"the probe has {measured} ranks and does not predict {P}; run `sparsync probe` with {P} ranks"
            )
        known = never_slower(sizes(self.probe.operation, exchange.kind))
        if not known:
            raise ValueError(f"the probe has no [[operation]] of kind {exchange.kind!r}; run `sparsync probe` again")
        inside = 2 * (P - 1) if exchange.kind == "all_reduce" else 1  # rounds of the measured operation
        times = max(1.0, exchange.rounds / inside)
        return known, times, max(exchange.nbytes, exchange.received) / times


def _interpolated(known: list[Operation], nbytes: int | float) -> float:
    """Interpolate the seconds of `nbytes`; `known` has at least one size, in ascending order."""
    if nbytes <= known[0].nbytes or len(known) == 1:
        return known[0].seconds
    low, high = next(((a, b) for a, b in pairwise(known) if nbytes <= b.nbytes), (known[-2], known[-1]))
    if nbytes == high.nbytes:
        return high.seconds
    slope = (high.seconds - low.seconds) / (high.nbytes - low.nbytes)
    return (
        low.seconds + slope * (nbytes - low.nbytes)
        if nbytes < high.nbytes
        else high.seconds + slope * (nbytes - high.nbytes)
    )

"""A network that was measured: the seconds of an exchange by interpolation in the tables of a probe."""

from dataclasses import dataclass
from itertools import pairwise

from sparsync_lab.predict.exchanges import Exchange
from sparsync_lab.predict.probe_file import Operation, Probe, never_slower, sizes


@dataclass(frozen=True)
class ProbedNetwork:
    """The group of `probe`, for as many ranks as were measured.

    An exchange takes what was measured of its kind: linear between two sizes, as long as the smallest one below it, at the rate of the two
    largest ones above them, and never longer than one of more bytes. The greater of what a rank sends and receives counts. Rounds that wait
    for each other, beyond those of the measured operation, take the time of as many operations, each with its part of the bytes. Other
    peers than those of the measurement (send_recv: the next in a ring) are taken to be as fast.
    """

    probe: Probe

    def seconds(self, exchange: Exchange, P: int) -> float:
        """Return how long this exchange takes; 0 for P = 1.

        Raises ValueError for another number of ranks than was measured, and for a kind that the probe lacks.
        """
        if P == 1:
            return 0.0
        known, times, nbytes = self._looked_up(exchange, P)
        return times * _interpolated(known, nbytes)

    def reach(self, exchange: Exchange, P: int) -> tuple[float, int]:
        """Return the bytes at which the table is read for this exchange, and those at which it ends. Raises ValueError as `seconds`."""
        known, _, nbytes = self._looked_up(exchange, P)
        return nbytes, known[-1].nbytes

    def _looked_up(self, exchange: Exchange, P: int) -> tuple[list[Operation], float, float]:
        """Return the measured operations of its kind, the smallest first, how many of them it takes, and the bytes of each."""
        measured = self.probe.group.ranks
        if measured != P:
            raise ValueError(
                f"the probe was made with {measured} ranks and says nothing of {P}: what small exchanges take grows with their number; "
                f"run `sparsync probe` with {P} ranks, or describe the network with links"
            )
        known = never_slower(sizes(self.probe.operation, exchange.kind))
        if not known:
            raise ValueError(f"the probe has no [[operation]] of kind {exchange.kind!r}; run `sparsync probe` again")
        inside = 2 * (P - 1) if exchange.kind == "all_reduce" else 1  # rounds of the measured operation
        times = max(1.0, exchange.rounds / inside)
        return known, times, max(exchange.nbytes, exchange.received) / times


def _interpolated(known: list[Operation], nbytes: int | float) -> float:
    """Return the seconds of `nbytes`; `known` has at least one size, in ascending order."""
    if nbytes <= known[0].nbytes or len(known) == 1:
        return known[0].seconds
    low, high = next(((a, b) for a, b in pairwise(known) if nbytes <= b.nbytes), (known[-2], known[-1]))
    if nbytes == high.nbytes:
        return high.seconds
    slope = (high.seconds - low.seconds) / (high.nbytes - low.nbytes)
    if nbytes > high.nbytes:  # a largest size that happened to be quicker than the one before must not lead below 0
        slope = max(slope, 0.0)
        return high.seconds + slope * (nbytes - high.nbytes)
    return low.seconds + slope * (nbytes - low.nbytes)

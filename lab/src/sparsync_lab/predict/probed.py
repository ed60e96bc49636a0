"""A network that was measured: the seconds of an exchange by interpolation in the tables of a probe."""

from dataclasses import dataclass
from itertools import pairwise

from sparsync_lab.predict.exchanges import Exchange
from sparsync_lab.predict.probe_file import Operation, Probe, never_slower, sizes

FAR = 32  # times the largest measured exchange of a kind, beyond which a prediction is a guess


@dataclass(frozen=True)
class ProbedNetwork:
    """The group of `probe`, for as many ranks as were measured.

    The time of an exchange is interpolated among the measured ones of its kind: linear between two sizes, that of the smallest below it,
    at the rate of the two largest above them, and never longer than the time of more bytes. The greater of the bytes that a rank sends and
    receives counts. Rounds beyond those of the measured operation take the time of as many operations, each with its share of the bytes.
    Other peers than those of the measurement (send_recv: the next in a ring) are assumed to be as fast.
    """

    probe: Probe

    def seconds(self, exchange: Exchange, P: int) -> float:
        """Return the time of this exchange; 0 for P = 1.

        Raises ValueError for another number of ranks than was measured, and for a kind that the probe lacks.
        """
        if P == 1:
            return 0.0
        known, times, nbytes = self._looked_up(exchange, P)
        return times * _interpolated(known, nbytes)

    def is_far(self, exchange: Exchange, P: int) -> bool:
        """Return whether this exchange is far beyond the measured ones of its kind. Raises ValueError as `seconds`."""
        known, _, nbytes = self._looked_up(exchange, P)
        return nbytes > FAR * known[-1].nbytes

    def _looked_up(self, exchange: Exchange, P: int) -> tuple[list[Operation], float, float]:
        """Return the measured operations of its kind, the smallest first, how many of them it takes, and the bytes of each."""
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
    """Return the seconds of `nbytes`; `known` has at least one size, in ascending order."""
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

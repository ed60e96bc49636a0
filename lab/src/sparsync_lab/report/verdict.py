"""The choice that a run speaks for: one of its schemes, or the plain all-reduce, by a rule over the run's own numbers.

The plain all-reduce is the faster of bf16 and dense; bf16 must be near dense's quality for that. A scheme counts if it finished with every
seed, and with a target if it reached it with every seed. It beats the plain all-reduce if it is faster with every seed by more than the
noise: the difference between computing steps of the run, which all compute the same, and 3 % at least. With a target the choice is the
scheme that reaches it soonest; without, the one with the shortest step of those near dense's quality.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sparsync_lab.report.summary import MATTERS, Ratio, RunSummary, SchemeFigures, spread

WITHIN = 2.0  # percent behind dense's quality that count as near
_FARTHEST = 100.0  # times the rate of a run's links, up to which a rate is extrapolated from them


@dataclass(frozen=True)
class Verdict:
    """What to choose, and what it is compared with."""

    by_target: bool  # compared by the time to the target; False: by the time of a step
    plain: SchemeFigures | None  # the plain all-reduce, bf16 or dense; None where neither finished
    chosen: SchemeFigures | None  # None: nothing beats the plain all-reduce
    near: SchemeFigures | None  # the choice of those near dense's quality, the same one or another; None: there is none
    fastest: SchemeFigures | None  # of all that count but the plain ones, whatever its quality
    enough_from: (
        float | None
    )  # bits/s of links from which on the plain all-reduce takes no longer than `chosen`; None: unknown


def verdict(summary: RunSummary, within: float = WITHIN) -> Verdict:
    """Return the choice for the run; `within`: percent behind dense's quality that count as near."""
    finished = [scheme for scheme in summary.schemes if _finished(scheme)]
    everywhere = [scheme for scheme in finished if scheme.reached == len(scheme.seeds)]
    by_target = bool(everywhere)
    plain = _plain(finished, by_target, within)
    counting = [scheme for scheme in (everywhere if by_target else finished) if scheme.label not in ("dense", "bf16")]
    faster = [scheme for scheme in counting if plain is None or _beats(summary, scheme, plain, by_target)]
    near = _soonest([scheme for scheme in faster if is_near(scheme, within)], by_target)
    chosen = _soonest(faster, by_target) if by_target else near
    rate = _enough_from(summary, chosen, plain, by_target) if chosen and plain else None
    return Verdict(by_target, plain, chosen, near, _soonest(counting, by_target), rate)


def is_near(scheme: SchemeFigures, within: float) -> bool:
    """Return whether its quality is at most `within` percent behind dense's; False where that is unknown."""
    gap = scheme.behind_dense
    return scheme.label == "dense" or (gap is not None and gap.median <= within)


def speed_baseline(summary: RunSummary) -> str:
    """Return the label that all speed-ups of a report are over: the plain all-reduce of the choice, or else bf16 where it has run."""
    plain = verdict(summary).plain
    return plain.label if plain else "bf16" if summary.scheme("bf16") else "dense"


def seconds_of(scheme: SchemeFigures, by_target: bool) -> float | None:
    """Return the seconds to the target, or those of a step."""
    found = scheme.target_s if by_target else scheme.over_seeds("step_s")
    return None if found is None else found.median


def ratio_of(scheme: SchemeFigures, plain: SchemeFigures, by_target: bool) -> Ratio | None:
    """Return how many times as fast as the plain all-reduce, seed by seed; None where it is unknown."""
    if by_target:
        return scheme.speedup[plain.label]
    beside = {seed.seed: seed.step_s for seed in plain.seeds}
    pairs = [(beside.get(seed.seed), seed.step_s) for seed in scheme.seeds]
    found = spread(other / own for other, own in pairs if other is not None and own)
    return None if found is None else Ratio(found)


def _finished(scheme: SchemeFigures) -> bool:
    """Return whether it trained to its end with every seed, with exchanges, and with the same weights on all ranks."""
    return all(
        seed.finished and seed.steps and seed.replicas_identical is not False and not seed.exchanged_nothing
        for seed in scheme.seeds
    )


def _plain(finished: Sequence[SchemeFigures], by_target: bool, within: float) -> SchemeFigures | None:
    """Return the sooner of bf16 and dense, of those that are there."""
    known = {scheme.label: scheme for scheme in finished}
    dense = known.get("dense")
    bf16 = known.get("bf16")
    if bf16 is not None and dense is not None and not is_near(bf16, within):
        return dense
    return _soonest([each for each in (bf16, dense) if each is not None], by_target) or bf16 or dense


def _soonest(schemes: Sequence[SchemeFigures], by_target: bool) -> SchemeFigures | None:
    timed = [(seconds, scheme) for scheme in schemes if (seconds := seconds_of(scheme, by_target)) is not None]
    return min(timed, key=lambda pair: pair[0])[1] if timed else None


def _beats(summary: RunSummary, scheme: SchemeFigures, plain: SchemeFigures, by_target: bool) -> bool:
    ratio, step = ratio_of(scheme, plain, by_target), plain.over_seeds("step_s")
    if ratio is None or ratio.bound == "<" or step is None or not step.median:
        return False
    return ratio.spread.low > 1 + max(MATTERS, summary.noise_s / step.median)


def _enough_from(summary: RunSummary, chosen: SchemeFigures, plain: SchemeFigures, by_target: bool) -> float | None:
    """Return the rate at which both would take as long, if only the time that the link needs for their bytes changed with it.

    With N steps to the target (1 without one), a step of s seconds that sends B bits at the run's rate R takes N (s - B/R) + N B/r at a
    rate r; both are equal at r = (Np Bp - Nc Bc) / (Nc (sc - Bc/R) - Np (sp - Bp/R)).
    """
    rate = summary.run.rate_bits_per_s
    found = [_terms(scheme, by_target, rate) for scheme in (plain, chosen)] if summary.run.limited and rate else []
    if rate is None or not found or None in found:
        return None
    (plain_bits, plain_rest), (chosen_bits, chosen_rest) = (each for each in found if each is not None)
    if chosen_rest <= plain_rest or plain_bits <= chosen_bits:
        return None
    equal = (plain_bits - chosen_bits) / (chosen_rest - plain_rest)
    return equal if rate < equal <= _FARTHEST * rate else None


def _terms(scheme: SchemeFigures, by_target: bool, rate: float) -> tuple[float, float] | None:
    """Return the bits to the target, or of a step, and the seconds that the link does not need for them."""
    step = scheme.over_seeds("step_s")
    sent = scheme.over_seeds("interface_bytes") or scheme.over_seeds("sent_bytes")
    seconds = seconds_of(scheme, by_target)
    if step is None or sent is None or seconds is None or not step.median:
        return None
    bits = 8 * sent.median * (seconds / step.median)
    return bits, seconds - bits / rate


def fewest_bits(summary: RunSummary, within: float = WITHIN) -> SchemeFigures | None:
    """Return the scheme that sends the fewest bits of those that finished near dense's quality."""
    near = [scheme for scheme in summary.schemes if _finished(scheme) and is_near(scheme, within)]
    return min(near, key=lambda scheme: median(seed.bits or 0.0 for seed in scheme.seeds), default=None)

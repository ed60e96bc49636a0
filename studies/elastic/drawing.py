"""Draw trials from a seed: several events at random moments of one run. Nothing runs here."""

import random
from collections.abc import Collection
from dataclasses import dataclass

KINDS = {
    "kill": "SIGKILL of a rank",
    "kill_first": "SIGKILL of rank 0",
    "pause": "SIGSTOP of a rank for less than the timeout",
    "freeze": "SIGSTOP of a rank for longer than the timeout",
    "leave": "SIGTERM of a rank, which leaves",
    "join": "a new rank joins",
    "partition": "the links of one or two ranks are down for longer than the timeout",
    "store": "SIGKILL of the store, which is started again up to 3 s later",
    "store_first": "SIGKILL of the store and of rank 0",
}
_WEIGHTS = {"join": 4.0, "kill": 2.0, "freeze": 2.0, "leave": 2.0, "store_first": 0.7}
EXCHANGES = {
    "steps": "steps, bare module",
    "steps_ddp": "steps, DistributedDataParallel",
    "gradients": "gradients, bare module",
    "gradients_ddp": "gradients, DistributedDataParallel",
    "local": "local steps, bare module",
    "local_ddp": "local steps, DistributedDataParallel",
}
SCHEMES = ("two_shot", "topk", "exact_micro", "dense")
FIRST_S = 1.0  # of undisturbed steps
MOST_LONGER_S = 4.0  # beyond the timeout


@dataclass(frozen=True)
class Event:
    """One event; its ranks depend on which are present."""

    kind: str
    after_s: float  # after the previous event
    lasts_s: float  # until a rank, a link or the store is back; 0: nothing comes back
    share: float  # in [0, 1): selects one of the present ranks
    two: bool = False  # two ranks are cut off together


@dataclass(frozen=True)
class Trial:
    seed: int
    number: int
    ranks: int
    exchange: str
    scheme: str
    events: tuple[Event, ...]
    finish_s: float  # from the last event until rank 0 names a last step

    @property
    def label(self) -> str:
        return f"trial {self.number}, {self.ranks} ranks, {self.exchange}, {self.scheme}"


def drawn(seed: int, number: int, timeout_s: float, only: Collection[str] = ()) -> Trial:
    """Draw a trial with events of the kinds in `only`, or of all. Raises ValueError for an unknown kind."""
    if unknown := [each for each in only if each not in KINDS]:
        raise ValueError(f"--only takes {', '.join(KINDS)}, got {unknown[0]!r}")
    chance = random.Random(f"{seed}/{number}")
    kinds = [each for each in KINDS if not only or each in only]
    weights = [_WEIGHTS.get(each, 1.0) for each in kinds]
    events = tuple(
        _event(chance, kind, timeout_s, first=place == 0)
        for place, kind in enumerate(chance.choices(kinds, weights, k=chance.randint(5, 8)))
    )
    exchange = list(EXCHANGES)[number % len(EXCHANGES)]
    return Trial(
        seed, number, chance.randint(3, 6), exchange, chance.choice(SCHEMES), events, round(chance.uniform(1.0, 7.0), 2)
    )


def _event(chance: random.Random, kind: str, timeout_s: float, first: bool) -> Event:
    after_s = FIRST_S if first else chance.choice([0.0, chance.uniform(0.0, 1.0), chance.uniform(1.0, 5.0)])
    lasts = {
        "pause": (0.2 * timeout_s, 0.7 * timeout_s),
        "freeze": (1.2 * timeout_s, timeout_s + MOST_LONGER_S),
        "partition": (1.2 * timeout_s, timeout_s + MOST_LONGER_S),
        "store": (0.0, 3.0),
        "store_first": (0.0, 3.0),
    }
    lasts_s = chance.uniform(*lasts.get(kind, (0.0, 0.0)))
    return Event(
        kind, round(after_s, 2), round(lasts_s, 2), chance.random(), kind == "partition" and chance.random() < 0.4
    )

"""Draw trials from a seed: one fault at one moment of one training. Nothing runs here."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sparsync.base.registry import nearest

# Settings by scheme, and those of a differing rank.
SCHEMES = {
    "dense": ({}, {"form": "ring"}),
    "topk": ({"density": 0.05}, {"density": 0.1}),
    "two_shot": ({"density": 0.05}, {"density": 0.1}),
    "in_turn": ({"every": 4}, {"every": 2}),
    "exact_micro": ({"density": 0.05}, {"density": 0.1}),
    "exact_exdyna": ({"density": 0.05}, {"density": 0.1}),
    "exact_oktopk": ({"density": 0.05}, {"density": 0.1}),
    "skip_reduce": ({"skip": 1}, {"skip": 0}),
}

SHARD_SCHEMES = ("dense", "two_shot", "exact_oktopk", "skip_reduce")  # with a reduce-scatter
NONE = "none"  # for trials without a scheme

TRAININGS = {
    "ddp": "attach, DistributedDataParallel",
    "reducer": "GradientReducer",
    "local_steps": "LocalSteps",
    "local_steps_delayed": "LocalSteps, delay=1",
    "steps": "attach, steps, bare module",
    "steps_ddp": "attach, steps, DistributedDataParallel",
    "steps_fsdp": "attach, steps, FSDP2, replicate axis",
    "fsdp_replicate": "attach, FSDP2, replicate axis",
    "fsdp_shard": "attach, FSDP2, shard axis",
}
INTEGRATIONS = {**TRAININGS, "collectives": "GroupComm, no integration"}

PHASES = ("accumulate", "select", "encode", "decode", "apply")
# Phases that a scheme lacks.
_LACKING = {
    "dense": PHASES,
    "skip_reduce": PHASES,
    "topk": ("accumulate",),
    "two_shot": ("accumulate",),
    "exact_oktopk": ("accumulate",),
    "exact_micro": ("accumulate",),
    "exact_exdyna": ("accumulate",),
}
# Within a step: in a phase of the scheme, before a message, or after the step's last bucket.
WITHIN = (*PHASES, "message", "late")
# "start": before the first step; "before": before a later one; "random": at a time, whatever the rank is doing.
ANYTIME = ("start", "before", *WITHIN, "random")
SETUP = "setup"

FAULTS = {
    "kill": "SIGKILL of a rank",
    "freeze": "SIGSTOP of a rank",
    "partition": "the link of a rank goes down, without a reset",
    "leave": "a rank ends normally, too early",
    "delay": "a rank sleeps for less than the timeout",
    "raise": "an exception in a phase",
    "raise_at_message": "an exception at a message",
    "raise_late": "MemoryError after the last exchange of a step",
    "nan": "NaN or Inf on one rank",
    "other_step": "one rank counts other steps",
    "other_state": "a state loaded on rank 0 only",
    "other_sizes": "one rank has parameters of other sizes",
    "other_order": "one rank has its parameters in another order",
    "other_dtype": "one rank has parameters of another type",
    "other_settings": "one rank has other settings of the scheme",
    "other_groups": "one rank has its optimizer's parameter groups swapped",
    "other_rate": "one rank's learning rate is another one, from a step on",
    "frozen": "a layer is frozen, on one rank or on all",
    "loaded_late": "other weights are loaded, on one rank or on all",
    "forked_gc": "a forked child collects the handle",
    "retry_after_error": "after an exception all ranks load a checkpoint",
}
GONE = ("kill", "freeze", "partition", "leave")
RAISED = ("raise", "raise_at_message", "raise_late")
MADE_OTHERWISE = ("other_sizes", "other_order", "other_dtype", "other_settings", "other_groups")
CHANGED = ("other_rate", "frozen", "loaded_late")  # during training, on one rank or all
ONE, ALL = "one", "all"  # ranks that change
DIFFERENT = ("other_step", "other_state", *MADE_OTHERWISE, *CHANGED)
AT_A_STEP = ("nan", "other_step", "other_state", "forked_gc", *CHANGED)
SAME_BITS = ("delay", "forked_gc", "retry_after_error")  # the result must not change
OF_COLLECTIVES = ("kill", "freeze", "partition", "leave", "delay", "raise_at_message")

_WHEN = {
    "kill": ANYTIME,
    "freeze": ANYTIME,
    "partition": ANYTIME,
    "leave": ("start", "before"),
    "delay": ("start", "before", *WITHIN),
    "raise": PHASES,
    "raise_at_message": ("message",),
    "raise_late": ("late",),
    "retry_after_error": ("message", "late"),
}
_DETAILS = {"nan": ("nan", "inf"), "other_rate": (ONE,), "frozen": (ONE, ALL), "loaded_late": (ONE, ALL)}
_MESSAGES = 8
_RANDOM_S = 0.4
STEPS, MANY_STEPS = 10, 300  # many if the fault comes at a random time


@dataclass(frozen=True)
class Trial:
    """One fault in one training, fully described, so that it can be repeated as far as processes allow."""

    fault: str
    integration: str
    scheme: str
    ranks: int
    victim: int  # the rank that the fault strikes
    when: str
    step: int  # the first step in which it may strike
    message: int  # counted from that step, if `when` is "message"
    after_s: float  # if `when` is "random"
    detail: str = ""  # "nan" or "inf"; or whether ONE rank or ALL change
    seed: int = 0  # of weights and data

    @property
    def steps(self) -> int:
        return MANY_STEPS if self.when == "random" else STEPS

    @property
    def survivable(self) -> bool:
        """Whether the training continues on all ranks."""
        return self.fault in ("nan", *SAME_BITS) or self.detail == ALL

    @property
    def label(self) -> str:
        when = {
            "start": "before the first step",
            "before": f"before step {self.step}",
            "message": f"message {self.message} from step {self.step}",
            "random": f"after {self.after_s:.2f} s",
            SETUP: f"step {self.step}" if self.fault in AT_A_STEP else "",
        }.get(self.when, f"{self.when} from step {self.step}")
        scheme = "" if self.scheme == NONE else self.scheme
        where = "all ranks" if self.detail == ALL else f"rank {self.victim} of {self.ranks}"
        parts = [self.fault, where, self.integration, scheme, when]
        return ", ".join(part for part in parts if part)


def phases_of(scheme: str) -> tuple[str, ...]:
    """List the phases of a scheme of SCHEMES."""
    return tuple(phase for phase in PHASES if phase not in _LACKING.get(scheme, ()))


def cells(only: Collection[str] = ()) -> list[tuple[str, str, str]]:
    """List every fault with every integration and scheme that it can strike.

    `only`: names of faults, integrations and schemes that restrict their kind. Raises ValueError for others.
    """
    known = [*FAULTS, *INTEGRATIONS, *SCHEMES]
    for name in only:
        if name not in known:
            raise ValueError(f"--only takes faults, integrations and schemes, got {name!r}{nearest(name, known)}")
    wanted = [{each for each in only if each in kind} or {*kind} for kind in (FAULTS, INTEGRATIONS, SCHEMES)]
    return [
        (fault, integration, scheme)
        for fault in FAULTS
        for integration in _integrations(fault)
        for scheme in _schemes(integration)
        if (fault != "raise" or phases_of(scheme))
        and fault in wanted[0]
        and integration in wanted[1]
        and scheme in wanted[2] | {NONE}
    ]


def drawn(seed: int, count: int, only: Collection[str] = ()) -> list[Trial]:
    """Draw `count` trials; a larger count only appends.

    Every pair of a fault and an integration comes once before any repeats; schemes, moments and ranks are drawn.
    """
    schemes: dict[tuple[str, str], list[str]] = {}
    for fault, integration, scheme in cells(only):
        schemes.setdefault((fault, integration), []).append(scheme)
    trials: list[Trial] = []
    while schemes and len(trials) < count:
        pairs = list(schemes)
        random.Random(f"{seed}/round {len(trials) // len(pairs)}").shuffle(pairs)
        trials += [_trial(seed, len(trials) + i, *pair, schemes[pair]) for i, pair in enumerate(pairs)]
    return trials[:count]


def _trial(seed: int, number: int, fault: str, integration: str, schemes: Sequence[str]) -> Trial:
    draw = random.Random(f"{seed}/{number}")
    ranks = draw.choice((2, 3))
    victim = 0 if fault == "other_state" else draw.randrange(ranks)
    scheme = draw.choice(schemes)
    possible = [SETUP, "start", "before", "message", "random"]
    if integration != "collectives":
        possible += phases_of(scheme)
        # After the last bucket, a sharded model's next exchange is FSDP2's own, whose failure no checkpoint mends.
        if (fault, integration) != ("retry_after_error", "fsdp_shard"):
            possible.append("late")
    when = draw.choice([each for each in _WHEN.get(fault, (SETUP,)) if each in possible])
    return Trial(
        fault=fault,
        integration=integration,
        scheme=scheme,
        ranks=ranks,
        victim=victim,
        when=when,
        step=0 if when == "start" else draw.randint(3, 4),
        message=draw.randrange(_MESSAGES),
        after_s=round(draw.uniform(0, _RANDOM_S), 3),
        detail=draw.choice(_details(fault, integration)),
        seed=seed,
    )


def _details(fault: str, integration: str) -> tuple[str, ...]:
    if (fault, integration) == ("loaded_late", "fsdp_shard"):  # the ranks' weights differ
        return (ALL,)
    return _DETAILS.get(fault, ("",))


def _integrations(fault: str) -> tuple[str, ...]:
    return (*TRAININGS, *(["collectives"] if fault in OF_COLLECTIVES else []))


def _schemes(integration: str) -> tuple[str, ...]:
    if integration == "collectives":
        return (NONE,)
    return SHARD_SCHEMES if integration == "fsdp_shard" else tuple(SCHEMES)

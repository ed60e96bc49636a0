"""Bias and regularisation by SkipReduce, on a small SGD job: tell from 40 words which of 8 plays they are from."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sparsync.core import generator
from sparsync_lab.scheme_choice import parse_schemes
from sparsync_lab.workloads import one_process
from sparsync_lab.workloads.base import (
    Batch,
    Better,
    Workload,
    evaluating,
    exactly_addable,
    rise_and_cosine,
    seeded,
    share,
)
from sparsync_lab.workloads.shakespeare_text import package, package_works
from studies import parts
from studies.papers import Claim, best_rate, kept

TITLES = ["alls_well_that_ends_well", "coriolanus", "hamlet", "henry_v", "lear", "macbeth", "othello", "tempest"]
LENGTH, TESTED, VOCABULARY = 40, 250, 500  # words per passage, passages of each play for the test, words that count
P, STEPS, RATES = 8, 150, (0.35, 0.5, 0.7, 1.0)
OVERFITS = 4.0  # a rate at which the loss on the test rises far before the last step
SEEDS, MANY_SEEDS = (0, 1, 2), (0, 1, 2, 3, 4)

Shards = Literal["none", "mixed", "by play"]
KINDS: dict[Shards, str] = {"none": "all passages", "mixed": "its eighth of every play", "by play": "one play"}
SKIPS = (P // 4, P // 2, 3 * P // 4)


@lru_cache(maxsize=1)
def passages() -> Float[Tensor, "plays passages words"]:
    """Count the commonest words in the passages of each play, as log(1 + count); a play's last passages are for the test."""
    works = package_works(package())
    texts = [re.findall("[a-z']+", works[f"{title}_gut.txt"].lower()) for title in TITLES]
    count = Counter(word for text in texts for word in text)
    number = {
        word: place for place, word in enumerate(sorted(count, key=lambda word: (-count[word], word))[:VOCABULARY])
    }
    most = min(map(len, texts)) // LENGTH
    found = torch.zeros(len(texts), most, VOCABULARY)
    for play, text in enumerate(texts):
        for passage in range(most):
            for word in text[passage * LENGTH : (passage + 1) * LENGTH]:
                if word in number:
                    found[play, passage, number[word]] += 1
    return found.log1p()


@dataclass(frozen=True)
class Plays(Workload):
    """A perceptron with one hidden layer that learns few passages for many epochs; SGD with momentum and a cosine schedule."""

    passages: int = 24  # to learn from, of each play: a multiple of the ranks
    # A rank draws from all passages, or always from the same eighth: passages of every play, or the play of its number.
    shards: Shards = "none"
    hidden: int = 32
    batch_size: int = 64
    learning_rate: float = 0.1

    name: ClassVar[str] = "plays"
    metric: ClassVar[str] = "nats"
    better: ClassVar[Better] = "lower"
    unit: ClassVar[str] = "test loss in nats"

    def model(self, seed: int) -> nn.Module:
        sizes = VOCABULARY, self.hidden, len(TITLES)
        return seeded(lambda: nn.Sequential(nn.Linear(*sizes[:2]), nn.ReLU(), nn.Linear(*sizes[1:])), seed)

    def batch(self, seed: int, step: int, rank: int, ranks: int) -> Batch:
        own = share(self.batch_size, rank, ranks)
        drawn = own.of(torch.rand(self.batch_size, generator=generator(seed, "plays/batch", step)))
        plays = len(TITLES)
        if self.shards == "by play":
            play, passage = torch.full_like(drawn, rank % plays).long(), (drawn * self.passages).long()
        else:
            parts = ranks if self.shards == "mixed" else 1
            place = (drawn * plays * (self.passages // parts)).long()
            play, passage = place % plays, place // plays * parts + rank % parts
        return Batch(passages()[play, passage], play)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch.input), batch.target)

    def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
        optimizer = SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)
        return optimizer, rise_and_cosine(optimizer, steps, 10, lowest=0.0)

    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        """Sum the loss over the test passages; one rank evaluates all."""
        with evaluating(model):
            lost = cross_entropy(model(tested()), answers(), reduction="none")
        return exactly_addable(lost), len(lost)

    def quality(self, total: float, count: int) -> float:
        return total / count


def tested() -> Float[Tensor, "passages words"]:
    return passages()[:, -TESTED:].flatten(0, 1)


def answers() -> Tensor:
    return torch.arange(len(TITLES)).repeat_interleave(TESTED)


def right(model: nn.Module) -> float:
    """Compute the share of test passages whose play the model names, in percent."""
    with evaluating(model):
        return 100 * float((model(tested()).argmax(1) == answers()).double().mean())


def training_loss(model: nn.Module, count: int) -> float:
    """Compute the loss on the passages to learn from."""
    with evaluating(model):
        play = torch.arange(len(TITLES)).repeat_interleave(count)
        return float(cross_entropy(model(passages()[:, :count].flatten(0, 1)), play))


@dataclass(frozen=True)
class Learned:
    """Trainings of `Plays` with several seeds at one rate."""

    rate: float
    best: tuple[float, ...]  # loss at the best of all evaluations
    end: tuple[float, ...]
    right: tuple[float, ...]  # percent of the test passages, at the end
    learnt: tuple[float, ...]  # loss on the passages to learn from, at the end


def learned(folder: Path, job: Plays, label: str, seeds: Sequence[int], rate: float | None = None) -> Learned:
    """Train `job` with the scheme; without a rate, at the one that is best at its best evaluation, with the first seed."""

    def once(rate: float, seed: int) -> dict[str, Any]:  # Any: JSON
        def train() -> dict[str, Any]:
            ended: list[tuple[float, float]] = []
            (choice,) = parse_schemes(label, 0.01)
            done = one_process.train_with_scheme(
                job.at_rate(rate),
                choice.make,
                seed,
                STEPS,
                P,
                range(10, STEPS + 1, 10),
                lambda model: ended.append((right(model), training_loss(model, job.passages))),
            )
            return {"loss": [loss for _, loss in done.quality], "right": ended[0][0], "learnt": ended[0][1]}

        about = f"{label}-{job.passages}-{job.shards}-{job.batch_size}-{rate:g}-{seed}".replace(" ", "_")
        return kept(folder / "skip_reduce-plays", about, train)

    if rate is None:
        rate = best_rate(RATES, lambda each: min(once(each, SEEDS[0])["loss"]))
    found = [once(rate, seed) for seed in seeds]
    return Learned(
        rate,
        tuple(min(each["loss"]) for each in found),
        tuple(each["loss"][-1] for each in found),
        tuple(each["right"] for each in found),
        tuple(each["learnt"] for each in found),
    )


def regularisation(folder: Path) -> dict[str, Learned]:
    """Train a model that learns 192 passages by heart, with ranks left out, and with a smaller batch or rate instead."""
    job, seeds = Plays(), MANY_SEEDS
    found = {"dense": learned(folder, job, "dense", seeds)}
    rate, skips = found["dense"].rate, {s: f"skip_reduce:skip={s}" for s in SKIPS}
    batches = {s: replace(job, batch_size=job.batch_size * (P - s) // P) for s in SKIPS}
    found |= {f"s = {s}": learned(folder, job, label, seeds) for s, label in skips.items()}
    found |= {f"dense, batch {each.batch_size}": learned(folder, each, "dense", seeds) for each in batches.values()}
    for s, label in skips.items():
        found[f"s = {s}, divided by P, dense's rate"] = learned(folder, job, f"{label}:divide_by=ranks", seeds, rate)
        found[f"dense, rate x (P-{s})/P"] = learned(folder, job, "dense", seeds, rate * (P - s) / P)
    found["dense, overfits"] = learned(folder, job, "dense", seeds, OVERFITS)
    for s, label in skips.items():
        found[f"s = {s}, overfits"] = learned(folder, job, label, seeds, OVERFITS)
        found[f"dense, batch {batches[s].batch_size}, overfits"] = learned(folder, batches[s], "dense", seeds, OVERFITS)
    return found


def bias(folder: Path) -> dict[tuple[str, str], Learned]:
    """Train with ranks that draw from the same passages, from a fixed eighth of every play, and from one play."""
    labels = {"dense": "dense"}
    labels |= {
        f"{mode}, s = {s}": f"skip_reduce:skip={s}:mode={mode}" for s in (P // 2,) for mode in ("random", "naive")
    }
    return {
        (shown, shards): learned(folder, Plays(passages=96, shards=shards), label, SEEDS)
        for shown, label in labels.items()
        for shards in KINDS
    }


def bias_table(found: Mapping[tuple[str, str], Learned]) -> str:
    methods = list(dict.fromkeys(shown for shown, _ in found))
    rows = [
        [
            shown,
            *(f"{ranged(found[shown, kind].best, '.3f')}, {fmean(found[shown, kind].right):.1f} %" for kind in KINDS),
        ]
        for shown in methods
    ]
    return "\n\n".join(
        [
            "Lowest test loss in nats, and percent of test passages named correctly at the end, by what a rank draws from:",
            parts.table(("method", *KINDS.values()), rows),
        ]
    )


def regularisation_table(found: Mapping[str, Learned]) -> str:
    batch = Plays.batch_size
    forms = {  # of the names that `regularisation` gives
        "ranks left out": "s = {s}",
        "dense, batch x (P-s)/P": "dense, batch {batch}",
        "divided by P, dense's rate": "s = {s}, divided by P, dense's rate",
        "dense, rate x (P-s)/P": "dense, rate x (P-{s})/P",
        "ranks left out, overfits": "s = {s}, overfits",
        "dense, batch x (P-s)/P, overfits": "dense, batch {batch}, overfits",
    }

    def cell(name: str) -> str:
        values, learnt = (found[name].end if "overfits" in name else found[name].best), found[name].learnt
        return f"{fmean(values):.3f} ± {error(values):.3f}" + f" ({fmean(learnt):.3f})" * ("overfits" in name)

    rows = [
        [
            shown,
            cell("dense, overfits" if "overfits" in shown else "dense"),
            *(cell(form.format(s=s, batch=batch * (P - s) // P)) for s in SKIPS),
        ]
        for shown, form in forms.items()
    ]
    chosen = sorted(
        {found[name].rate for name in found if name == "dense" or re.fullmatch(r"s = \d|dense, batch \d+", name)}
    )
    return "\n\n".join(
        [
            f"24 passages of each play, {len(MANY_SEEDS)} seeds ± standard error: the lowest test loss at its best rate "
            f"({', '.join(f'x{rate:g}' for rate in chosen)}), and the last one (training loss) of a model that overfits (x{OVERFITS:g}):",
            parts.table(("method", "dense", *(f"s = {s}" for s in SKIPS)), rows),
        ]
    )


def claims(learnt: Mapping[str, Learned], biased: Mapping[tuple[str, str], Learned]) -> list[Claim]:
    """Format the claims about bias and regularisation."""
    against = "; ".join(
        f"{about} "
        + ", ".join(f"{fmean(biased[shown, kind].best):.2f}" for shown in ("dense", "random, s = 4", "naive, s = 4"))
        for kind, about in KINDS.items()
    )
    skipped = {
        f"s = {s}": [b - a for a, b in zip(learnt["dense"].best, learnt[f"s = {s}"].best, strict=True)] for s in SKIPS
    }
    told = ", ".join(f"{fmean(each):+.3f} ± {error(each):.3f}" for each in skipped.values())
    worse_end = [fmean(learnt[f"s = {s}, overfits"].end) - fmean(learnt["dense, overfits"].end) for s in SKIPS]
    after = ", ".join(f"{each:+.2f}" for each in worse_end)

    def worse(kind: str) -> float:
        return fmean(biased["naive, s = 4", kind].best) / fmean(biased["random, s = 4", kind].best)

    helps = any(fmean(each) < -2 * error(each) for each in skipped.values())
    return [
        Claim(
            "skipping the same ranks biases training, a random shift does not",
            f"test loss of dense, random and naive, s = 4: {against}",
            "reproduced where ranks have other kinds of data"
            + "; with random shards there is little bias" * (worse("mixed") < 1.05)
            if worse("by play") > 1.1
            else "not reproduced",
        ),
        Claim(
            "regularises",
            f"lowest test loss over dense: {told} for {', '.join(skipped)}; last one of a model that overfits: {after}",
            "reproduced"
            if helps
            else "here it does not: the test loss is no lower at the best rate"
            + ", and higher where the model overfits" * (min(worse_end) > 0),
        ),
    ]


def ranged(values: Sequence[float], form: str) -> str:
    """Format the mean, the least and the greatest."""
    return f"{fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5

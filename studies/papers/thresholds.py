"""What the sections on MiCRO and ExDyna share: unions over many steps, the cost of a selection, trainings at equal density, step times."""

import copy
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from sparsync import Bucket
from sparsync.core import count_for, spans
from sparsync.feedback import Accumulator
from sparsync.schemes.exact_micro import ROW, sample_points, sample_stride
from sparsync.schemes.exdyna import BlockLoads, block_edges
from sparsync.selection.exclusive import BlockCyclic, Contiguous, budget, examine, rotation
from sparsync.selection.shares import equal_shares
from sparsync_lab import workloads
from sparsync_lab.frontier.figures import MethodRow, panels
from sparsync_lab.frontier.study import FrontierStudy, complete
from sparsync_lab.report.format import significant
from sparsync_lab.scheme_choice import parse_schemes
from sparsync_lab.simulate import setup as setups
from sparsync_lab.simulate.model import predict
from sparsync_lab.traffic.observe import Observed
from sparsync_lab.traffic.stream import OfJob, Stream, Synthetic
from studies import parts
from studies.papers import kept

DENSITY = 0.01
PUBLISHED, EXACT = ("micro", "exdyna"), ("exact_micro", "exact_exdyna")
AUTHORS = "micro:bug_compatible=true"  # the threshold as the authors' program scales it
ELEMENTS, STEPS, SETTLED = 100_000, 1600, 1200  # of a drawn stream; means are over the steps from SETTLED on
RANKS, SEEDS = (2, 4, 8, 16), (0, 1, 2)
MOST_SEEDS = 8  # ranks of the stream that is drawn with every seed, and of the jumps
FACTORS, AFTER = (10.0, 0.1), 1000  # jumps of the gradients, and steps after them
SHORT = 100  # steps of schemes whose counts do not depend on earlier steps
CLOSE, STRETCH = 0.1, 20  # a union has settled if it is within CLOSE of its target on average over STRETCH steps
JOBS, JOB_RANKS, JOB_STEPS, JOB_LAST = ("shakespeare-small", "gpt-tiny", "movielens-small"), 4, 800, 200
CONVERGENCE = "dense,topk:density=0.003,dgc:density=0.003:warmup_steps=0,micro,exdyna,exact_micro,exact_exdyna"
SELECTED, SELECT_RANKS, REPEATS = 2**22, (2, 4, 8, 16, 64), 9


@dataclass(frozen=True)
class Course:
    """The unions of one scheme, step by step, and what each rank selected."""

    asked: int
    elements: int
    union: Sequence[int]
    local: Sequence[Sequence[int]]

    def ratio(self, start: int = 0, stop: int | None = None) -> float:
        """Compute the mean of union / target."""
        return statistics.fmean(self.union[start:stop]) / self.asked

    def error(self, start: int = 0, stop: int | None = None) -> float:
        """Compute the mean of |union / target - 1|."""
        return statistics.fmean(abs(each / self.asked - 1) for each in self.union[start:stop])

    def worst(self) -> float:
        """Find the union / target that is farthest from 1, as a ratio."""
        return max((each / self.asked for each in self.union), key=lambda ratio: max(ratio, 1 / ratio))

    def settled_after(self) -> int | None:
        """Count the steps before the first stretch within CLOSE of the target."""
        starts = range(len(self.union) - STRETCH + 1)
        return next((start for start in starts if self.error(start, start + STRETCH) <= CLOSE), None)

    def imbalance(self, start: int = 0, stop: int | None = None) -> float:
        """Compute the mean of the largest share of a rank over the mean share."""
        return statistics.fmean(max(each) * len(each) / sum(each) for each in self.local[start:stop])

    def blocks(self) -> list[list[int]]:
        """Compute ExDyna's numbers of blocks by partition at each step, which follow from the counts alone."""
        P, edges, loads, found = len(self.local[0]), block_edges(self.elements), BlockLoads(), list[list[int]]()
        for counts in self.local:
            found.append(loads.next(edges, P))
            loads.blocks, loads.counts, loads.step = found[-1], list(counts), loads.step + 1
        return found

    def moved_blocks(self, start: int, stop: int) -> int:
        """Count the moves of ExDyna's blocks between these steps."""
        changes = (zip(*pair, strict=True) for pair in pairwise(self.blocks()[start:stop]))
        return sum(sum(abs(old - new) for old, new in change) // 2 for change in changes)


def followed(
    names: Sequence[str], stream: Stream, steps: int, factors: Sequence[float] = (), after: int = AFTER
) -> dict[str, Any]:  # Any: JSON
    """Reduce the stream with each scheme for `steps` steps; then, for each factor, `after` steps with gradients times it."""
    torch.set_num_threads(1)
    choices = parse_schemes(",".join(names), DENSITY)
    observed = {choice.label: Observed(choice, stream.ranks, stream.layout) for choice in choices}
    courses = dict[str, dict[str, Any]]()
    current = [(label, 1.0, each) for label, each in observed.items()]
    for step in range(steps + (after if factors else 0)):
        if step == steps:
            current = [
                (f"{label} x{factor:g}", factor, copy.deepcopy(each))
                for label, _, each in current
                for factor in factors
            ]
        gradients = stream.gradients(step)
        for label, factor, each in current:
            seen = each.reduce(step, gradients if factor == 1 else [gradient * factor for gradient in gradients])
            course = courses.setdefault(
                label, {"asked": each.asked, "elements": seen["elements"], "union": [], "local": []}
            )
            course["union"].append(seen["union"])
            course["local"].append(seen["local"])
    return courses


def drawn(folder: Path, P: int, seed: int) -> dict[str, Course]:
    """Follow the published schemes on a drawn stream; on MOST_SEEDS ranks also after jumps."""
    names = (*PUBLISHED, AUTHORS) if (P, seed) == (MOST_SEEDS, SEEDS[0]) else PUBLISHED
    factors = FACTORS if P == MOST_SEEDS else ()
    stream = Synthetic(P, ELEMENTS, seed)
    return _courses(kept(folder, f"thresholds-{P}-{seed}", lambda: followed(names, stream, STEPS, factors)))


def drawn_exact(folder: Path, P: int) -> dict[str, Course]:
    """Follow TopK and the exact forms for a few steps, and after jumps."""
    names, stream = ("topk", *EXACT), Synthetic(P, ELEMENTS, SEEDS[0])
    return _courses(kept(folder, f"exact-{P}", lambda: followed(names, stream, SHORT, FACTORS, SHORT)))


def of_job(folder: Path, job: str) -> dict[str, Course]:
    """Follow the published schemes on the gradients of a job that trains with the dense mean."""

    def measure() -> dict[str, Any]:  # Any: JSON
        return followed(PUBLISHED, OfJob(workloads.get(job), JOB_RANKS, SEEDS[0], JOB_STEPS), JOB_STEPS)

    return _courses(kept(folder, f"thresholds-{job}", measure))


def _courses(content: Mapping[str, Any]) -> dict[str, Course]:  # Any: JSON
    return {label: Course(**each) for label, each in content.items()}


# What a selection costs.


def selection_costs(folder: Path) -> dict[str, Any]:  # Any: JSON
    """Measure the processor time of one rank's selection among SELECTED elements in milliseconds, and count the elements it reads."""
    return kept(folder, "selection", _selection_costs)


def _selection_costs() -> dict[str, Any]:  # Any: JSON
    torch.set_num_threads(1)
    stream, hints = Synthetic(1, SELECTED), dict[str, dict[str, float]]()
    runs = [_selected_once(stream, t, hints) for t in range(REPEATS + 1)][1:]  # the first warms up
    return {
        key: {"ms": statistics.median(run[key][1] for run in runs), "read": elements}
        for key, (elements, _) in runs[0].items()
    }


def _selected_once(stream: Synthetic, t: int, hints: dict[str, dict[str, float]]) -> dict[str, tuple[int, float]]:
    """Let every scheme select once from the same gradient; return the elements read and the milliseconds."""
    (gradient,) = stream.gradients(t)
    threshold = float(gradient.abs().kthvalue(SELECTED - count_for(DENSITY, SELECTED)).values)
    total = budget(DENSITY, SELECTED, t)
    seen = dict[str, tuple[int, float]]()

    def timed(key: str, elements: int, work: Callable[[], object]) -> None:
        began = time.thread_time()
        work()
        seen[key] = elements, 1e3 * (time.thread_time() - began)

    def accumulator(key: str) -> Accumulator:
        bucket = Bucket("cost", gradient.clone(), t, stream.layout)
        return Accumulator(bucket, torch.zeros(SELECTED), hints.setdefault(key, {}))

    whole = accumulator("topk")
    timed("accumulate", SELECTED, lambda: whole.values)
    timed("topk", SELECTED, lambda: whole.top_k(total))
    timed("torch.topk", SELECTED, lambda: whole.values.abs().topk(total))
    for P in SELECT_RANKS:
        for name, (elements, select) in _selections(P, t, threshold, total).items():
            acc = accumulator(f"{name} {P}")
            _ = acc.values
            timed(f"{name} {P}", elements, partial(select, acc))
    return seen


def _selections(P: int, t: int, threshold: float, total: int) -> dict[str, tuple[int, Callable[[Accumulator], object]]]:
    """List how rank 0 selects at step `t` in each scheme, and how many elements it reads."""
    cpu = torch.device("cpu")
    span = spans(SELECTED, P)[rotation(0, t, P)]
    mine, later = (examine(BlockCyclic(SELECTED, P, ROW), 0, step, cpu) for step in (t, t + 1))
    adjacent = examine(Contiguous(spans(SELECTED, P)), 0, t, cpu)
    count, stride = equal_shares(mine.lengths, total, t // P)[0], sample_stride(total, P)
    sample = max(sample_points(later.lengths, total, stride)[0]) // stride
    later = later.sampled(stride, t // P)
    return {
        "micro": (len(span), lambda acc: acc.above(threshold, span)),
        "exact_micro": (
            mine.rows.length + later.rows.length,
            lambda acc: acc.top_k_of_rows([mine.rows, later.rows], [count, sample], "partition"),
        ),
        "exact_exdyna": (adjacent.rows.length, lambda acc: acc.top_k_of_rows([adjacent.rows], [count], "partition")),
    }


# Trainings at equal density.


def trained(folder: Path) -> list[MethodRow]:
    """Train with each method at its best rate, 3 seeds; all write about DENSITY of the elements per step."""
    study = FrontierStudy(parse_schemes(CONVERGENCE, DENSITY), "shakespeare-small", seeds=SEEDS, rates_seed=SEEDS[0])
    finished = complete(study, folder / "convergence", 1, print)
    return list(panels(study, finished, lower=True, metric="perplexity")[0].rows)


# Predicted steps.


def step_ms(preset: str, name: str, P: int, imbalance: float | None = None) -> float:
    """Predict a step on the hardware of a set-up; `imbalance`: the largest share over the mean, measured after settling."""
    setup = setups.read(preset)
    density = {} if name == "dense" else {"density": setup.scheme[-1].settings["density"]}
    figures = {}
    if imbalance is not None:
        union = count_for(density["density"], setup.job.elements)
        most = round(imbalance * union / P)
        figures = {"selected": [most, *(len(span) for span in spans(union - most, P - 1))]}
    return 1e3 * predict(setup, setups.Entry(name, name, density), P, figures=figures).step_s


def step_times(preset: str, ranks: Sequence[int], first: Mapping[int, Mapping[str, Course]]) -> dict[str, list[float]]:
    """Predict the steps on the hardware of a set-up, in milliseconds by number of ranks."""
    uneven = {(name, P): first[P][name].imbalance(SETTLED, STEPS) for name in PUBLISHED for P in ranks}
    names = ("dense", "topk", *PUBLISHED, *EXACT)
    return {name: [step_ms(preset, name, P, uneven.get((name, P))) for P in ranks] for name in names}


# Formats.


def percent(value: float) -> str:
    """Format a share in percent."""
    return f"{significant(100 * value, 2)} %"


def titled(text: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table below a text in lines of the page's width."""
    return f"{textwrap.fill(text, 150, break_on_hyphens=False)}\n\n{parts.table(heads, rows)}"


def merged(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    """Merge rows that differ in their first cell only."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        names.setdefault(tuple(cells), []).append(name)
    return [[", ".join(shown), *cells] for cells, shown in names.items()]


def low_to_high(values: Iterable[float], form: Callable[[float], str] = lambda value: significant(value, 3)) -> str:
    """Format the mean over seeds, and the lowest and highest of several."""
    found = list(values)
    extremes = f" ({form(min(found))} to {form(max(found))})" if len(found) > 1 else ""
    return form(statistics.fmean(found)) + extremes


def build_up_of_topk(exact: Mapping[int, Mapping[str, Course]], P: int) -> str:
    """Format union / target of TopK, over the second half of its steps."""
    return significant(exact[P]["topk"].ratio(SHORT // 2, SHORT))


def no_build_up(ratios: Iterable[float]) -> str:
    """Judge union / target for all numbers of ranks, after settling."""
    return "reproduced" if max(ratios) <= 1 + CLOSE else "not reproduced"


def kept_after_settling(errors: Iterable[float]) -> str:
    """Judge the mean errors of unions after settling."""
    worst = max(errors)
    return (
        "reproduced after settling"
        if worst <= CLOSE
        else f"nearly reproduced, off by up to {percent(worst)} after settling"
    )


def behind(row: MethodRow) -> str:
    """Format how far a method ends behind dense."""
    return f"{row.behind.mean:+.1f} %"


def label(trained: Iterable[str], name: str) -> str:
    """Find the label of the method whose scheme is `name`."""
    return next(label for label in trained if label.split(":")[0] == name)

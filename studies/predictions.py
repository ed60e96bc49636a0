"""Predict the steps of trainings over rate-limited links from probes, measure them, and write docs/advise.md.

    python -m studies predictions probe --out build/predictions      # 9 minutes, another day or hour than the runs
    python -m studies predictions measure --out build/predictions    # half an hour
    python -m studies predictions table --out build/predictions

Existing measurements in the folder are kept; interrupted ones are repeated. `probe` runs `sparsync probe` for each number of ranks and
link, and for each job with the buckets of `compare`. `measure` runs `python -m studies bench overlap` in cells of (ranks, link, megabytes,
buckets), drawn by a seed, and `sparsync compare` with two jobs. Predictions use the probe and the closed forms, and from the measurements
only the backward time of sleeping layers.
"""

import json
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

from sparsync_lab.advise import step
from sparsync_lab.netlab.rate import parse_rate
from sparsync_lab.predict import advice, probe_file
from sparsync_lab.predict.probe_file import Backward, Probe, ReadyBucket
from sparsync_lab.report import results
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from studies import parts

PAGE, PART = "docs/advise.md", "predictions"
RANKS, LINKS = (2, 4, 8), ("50mbit", "200mbit", "1gbit")
MBYTES, BUCKETS = (1.0, 4.0, 25.0), (1, 4, 16)
CELLS, SEED = 27, 0
LONGEST_S = 1.2  # for a dense reduction in a cell, whose many repetitions would otherwise take minutes
BACKWARD_S = 0.1
ROUNDS = 4
SCHEMES = (
    "dense,bf16,two_shot:density=1.0:values=int4,two_shot:density=0.05:values=int4,topk:density=0.01:values=int8,skip_reduce:skip=1,"
    "exact_micro:density=0.01:values=int8,exact_exdyna:density=0.01:values=int8,exact_oktopk:density=0.01:values=int8"
)
JOBS = ("shakespeare-small", "gpt")
JOB_SCHEMES = (
    "dense,bf16,two_shot:density=1.0:values=int4,topk:density=0.01:values=int8,exact_oktopk:density=0.01:values=int8"
)
JOB_LINKS = ("100mbit", "1gbit")
JOB_RANKS, JOB_STEPS = 4, 24
DIFFERENT = 0.10  # orders are judged if measured times differ by more


@dataclass(frozen=True)
class PredictionRow:
    place: str
    ranks: int
    label: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def main(argv: Sequence[str]) -> None:
    parser = parts.options("predictions", __doc__)
    parser.add_argument("what", choices=("probe", "measure", "table"))
    parser.add_argument("--out", type=Path, required=True, help="folder of what was measured")
    options = parser.parse_args(argv)
    if options.what == "probe":
        probe_all(options.out)
    elif options.what == "measure":
        measure_all(options.out)
    else:
        parts.put(PAGE, PART, page(options.out), options.print)


def cells() -> list[tuple[int, str, float, int]]:
    """Draw the cells: ranks, link, megabytes and buckets, with equally many per number of ranks and per link."""
    chosen: list[tuple[int, str, float, int]] = []
    draw = random.Random(SEED)
    for P, link in product(RANKS, LINKS):
        rest = [
            (P, link, mbytes, buckets)
            for mbytes, buckets in product(MBYTES, BUCKETS)
            if 2 * (P - 1) / P * mbytes * 8e6 / parse_rate(link) <= LONGEST_S
        ]
        chosen += draw.sample(rest, min(len(rest), -(-CELLS // (len(RANKS) * len(LINKS)))))
    return chosen


def probe_all(out: Path) -> None:
    """Probe every group; the jobs' groups with each job's timeline."""
    for P, link in product(RANKS, LINKS):
        _run(_probe(out, P, link), "probe", "--ranks", str(P), "--link", link)
    for job, link in product(JOBS, JOB_LINKS):
        what = ("probe", "--ranks", str(JOB_RANKS), "--link", link, "--workload", job)
        _run(_probe(out, JOB_RANKS, link, job), *what, "--bucket-mb", "25")  # as in `compare`


def measure_all(out: Path) -> None:
    for cell in cells():
        P, link, mbytes, buckets = cell
        size = ("--mbytes", str(mbytes), "--buckets", str(buckets), "--backward-s", str(BACKWARD_S))
        what = ("bench", "overlap", "--ranks", str(P), "--link", link, "--schemes", SCHEMES, "--rounds", str(ROUNDS))
        _run(_cell(out, cell), *what, *size)
    for job, link in product(JOBS, JOB_LINKS):
        what = ("compare", "--workload", job, "--ranks", str(JOB_RANKS), "--link", link, "--schemes", JOB_SCHEMES)
        _run(out / f"job-{job}-{link}", *what, "--steps", str(JOB_STEPS), "--eval-every", str(JOB_STEPS))


def rows_of(out: Path) -> list[PredictionRow]:
    """List every method in every place that was probed and measured."""
    rows: list[PredictionRow] = []
    for cell in cells():
        P, link, mbytes, buckets = cell
        probe_path, path = _probe(out, P, link), _cell(out, cell)
        if not probe_path.exists() or not path.exists():
            continue
        probe = probe_file.read(probe_path)
        measured = {each["case"]: each for each in map(json.loads, path.read_text().splitlines())}
        for choice in parse_schemes(SCHEMES, 0.01):
            found = measured[choice.label]
            backward_s = found["backward_s"]["p50"]
            predicted = _overlap(choice, probe, mbytes, buckets, backward_s)
            place = f"{P} ranks, {link}, {mbytes:g} MB, {buckets} bucket{'s' if buckets > 1 else ''}"
            rows.append(PredictionRow(place, P, choice.label, predicted, found["step_s"]["p50"]))
    for job, link in product(JOBS, JOB_LINKS):
        probe_path, folder = _probe(out, JOB_RANKS, link, job), out / f"job-{job}-{link}"
        if not probe_path.exists() or not folder.exists():
            continue
        probe = probe_file.read(probe_path)
        assert probe.backward is not None
        traces = {label: trace for (label, _), trace in results.read(folder).runs[-1].traces.items()}
        for choice in parse_schemes(JOB_SCHEMES, 0.01):
            seconds = statistics.median(each.step_s for each in traces[choice.label].steps[3:])
            predicted = step(choice, probe, probe.backward).step_s
            rows.append(PredictionRow(f"{job}, {JOB_RANKS} ranks, {link}", JOB_RANKS, choice.label, predicted, seconds))
    return rows


def page(out: Path) -> str:
    """Format the part of the page. Exits if there is nothing to show."""
    rows = rows_of(out)
    if not rows:
        raise SystemExit(f"{out} has nothing that was both probed and measured; run `probe` and `measure` first")
    by_place = [[each for each in rows if each.place == place] for place in dict.fromkeys(each.place for each in rows)]
    right, pairs = _order(by_place)
    regrets = [_regret(each) for each in by_place]
    within = sum(abs(each.error) <= 0.25 for each in rows) / len(rows)
    said = [
        f"{len(rows)} predictions in {len(by_place)} places: {100 * within:.0f} % within 25 %.",
        f"Of two methods in one place whose times differ by more than {100 * DIFFERENT:.0f} %, {right} of {pairs} pairs are in the",
        f"right order. The method predicted to be the fastest takes {100 * statistics.median(regrets):.1f} % longer than the fastest,",
        f"at most {100 * max(regrets):.0f} %.",
    ]
    cells: list[list[str]] = []
    for label in (*dict.fromkeys(each.label for each in rows), ""):
        own = [each.error for each in rows if label in ("", each.label)]
        middle, mean = statistics.median(map(abs, own)), statistics.fmean(own)
        errors = [f"{100 * middle:.1f} %", f"{100 * mean:+.1f} %", f"{100 * max(own, key=abs):+.0f} %"]
        cells.append([f"`{label}`" if label else "all", str(len(own)), *errors])
    heads = ["method", "predictions", "median error", "mean, with its sign", "worst"]
    return f"{' '.join(said)}\n\n{parts.table(heads, cells)}"


def _overlap(choice: SchemeChoice, probe: Probe, mbytes: float, buckets: int, backward_s: float) -> float:
    """Predict a step of the benchmark's model, given its measured backward time."""
    width = round((mbytes * 1e6 / 4 / buckets) ** 0.5)
    ready = tuple(ReadyBucket(width * width, backward_s * (i + 1) / buckets) for i in range(buckets))
    backward = Backward("layers that sleep", 0.0, backward_s, 0.0, ready)
    # Sleeping layers leave the cores to the reductions, and the benchmark joins no buckets.
    return advice.step(choice.label, choice.make(), probe, backward, join_mb=0.0, crowded=False).step_s


def _order(by_place: Iterable[Sequence[PredictionRow]]) -> tuple[int, int]:
    """Count the pairs in the right order, and all pairs."""
    pairs = [
        (one, other)
        for rows in by_place
        for one, other in combinations(rows, 2)
        if max(one.measured_s, other.measured_s) > (1 + DIFFERENT) * min(one.measured_s, other.measured_s)
    ]
    right = sum((one.predicted_s < other.predicted_s) == (one.measured_s < other.measured_s) for one, other in pairs)
    return right, len(pairs)


def _regret(rows: Sequence[PredictionRow]) -> float:
    chosen = min(rows, key=lambda each: each.predicted_s)
    return chosen.measured_s / min(each.measured_s for each in rows) - 1


def _probe(out: Path, P: int, link: str, job: str = "") -> Path:
    return out / f"probe-{P}-{link}{f'-{job}' if job else ''}.toml"


def _cell(out: Path, cell: tuple[int, str, float, int]) -> Path:
    P, link, mbytes, buckets = cell
    return out / f"overlap-{P}-{link}-{mbytes:g}-{buckets}.jsonl"


def _run(path: Path, *arguments: str) -> None:
    """Run a command, or a benchmark whose output is kept, unless that was done."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")  # an interrupted measurement is repeated
    shutil.rmtree(part, ignore_errors=True)  # `compare` would append to an existing folder
    _command(part, *arguments)
    part.rename(path)


def _command(out: Path, *arguments: str) -> None:
    print("python -m", *arguments, file=sys.stderr, flush=True)
    if arguments[0] == "bench":
        with out.open("w") as file:
            subprocess.run([sys.executable, "-m", "studies", *arguments], check=True, stdout=file)
    else:
        command = [sys.executable, "-m", "sparsync_lab.cli", *arguments, "--out", str(out)]
        subprocess.run(command, check=True, stdout=sys.stderr)

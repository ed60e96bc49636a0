"""Fit how far the recipes end behind dense, predict it for larger models, and compare later measurements: a part of docs/frontier.md.

    python -m studies law [--fit FOLDER ...] [--check FOLDER ...] [--print]

Folders are those of `sparsync frontier`. The page is made from the points in law.jsonl. `--fit` adds points, and is refused once larger
models have been measured: their prediction stands. `--check` adds points of larger models or other jobs to compare, never to fit.
"""

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from sparsync.core import generator
from sparsync.recipes import rows
from sparsync_lab import json_lines
from sparsync_lab.checked import checked
from sparsync_lab.frontier import runs
from sparsync_lab.frontier.figures import LOSSES, Interval, interval
from sparsync_lab.frontier.runs import Finished, Key
from sparsync_lab.frontier.tables import interval_text
from sparsync_lab.report.format import behind_text, significant
from sparsync_lab.scheme_choice import parse_schemes
from studies import parts

PAGE, PART = "docs/frontier.md", "law"
FILE = parts.ROOT / "studies" / "law.jsonl"
LARGEST = 12e6  # parameters of fitted models
# Steps of fitted trainings. After 300 steps the smallest model still learns how frequent characters are, and a gap says who began earlier.
SHORTEST = 1000
DRAWS = 400
GOALS = {4.6: 0.01, 0.8: 0.03, 0.2: 0.08}  # most that a recipe may end behind dense in perplexity, at 111 M parameters
SIZE, TOKENS_PER_STEP = 111e6, 16_384
LENGTHS = (1000, 1221)  # steps; the second has 20 million tokens
ONCE_STEPS = 300
ONCE = {0.8: 0.070, 0.2: 0.348}  # nats behind dense at `SIZE`: one seed, one rate; the trainings are not kept

Where = tuple[str, int, int, int, int, float]


@dataclass(frozen=True)
class Point:
    """How far a recipe ended behind dense, each at its best rate, seed by seed."""

    job: str
    parameters: int
    tokens_per_step: int
    steps: int
    ranks: int
    recipe: float  # its bits, counted with 4 ranks, as in its name
    gap: float = math.nan  # nats per token, mean over seeds
    deviation: float | None = None  # standard deviation over seeds
    seeds: int = 0
    interior: bool = True  # both best rates lie between others that were tried
    compared: bool = False  # with the law, and never fitted

    @property
    def where(self) -> Where:
        return self.job, self.parameters, self.tokens_per_step, self.steps, self.ranks, self.recipe

    @property
    def fitted(self) -> bool:
        return self.interior and not self.compared and self.steps >= SHORTEST


TARGET = Point("", int(SIZE), TOKENS_PER_STEP, LENGTHS[0], 4, 0.0, seeds=3)
FACTORS: dict[str, Callable[[Point], float]] = {
    "bits": lambda point: point.recipe,
    "parameters / 1 M": lambda point: point.parameters / 1e6,
    "tokens per parameter": lambda point: point.steps * point.tokens_per_step / point.parameters,
    "ranks / 4": lambda point: point.ranks / 4,
}
# Mean and standard deviation of what is assumed before any point is seen.
OFFSET, SCALE, EXPONENT = (0.0, 0.05), (math.log(0.02), 2.0), (0.0, 1.0)


@dataclass(frozen=True)
class Law:
    """gap = offset + scale * product of factor ** exponent, as draws of (offset, ln(scale), exponents) that agree with the points."""

    draws: Float[Tensor, "draws constants"]
    unsure: Float[Tensor, " draws"]  # factor on both deviations
    seed_variance: float
    scatter: float  # variance of points around the law beyond that of their seeds

    def measured(self, point: Point) -> Float[Tensor, " draws"]:
        """Draw the gaps that a measurement with the point's seeds could have."""
        values = _values(self.draws, _features([point]))[0][:, 0]
        normal = torch.randn(len(values), generator=generator(0, "law/new", 0), dtype=torch.float64)
        return values + normal * self.unsure * math.sqrt(self.seed_variance / point.seeds + self.scatter)


def main(argv: Sequence[str]) -> None:
    torch.set_num_threads(1)
    parser = parts.options("law", __doc__)
    parser.add_argument("--fit", nargs="+", type=Path, default=[], metavar="FOLDER", help="of trainings to fit")
    parser.add_argument("--check", nargs="+", type=Path, default=[], metavar="FOLDER", help="to compare")
    options = parser.parse_args(argv)
    known = json_lines.read(FILE, lambda content: checked(Point, content), "point")
    points = updated(known, points_of(options.fit), points_of(options.check))
    if not options.print:
        FILE.write_text("".join(json.dumps(asdict(point)) + "\n" for point in points))
    parts.put(PAGE, PART, page(points), options.print)


def updated(known: Sequence[Point], fitted: Sequence[Point], compared: Sequence[Point]) -> list[Point]:
    """Add points to fit, if their models are not too large, and points to compare. They replace known ones that have no more seeds.

    Raises ValueError if the fit would change after larger models were measured.
    """
    small = [point for point in fitted if point.parameters <= LARGEST]
    if small and any(point.parameters > LARGEST for point in known):
        raise ValueError(
            f"--fit would change a prediction: {FILE.name} has points of larger models; use --check alone, or delete their lines"
        )
    points = {point.where: point for point in known}
    for point in [*small, *(replace(point, compared=True) for point in compared)]:
        there = points.get(point.where, point)
        if point.compared == there.compared and point.seeds >= there.seeds:
            points[point.where] = point
    return sorted(points.values(), key=lambda point: point.where)


def points_of(folders: Iterable[Path]) -> list[Point]:
    """Compute the points of all recipes in these folders, whose trainings count together."""
    trained: dict[tuple[str, int, int, str], dict[str, list[Finished]]] = defaultdict(lambda: defaultdict(list))
    finished: dict[Key, Finished] = {}
    for folder in folders:
        finished |= runs.read(folder)
    for key, each in finished.items():
        trained[key.job, key.ranks, key.steps, key.device][_settings(key.method)].append(each)
    found: list[Point] = []
    for (text, ranks, steps, _), methods in trained.items():
        job = json.loads(text)
        options = {"optimizer_name": "adamw"} | job.get("options", {})
        is_text = job.get("metric") in LOSSES and {"batch_size", "context"} <= {*options}
        if is_text and options["optimizer_name"] == "adamw":
            tokens = options["batch_size"] * options["context"]
            about = Point(job["workload"], job["parameters"], tokens, steps, ranks, 0.0)
            found += _gaps(about, methods, job["metric"])
    return sorted(found, key=lambda point: point.where)


def _gaps(about: Point, methods: dict[str, list[Finished]], metric: str) -> Iterable[Point]:
    dense, dense_interior = at_best(methods.get(_method("dense", about.ranks), []))
    for each in rows("steps", about.ranks):
        trained, interior = at_best(methods.get(_method(each.text, about.ranks), []))
        ends = [(trained[seed].end, dense[seed].end) for seed in trained if seed in dense]
        per_byte = metric == "bits per byte"
        gaps = [(end - base) * math.log(2) if per_byte else math.log(end / base) for end, base in ends]
        if gaps and all(map(math.isfinite, gaps)):
            deviation = statistics.stdev(gaps) if len(gaps) > 1 else None
            values = {"gap": statistics.fmean(gaps), "deviation": deviation, "seeds": len(gaps)}
            yield replace(about, recipe=each.bits, interior=interior and dense_interior, **values)


@cache
def _method(text: str, ranks: int) -> str:
    (choice,) = parse_schemes(text, 0.01, ranks=(ranks,))
    return _settings(runs.described(choice.described()))


def _settings(method: str) -> str:
    """Leave out settings that have no effect, which folders of other versions lack or have."""
    return re.sub(r', \w+=None|"bucket_mb": [\d.]+, |, "timeout_s": [\d.]+', "", method)


def at_best(trained: Sequence[Finished]) -> tuple[dict[int, Finished], bool]:
    """Return the trainings at the best rate, by seed, and whether lower and higher rates were tried.

    The seeds that tried the most rates choose. NaN counts as worst.
    """
    ends: dict[int, dict[float, float]] = defaultdict(dict)
    for each in trained:
        ends[each.key.seed][each.key.rate] = math.inf if math.isnan(each.end) else each.end
    most = max(map(len, ends.values()), default=0)
    choosing = [by_rate for by_rate in ends.values() if len(by_rate) == most]
    if not (rates := sorted(set.intersection(*map(set, choosing))) if choosing else []):
        return {}, False
    best = min(rates, key=lambda rate: statistics.fmean(by_rate[rate] for by_rate in choosing))
    return {each.key.seed: each for each in trained if each.key.rate == best}, rates[0] < best < rates[-1]


def law_of(points: Sequence[Point]) -> Law:
    """Fit the points that count, and what is assumed, by least squares, and draws of both with the noise of seeds and scatter."""
    points = [point for point in points if point.fitted]
    features, gaps = _features(points), torch.tensor([point.gap for point in points], dtype=torch.float64)
    mean, deviation = torch.tensor([OFFSET, SCALE, *[EXPONENT] * len(FACTORS)], dtype=torch.float64).unbind(1)
    common = statistics.median([point.deviation**2 for point in points if point.deviation is not None])
    seeds, deviations = torch.tensor([[point.seeds, point.deviation or 0.0] for point in points], dtype=mean.dtype).T
    # A point's variance is that of its seeds and, with the weight of four more seeds, what is common.
    variance = (4 * common + (seeds - 1) * deviations**2) / (3 + seeds) / seeds
    free, usual = max(1, len(points) - len(mean)), variance.median().item()
    scatter, best, noise = 0.0, mean[None], variance.sqrt()
    for _ in range(10):
        best = _least_squares(best, mean[None], deviation, features, gaps[None], noise[None])
        excess = ((_values(best, features)[0][0] - gaps) / noise).square().sum().item() / free
        scatter = max(0.0, (scatter + usual) * excess - usual)
        noise = (variance + scatter).sqrt()
    random = generator(0, "law/draws", 0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    # Student's t: the noise is known from `free` deviations only.
    unsure = (free / normal(DRAWS, free).square().sum(1)).sqrt()
    noises = noise * unsure[:, None]
    priors = mean + deviation * normal(DRAWS, len(mean))
    shaken = gaps + noises * normal(DRAWS, len(points))
    draws = _least_squares(best.expand(DRAWS, -1), priors, deviation, features, shaken, noises)
    return Law(draws, unsure, common, scatter)


def _features(points: Sequence[Point]) -> Float[Tensor, "points exponents"]:
    rows = [[math.log(factor(point)) for factor in FACTORS.values()] for point in points]
    return torch.tensor(rows, dtype=torch.float64)


def _values(
    constants: Float[Tensor, "draws constants"], features: Float[Tensor, "points exponents"]
) -> tuple[Float[Tensor, "draws points"], Float[Tensor, "draws points constants"]]:
    """Compute the law and its derivatives."""
    grown = (constants[:, 1:2] + constants[:, 2:] @ features.T).clamp(max=20).exp()
    slopes = torch.cat([torch.ones_like(features[:, :1]), features], 1) * grown[..., None]
    return constants[:, :1] + grown, torch.cat([torch.ones_like(grown)[..., None], slopes], -1)


def _least_squares(
    start: Tensor, mean: Tensor, deviation: Tensor, features: Tensor, gaps: Tensor, noise: Tensor
) -> Float[Tensor, "draws constants"]:
    """Minimise the squares by Levenberg and Marquardt's method, all draws at once."""

    def residual(constants: Tensor) -> Tensor:
        return torch.cat([(_values(constants, features)[0] - gaps) / noise, (constants - mean) / deviation], 1)

    found, damping = start.clone(), torch.full_like(start[:, :1], 1e-2)
    for _ in range(60):
        rest = residual(found)
        slopes = _values(found, features)[1] / noise[..., None]
        jacobian = torch.cat([slopes, torch.diag(1 / deviation).expand(len(found), -1, -1)], 1)
        square = jacobian.mT @ jacobian
        damped = square + torch.diag_embed(damping * square.diagonal(dim1=1, dim2=2))
        step = torch.linalg.solve(damped, (jacobian.mT @ rest[..., None]))[..., 0]
        better = residual(found - step).square().sum(1, keepdim=True) < rest.square().sum(1, keepdim=True)
        found = torch.where(better, found - step, found)
        damping = torch.where(better, damping / 3, damping * 4).clamp(1e-9, 1e9)
    return found


def quantiles(draws: Float[Tensor, " draws"]) -> tuple[float, float, float]:
    """Compute the median and the ends of the 95 % interval."""
    low, middle, high = draws.quantile(torch.tensor([0.025, 0.5, 0.975], dtype=torch.float64)).tolist()
    return middle, low, high


def page(points: Sequence[Point]) -> str:
    """Write the part of the page: predictions, the law, its errors on sizes that were left out, and the points it was compared with."""
    fitted = [point for point in points if point.fitted]
    law = law_of(points)
    formula = " * ".join(f"({name})^{letter}" for name, letter in zip(FACTORS, "bcde", strict=True))
    sections = [
        f"Nats per token behind dense = offset + a * {formula}, with the bits of the recipe's name, fitted to {len(fitted)} points: "
        f"{_span(each.parameters / 1e6 for each in fitted)} million parameters, {_span(each.tokens_per_step for each in fitted)} tokens a "
        f"step, {_span(each.steps for each in fitted)} steps, {_span(each.ranks for each in fitted)} ranks.",
        f"**Predicted for {SIZE / 1e6:.0f} million parameters** on 4 ranks, {TOKENS_PER_STEP:,} tokens a step, mean of three seeds, each "
        "method at its best rate, in % of perplexity (95 % interval):",
        _predictions(law),
        "The chance of the goal is for the longer training. The last column is older than the law: one training at one rate, "
        f"not fitted. Trainings of fewer than {SHORTEST} steps are outside the law. The points are of the jobs "
        f"{' and '.join(sorted({each.job for each in fitted}))}; how jobs differ is not in the intervals.",
        f"Constants (95 % interval): {_constants(law)}. Errors in nats on a size left out of the fit (root of the mean square over points "
        f"with 4 ranks): {_left_out(fitted)}.",
        "Compared with it, and never fitted. `bits=0.2` is 1.2 % both ways, in the fit on 16 ranks 0.5 % up and 2 % down; with 0.190 and "
        "10.4 M 0.6 % up and 1.8 % down, where averaged second moments, which the law does not know, are new, too:",
        _compared([point for point in points if point.compared], law),
    ]
    return "\n\n".join(sections)


def _predictions(law: Law) -> str:
    *long, short = [f"{steps} steps, {steps * TOKENS_PER_STEP / 1e6:.1f} M tokens" for steps in (*LENGTHS, ONCE_STEPS)]
    heads = ["recipe", "goal", *long, "chance", short, f"measured once, {ONCE_STEPS} steps"]
    cells: list[list[str]] = []
    for each in rows("steps", 4):
        drawn = [law.measured(replace(TARGET, recipe=each.bits, steps=steps)) for steps in (*LENGTHS, ONCE_STEPS)]
        *texts, before = map(_percent, drawn)
        goal, chance, once = "-", "-", "-"
        if each.bits in GOALS:
            within = drawn[-2] <= math.log1p(GOALS[each.bits])
            goal = f"at most +{100 * GOALS[each.bits]:.0f} %"
            chance = f"{100 * within.double().mean().item():.0f} %"
        if each.bits in ONCE:
            _, low, high = quantiles(drawn[-1])
            once = f"{_signed(ONCE[each.bits])}, {_side(ONCE[each.bits], low, high)}"
        cells.append([f"`{each.name}`", goal, *texts, chance, before, once])
    return parts.table(heads, cells)


def _constants(law: Law) -> str:
    drawn = zip(("offset", "ln a", *"bcde"), map(quantiles, law.draws.unbind(1)), strict=True)
    return ", ".join(f"{name} {middle:.3g} ({low:.3g} to {high:.3g})" for name, (middle, low, high) in drawn)


def _left_out(points: Sequence[Point]) -> str:
    sizes = sorted({point.parameters for point in points})
    return ", ".join(f"{error_without(points, size):.3f} at {significant(size / 1e6)} M" for size in sizes)


def error_without(points: Sequence[Point], size: int) -> float:
    """Fit without the points of a size and compute the root mean square error of its points with 4 ranks."""
    law = law_of([point for point in points if point.parameters != size])
    left = [point for point in points if point.parameters == size and point.ranks == 4]
    return math.sqrt(statistics.fmean((quantiles(law.measured(point))[0] - point.gap) ** 2 for point in left))


def _compared(points: Sequence[Point], law: Law) -> str:
    cells: list[list[str]] = []
    for point in points:
        middle, low, high = quantiles(law.measured(point))
        edge = ", best rate at the edge" * (not point.interior)
        half = interval(range(point.seeds)).half  # of seeds whose gaps differ by 1
        if half is not None and point.deviation is not None:
            half *= point.deviation / statistics.stdev(range(point.seeds))
        cells.append(
            [
                point.job,
                f"{significant(point.parameters / 1e6)} M",
                str(point.ranks),
                f"`bits={point.recipe:g}`",
                str(point.seeds),
                interval_text(Interval(point.gap, half)),
                f"{middle:+.3f} ({low:+.3f} to {high:+.3f})",
                f"{_side(point.gap, low, high)}{edge}",
            ]
        )
    heads = "job, size, ranks, recipe, seeds, nats behind dense, law (95 %), comparison"
    return parts.table(heads.split(", "), cells)


def _side(gap: float, low: float, high: float) -> str:
    return f"{'below' if gap < low else 'above' if gap > high else 'within'} the interval"


def _span(values: Iterable[float]) -> str:
    there = sorted(values)
    low, high = (f"{each:,}" if isinstance(each, int) else significant(each) for each in (there[0], there[-1]))
    return low if low == high else f"{low} to {high}"


def _percent(gaps: Float[Tensor, " draws"]) -> str:
    middle, low, high = map(_signed, quantiles(gaps))
    return f"{middle} ({low} to {high})"


def _signed(nats: float) -> str:
    return behind_text(100 * math.expm1(nats))

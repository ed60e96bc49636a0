"""Predict published figures from parameters given in their sources, and write the page that compares them.

Rows are data (`published.toml`): a model of this file, its inputs with their source, and the published figure. A row that determines an
unknown of its set-up is a calibration and does not count; a row whose source lacks inputs is listed with what is missing.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparsync_lab.predict.exchanges import Exchange
from sparsync_lab.predict.network import AllReduce, Link, Nodes
from sparsync_lab.predict.step_time import even_backward, overlapped, periodic, serial
from sparsync_lab.toml import tomllib
from sparsync_lab.writable import write
from studies import parts

GOAL = 0.15  # largest acceptable error, relative to the published figure
LISTED = 0.4  # rows with larger errors have a line on the page
MARK = "<!-- generated: python -m studies published --page docs/published.md -->"
Number = int | float
WORD = 4  # bytes of a position or a float32 value


@dataclass(frozen=True)
class PublishedRow:
    """A published figure and its prediction. `predicted` is None if the source lacks inputs."""

    name: str
    what: str
    kind: str  # of KINDS; empty without a model
    source: str
    predicted: float | None
    counted: bool
    unit: str = ""
    published: float | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)  # Any: numbers, and names of links
    inputs_source: str = ""
    added: bool = False  # after the first comparison
    why: str = ""  # cause of a miss, missing inputs, or reason not to count

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; positive if it exceeds the published figure."""
        if self.predicted is None or not self.published:
            return None
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class LinkClass:
    """One assumption for all rows with links of a kind."""

    efficiency: float
    latency_s: float
    why: str


def main(argv: Sequence[str]) -> None:
    """Print the rows as JSON, or write the page."""
    parser = parts.options("published", __doc__, writes=False)
    parser.add_argument("--page", type=Path, default=None, metavar="FILE.md", help="write the page")
    given = parser.parse_args(argv)
    if given.page is None:
        print(json.dumps([{**asdict(row), "error": row.error} for row in rows()[0]], indent=1))
    else:
        write(given.page, page())


def rows() -> tuple[list[PublishedRow], dict[str, LinkClass]]:
    """Predict all rows, in file order; also returns their common assumptions."""
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    classes = {name: LinkClass(**each) for name, each in content["links"].items()}
    found: list[PublishedRow] = []
    for each in content["row"]:
        model = each.pop("model", None)
        predicted = None if model is None else float(MODELS[model](classes, **each.get("inputs", {})))
        each["counted"] = each.get("counted", True) and predicted is not None
        found.append(PublishedRow(kind="" if model is None else KINDS[MODELS[model]], predicted=predicted, **each))
    return found, classes


def counted(found: Sequence[PublishedRow]) -> list[float]:
    """List the absolute values of errors that count."""
    return [abs(row.error) for row in found if row.counted and row.error is not None]


# The models. Each takes the link classes and the inputs of a row.


def network(
    classes: Mapping[str, LinkClass],
    link: str,
    gbit_per_s: Number,
    ranks_per_node: int = 1,
    links_per_node: int = 1,
    inside: str = "",
    inside_gbit_per_s: Number = 0.0,
    all_reduce: AllReduce = "best",
) -> Nodes:
    """Build the network of a row; NCCL's all_gather is a ring."""
    chosen = classes[link]
    between = Link(gbit_per_s * 1e9, chosen.latency_s).times(chosen.efficiency)
    if ranks_per_node == 1:
        return Nodes(between, all_reduce=all_reduce, rings=("all_gather",))
    near = classes[inside]
    within = Link(inside_gbit_per_s * 1e9, near.latency_s).times(near.efficiency)
    return Nodes(between.times(links_per_node), ranks_per_node, within, all_reduce, ("all_gather",))


def all_reduce(nbytes: Number, P: int) -> Exchange:
    """Make the ring all_reduce of a tensor of `nbytes` bytes."""
    sent = 2 * (P - 1) / P * nbytes
    return Exchange("all_reduce", sent, 2 * (P - 1), 2 * (P - 1), sent, "ring")


def all_reduce_s(classes: Mapping[str, LinkClass], nbytes: Number, ranks: int, **links: Any) -> float:
    """Predict the seconds of one all_reduce."""
    return network(classes, **links).seconds(all_reduce(nbytes, ranks), ranks)


def bus_gbyte_per_s(classes: Mapping[str, LinkClass], ranks: int, nbytes: Number = 2**33, **links: Any) -> float:
    """Predict nccl-tests' bus bandwidth of an all_reduce in GB/s, for 8 GiB by default."""
    return 2 * (ranks - 1) / ranks * nbytes / all_reduce_s(classes, nbytes, ranks, **links) / 1e9


def all_reduce_from(
    classes: Mapping[str, LinkClass],
    reference_s: Number,
    reference_ranks: int,
    nbytes: Number,
    ranks: int,
    **links: Any,
) -> float:
    """Predict the seconds of an all_reduce on links whose true rate follows from another: `reference_s` at `reference_ranks`."""
    there = all_reduce_s(classes, nbytes, reference_ranks, **links)
    return reference_s * all_reduce_s(classes, nbytes, ranks, **links) / there


def step_s(
    classes: Mapping[str, LinkClass],
    forward_s: Number,
    backward_s: Number,
    nbytes: Number,
    ranks: int,
    after_s: Number = 0.0,
    bucket_mb: Number = 25.0,
    overlap: bool = True,
    times: int = 1,
    **links: Any,
) -> float:
    """Predict `times` data-parallel steps with equal buckets, reduced in sequence while the backward pass runs."""
    count = max(1, math.ceil(nbytes / (bucket_mb * 2**20)))
    each = network(classes, **links).seconds(all_reduce(nbytes / count, ranks), ranks)
    backward = even_backward([1] * count, forward_s, backward_s, after_s)
    return times * (overlapped if overlap else serial)(backward, [each] * count).step_s


def efficiency(
    classes: Mapping[str, LinkClass], forward_s: Number, backward_s: Number, after_s: Number = 0.0, **inputs: Any
) -> float:
    """Predict the percentage of the step that is not lost to communication."""
    step = step_s(classes, forward_s=forward_s, backward_s=backward_s, after_s=after_s, **inputs)
    return 100 * (forward_s + backward_s + after_s) / step


def throughput(classes: Mapping[str, LinkClass], samples: Number, **inputs: Any) -> float:
    """Predict a rank's samples per second."""
    return samples / step_s(classes, **inputs)


def wire_halved(
    classes: Mapping[str, LinkClass], forward_s: Number, backward_s: Number, measured: Number, share: float
) -> float:
    """Predict a step whose reductions become `share` times as long, from the step measured before.

    With many buckets, communication begins with the first bucket: step = forward + communication, if that is longer than the backward
    pass.
    """
    return forward_s + max(backward_s, share * (measured - forward_s))


def half_precision_hours(
    classes: Mapping[str, LinkClass], hours: Number, steps: Number, nbytes: Number, ranks: int, **links: Any
) -> float:
    """Predict the hours of a run whose gradients are sent in half the bytes, with communication exposed before and after."""
    dense = all_reduce_s(classes, nbytes, ranks, **links)
    half = all_reduce_s(classes, nbytes / 2, ranks, **links)
    return hours - steps * (dense - half) / 3600


def data_parallel_hours(
    classes: Mapping[str, LinkClass], steps: Number, compute_s: Number, nbytes: Number, ranks: int, **links: Any
) -> float:
    """Predict the hours of data-parallel training whose all_reduce overlaps the whole backward pass, two thirds of the step."""
    exchange = all_reduce_s(classes, nbytes, ranks, **links)
    return steps * (compute_s / 3 + max(2 / 3 * compute_s, exchange)) / 3600


def local_steps_hours(
    classes: Mapping[str, LinkClass],
    steps: Number,
    compute_s: Number,
    nbytes: Number,
    ranks: int,
    every: int,
    fragments: int,
    delay: int,
    **links: Any,
) -> float:
    """Predict the hours of a training that exchanges fragments of its weights every few steps."""
    exchange = all_reduce_s(classes, nbytes, ranks, **links)
    return steps * periodic(even_backward([1], 0.0, compute_s), every, exchange, fragments, delay).step_s / 3600


def one_bit_speedup(
    classes: Mapping[str, LinkClass],
    compute_s: Number,
    elements: Number,
    ranks: int,
    reference_s: Number,
    reference_ranks: int,
    warm_up: Number,
    **links: Any,
) -> float:
    """Predict the speed-up of a run with 1-bit Adam's exchange: an all_to_all and an all_gather of one bit per element.

    Nothing overlaps; the links' true rate follows from the measured all_reduce in 16 bits, `reference_s` at `reference_ranks`. `warm_up`
    is the share of dense steps.
    """
    there = all_reduce_s(classes, 2 * elements, reference_ranks, **links)
    dense = reference_s / there * all_reduce_s(classes, 2 * elements, ranks, **links)
    sent = (ranks - 1) / ranks * elements / 8
    built = network(classes, **links)
    kinds = ("all_to_all", "all_gather")
    compressed = sum(built.seconds(Exchange(kind, sent, ranks - 1, 1, sent), ranks) for kind in kinds)
    quick, slow = compute_s + reference_s / there * compressed, compute_s + dense
    return slow / (warm_up * slow + (1 - warm_up) * quick)


def sparse_speedup(classes: Mapping[str, LinkClass], against: str, **inputs: Any) -> float:
    """Predict Ok-Topk's speed-up over the fastest or slowest of its baselines; for `inputs` see `sparse_steps`."""
    ours, baselines = sparse_steps(classes, **inputs)
    return (min if against == "quickest" else max)(baselines.values()) / ours


def sparse_steps(
    classes: Mapping[str, LinkClass],
    compute_s: Number,
    elements: Number,
    density: Number,
    ranks: int,
    memory_gb_per_s: Number,
    topk_ns: Number,
    copy_gb_per_s: Number,
    host_gb_per_s: Number,
    sort_ns: Number,
    region_us: Number,
    **links: Any,
) -> tuple[float, dict[str, float]]:
    """Predict the seconds of a step with Ok-Topk and with each of its baselines, in the authors' implementation.

    Volumes follow arXiv 2201.07598, table 1, in words: dense 2n(P-1)/P; TopkA and Gaussiank 2k(P-1); TopkDSA 2k(P-1)/P, then the union of
    all selections; gTopk 4k log2 P; Ok-Topk at most 6k(P-1)/P in 2P messages. The rest is from the authors' code
    (github.com/Shigangli/Ok-Topk, BERT/bert/allreducer.py at 9763dcc):

    - Each sparse scheme passes once over the gradient, its residual and its selection on the GPU: 12 bytes per element.
    - TopkA, TopkDSA and gTopk select with torch.topk in each step, `topk_ns` per element; Ok-Topk does so every 128 steps for its two
      thresholds.
    - MPI exchanges everything from arrays in host memory, with copies there and back (`copy_gb_per_s`).
    - One core of the host processes these arrays (`host_gb_per_s` of bytes read or written): it sums the dense gradient (two arrays read,
      one written, and the result's buffer cleared), clears the buffer for all ranks' selections, and for TopkA widens positions from 4
      bytes to 8.
    - gTopk merges two selections in each of log2 P rounds with NumPy's intersect1d and argsort: 6k elements sorted, `sort_ns` each.
      Ok-Topk searches k positions in k sorted ones, with as many comparisons as sorting them.
    - Ok-Topk and TopkDSA call PyTorch twice for each of P regions, to cut them out and to add them up (`region_us`); TopkA and Gaussiank
      do so for each of P selections.
    """
    built, P, k = network(classes, **links), ranks, density * elements
    share, rounds = (P - 1) / P, math.ceil(math.log2(P))
    select_s, regions_s = 1e-9 * topk_ns * elements, 1e-6 * region_us * P
    sparse_s = compute_s + 12 * elements / (memory_gb_per_s * 1e9)
    union = min(elements, k * P**0.6)  # an estimate, as in the schemes' closed forms
    pairs = 2 * WORD * k * P  # the bytes of all ranks' selections

    def exchanged(words: Number, steps: Number) -> float:
        return built.seconds(Exchange("send_recv", WORD * words, steps, steps, WORD * words, "ring"), P)

    def copied(nbytes: Number) -> float:
        return nbytes / (copy_gb_per_s * 1e9)

    def worked(nbytes: Number) -> float:
        return nbytes / (host_gb_per_s * 1e9)

    def sorted_s(count: Number) -> float:
        return 1e-9 * sort_ns * count

    n = WORD * elements
    gathered_s = sparse_s + exchanged(2 * k * (P - 1), P - 1) + regions_s
    baselines = {
        "dense": compute_s + built.seconds(all_reduce(n, P), P) + copied(2 * n) + worked(4 * n),
        "Gaussiank": gathered_s + worked(pairs) + copied(pairs),
        "TopkA": gathered_s + select_s + worked(1.5 * pairs) + copied(1.5 * pairs),
        "TopkDSA": sparse_s
        + select_s
        + exchanged(2 * k * share, P)
        + exchanged(2 * union * share, P)
        + worked(2 * WORD * union)
        + copied(2 * WORD * union)
        + 2 * regions_s,
        "gTopk": sparse_s + select_s + exchanged(4 * k * rounds, 2 * rounds) + sorted_s(6 * k * rounds),
    }
    ours = sparse_s + (select_s + 1e-9 * topk_ns * union) / 128
    ours += exchanged(6 * k * share, 2 * P) + copied(4 * WORD * k) + sorted_s(k) + 2 * regions_s
    return ours, baselines


def skipped_ring_speedup(classes: Mapping[str, LinkClass], ranks: int, skipped: int) -> float:
    """Predict the speed-up of a ring all_reduce without its first `skipped` reduce-scatter steps."""
    return 2 * (ranks - 1) / (2 * (ranks - 1) - skipped)


EXCHANGE, STEP, GAIN = "an exchange alone", "a step, or how steps scale", "what sending less gains"
KINDS: dict[Callable[..., float], str] = {
    all_reduce_s: EXCHANGE,
    bus_gbyte_per_s: EXCHANGE,
    all_reduce_from: EXCHANGE,
    step_s: STEP,
    efficiency: STEP,
    throughput: STEP,
    data_parallel_hours: STEP,
    wire_halved: GAIN,
    half_precision_hours: GAIN,
    local_steps_hours: GAIN,
    one_bit_speedup: GAIN,
    sparse_speedup: GAIN,
    skipped_ring_speedup: GAIN,
}
MODELS = {model.__name__: model for model in KINDS}


# The page.


def summary(found: Sequence[PublishedRow]) -> list[str]:
    """Tabulate the errors by kind of prediction, in Markdown."""
    lines = [f"| predicted | rows counted | within {100 * GOAL:.0f} % | median error |", "| --- | ---: | ---: | ---: |"]
    for kind in dict.fromkeys(KINDS.values()):
        errors = [abs(row.error) for row in found if row.kind == kind and row.counted and row.error is not None]
        within = sum(error <= GOAL for error in errors)
        lines.append(f"| {kind} | {len(errors)} | {within} | {100 * statistics.median(errors):.0f} % |")
    return lines


def page() -> str:
    """Format the page that compares all rows, in Markdown."""
    found, classes = rows()
    missing = sum(row.predicted is None or not row.published for row in found)
    lines = [
        "# Published figures, predicted",
        "",
        MARK,
        "",
        "Each row compares a published figure with what `sparsync_lab.predict` says of that set-up, from parameters in the same source or",
        "one assumption for all links of a kind. [studies/published.toml](../studies/published.toml) has the sources, the cause of each",
        f"miss, every change made to the model after the first comparison, and {missing} rows whose source states too little to compare.",
        "The published figures were known when rows and model were written.",
        "",
        "    python -m studies published --page docs/published.md",
        "",
        f"**{_tally(found)}** The first comparison had 36 rows, 16 of them within 15 %, and a median error of 20 %. Of those rows "
        f"{_tally([row for row in found if not row.added], 'are still counted')} Errors are relative to the published figure.",
        "",
        *summary(found),
        "",
        "| links | share of the rate that payload gets | latency |",
        "| --- | ---: | ---: |",
    ]
    lines += [f"| {name} | {each.efficiency:g} | {1e6 * each.latency_s:g} µs |" for name, each in classes.items()]
    lines += [
        "",
        f"Rows that are more than {100 * LISTED:.0f} % off; `python -m studies published` prints all:",
        "",
        "| row | predicted | published | error |",
    ]
    lines += ["| --- | ---: | ---: | ---: |"]
    lines += [_row(row) for row in found if row.counted and row.error is not None and abs(row.error) > LISTED]
    return "\n".join(lines) + "\n"


def _tally(found: Sequence[PublishedRow], named: str = "rows counted") -> str:
    errors = counted(found)
    within = sum(error <= GOAL for error in errors)
    return f"{len(errors)} {named}: median error {100 * statistics.median(errors):.0f} %, {within} of them within {100 * GOAL:.0f} %."


def _row(row: PublishedRow) -> str:
    assert row.error is not None
    values = f"{_value(row.predicted, row.unit)} | {_value(row.published, row.unit)}"
    return f"| {row.what} ({row.source.partition(':')[0]}) | {values} | {100 * row.error:+.0f} % |"


def _value(value: Number | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "s" and value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}".strip()

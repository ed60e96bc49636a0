"""Published figures, each predicted from the parameters that its own source gives, and the page that compares the two.

Rows are data (`published.toml`): a model of this file, its inputs with their source, and the published figure. A row that fixes an unknown
of its set-up is a calibration and is not counted; a row whose source says too little to predict it is listed with what is missing.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import tomllib

from sparsync.comm.plan import Exchange
from sparsync.predict.network import Link, Tiers, flat_switch, nodes
from sparsync.predict.timeline import even_buckets, overlapped, periodic, serial

GOAL = 0.15  # of the published figure: how far off a prediction may be
MARK = "<!-- generated: sparsync simulate --published --page docs/published.md -->"
Number = int | float
WORD = 4  # bytes of a position or a float32 value


@dataclass(frozen=True)
class Row:
    """A published figure and its prediction. `predicted` is None where the source says too little."""

    name: str
    what: str
    kind: str  # of KINDS; empty without a model
    unit: str
    published: float | None
    source: str
    inputs: Mapping[str, Any]  # Any: numbers, and names of links
    inputs_source: str
    predicted: float | None
    counted: bool
    why: str  # of a miss, of what is missing, or of what is not counted

    @property
    def error(self) -> float | None:
        """By which share the prediction is above the published figure."""
        if self.predicted is None or not self.published:
            return None
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class LinkClass:
    """One assumption for all rows with links of a kind."""

    efficiency: float
    latency_s: float
    why: str


def rows() -> tuple[list[Row], dict[str, LinkClass]]:
    """Return all rows, predicted, in the order of the file, and the assumptions that they share."""
    content = tomllib.loads(files("sparsync").joinpath("lab", "simulate", "published.toml").read_text("utf-8"))
    classes = {name: LinkClass(**each) for name, each in content["links"].items()}
    found = []
    for each in content["row"]:
        inputs = dict(each.get("inputs", {}))
        model = each.get("model")
        predicted = None if model is None else float(MODELS[model](classes, **inputs))
        counted = each.get("counted", True) and predicted is not None
        found.append(
            Row(
                each["name"],
                each["what"],
                "" if model is None else KINDS[model],
                each.get("unit", ""),
                each.get("published"),
                each["source"],
                inputs,
                each.get("inputs_source", ""),
                predicted,
                counted,
                each.get("why", ""),
            )
        )
    return found, classes


def counted(found: list[Row]) -> list[float]:
    """Return the errors that count, without their signs."""
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
) -> Tiers:
    """Return the network of a row; NCCL's all_reduce takes the quicker of ring and tree, and its all_gather is a ring."""
    chosen = classes[link]
    between = Link(gbit_per_s * 1e9, chosen.latency_s).derated(chosen.efficiency)
    if ranks_per_node == 1:
        return flat_switch(between, all_reduce="best", rings=("all_gather",))
    near = classes[inside]
    within = Link(inside_gbit_per_s * 1e9, near.latency_s).derated(near.efficiency)
    return nodes(within, between, ranks_per_node, links_per_node, all_reduce="best", rings=("all_gather",))


def all_reduce(nbytes: Number, P: int) -> Exchange:
    """Return the ring all_reduce of a tensor of so many bytes."""
    sent = 2 * (P - 1) / P * nbytes
    return Exchange("all_reduce", sent, 2 * (P - 1), 2 * (P - 1), sent, "ring")


def all_reduce_s(classes: Mapping[str, LinkClass], nbytes: Number, ranks: int, **links: Any) -> float:
    """Return the seconds of one all_reduce."""
    return network(classes, **links).seconds(all_reduce(nbytes, ranks), ranks)


def bus_gbyte_per_s(classes: Mapping[str, LinkClass], ranks: int, nbytes: Number = 2**33, **links: Any) -> float:
    """Return what nccl-tests calls the bus bandwidth of an all_reduce, in GB/s; of 8 GiB."""
    return 2 * (ranks - 1) / ranks * nbytes / all_reduce_s(classes, nbytes, ranks, **links) / 1e9


def all_reduce_from(
    classes: Mapping[str, LinkClass],
    reference_s: Number,
    reference_ranks: int,
    nbytes: Number,
    ranks: int,
    **links: Any,
) -> float:
    """Return the seconds of an all_reduce on links whose true rate another all_reduce has shown: `reference_s` at `reference_ranks`."""
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
    """Return `times` steps of data-parallel training: equal buckets, reduced one after the other while the backward pass runs."""
    count = max(1, math.ceil(nbytes / (bucket_mb * 2**20)))
    each = network(classes, **links).seconds(all_reduce(nbytes / count, ranks), ranks)
    if not overlap:
        return times * serial([each] * count, forward_s + backward_s, after_s).step_s
    ready = even_buckets(forward_s, backward_s, count)
    return times * overlapped(ready, [each] * count, forward_s + backward_s, after_s).step_s


def efficiency(
    classes: Mapping[str, LinkClass], forward_s: Number, backward_s: Number, after_s: Number = 0.0, **inputs: Any
) -> float:
    """Return the share of the step, in percent, that is not lost to communication."""
    step = step_s(classes, forward_s=forward_s, backward_s=backward_s, after_s=after_s, **inputs)
    return 100 * (forward_s + backward_s + after_s) / step


def throughput(classes: Mapping[str, LinkClass], samples: Number, **inputs: Any) -> float:
    """Return the samples of a rank a second."""
    return samples / step_s(classes, **inputs)


def wire_halved(
    classes: Mapping[str, LinkClass], forward_s: Number, backward_s: Number, measured: Number, share: float
) -> float:
    """Return a step after its reductions have become `share` times as long, from the step as it was measured before.

    Buckets are many, so communication lasts from the first bucket on: step = forward + communication, where that is longer than the
    backward pass.
    """
    return forward_s + max(backward_s, share * (measured - forward_s))


def half_precision_hours(
    classes: Mapping[str, LinkClass], hours: Number, steps: Number, nbytes: Number, ranks: int, **links: Any
) -> float:
    """Return the hours of a run whose gradients are sent in half the bytes, where communication is exposed before and after."""
    dense = all_reduce_s(classes, nbytes, ranks, **links)
    half = all_reduce_s(classes, nbytes / 2, ranks, **links)
    return hours - steps * (dense - half) / 3600


def data_parallel_hours(
    classes: Mapping[str, LinkClass], steps: Number, compute_s: Number, nbytes: Number, ranks: int, **links: Any
) -> float:
    """Return the hours of data-parallel training whose all_reduce overlaps the whole backward pass, two thirds of the step."""
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
    """Return the hours of a training that exchanges fragments of its weights every so many steps."""
    exchange = all_reduce_s(classes, nbytes, ranks, **links)
    return steps * periodic(compute_s, every, exchange, fragments, delay) / 3600


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
    """Return how many times as quick a run is with 1-bit Adam's exchange: an all_to_all and an all_gather of one bit an element.

    Nothing overlaps; the links' true rate is that of the measured all_reduce in 16 bits, `reference_s` at `reference_ranks`. `warm_up` is
    the share of the steps that are dense.
    """
    there = all_reduce_s(classes, 2 * elements, reference_ranks, **links)
    dense = reference_s / there * all_reduce_s(classes, 2 * elements, ranks, **links)
    sent = (ranks - 1) / ranks * elements / 8
    built = network(classes, **links)
    kinds = ("all_to_all", "all_gather")
    compressed = sum(built.seconds(Exchange(kind, sent, ranks - 1, 1, sent), ranks) for kind in kinds)
    quick, slow = compute_s + reference_s / there * compressed, compute_s + dense
    return slow / (warm_up * slow + (1 - warm_up) * quick)


def sparse_speedup(
    classes: Mapping[str, LinkClass],
    compute_s: Number,
    elements: Number,
    density: Number,
    ranks: int,
    memory_gb_per_s: Number,
    against: str,
    **links: Any,
) -> float:
    """Return Ok-Topk's speed-up over the quickest or the slowest of its baselines, from the volumes of each (arXiv 2201.07598, table 1).

    Volumes in words: dense 2n(P-1)/P; TopkA 2k(P-1); TopkDSA at worst (2k+n)(P-1)/P; gTopk 4k log2 P; Gaussiank as TopkA; Ok-Topk at most
    6k(P-1)/P in 2P messages. Each sparse scheme passes over the accumulated gradient, its residual and its selection once: 12 bytes an
    element.
    """
    built, P, k = network(classes, **links), ranks, density * elements
    passes_s = 12 * elements / (memory_gb_per_s * 1e9)
    share, rounds = (P - 1) / P, math.ceil(math.log2(P))

    def exchanged(words: Number, steps: Number, kind: str = "send_recv") -> float:
        return built.seconds(Exchange(kind, WORD * words, steps, steps, WORD * words, "ring"), P)  # pyright: ignore[reportArgumentType]

    ours = compute_s + passes_s + exchanged(6 * k * share, 2 * P)
    baselines = [
        compute_s + built.seconds(all_reduce(WORD * elements, P), P),
        compute_s + passes_s + exchanged(2 * k * (P - 1), P - 1),
        compute_s + passes_s + exchanged((2 * k + elements) * share, P),
        compute_s + passes_s + exchanged(4 * k * rounds, 2 * rounds),
    ]
    return (min(baselines) if against == "quickest" else max(baselines)) / ours


def skipped_ring_speedup(classes: Mapping[str, LinkClass], ranks: int, skipped: int) -> float:
    """Return how many times as quick a ring all_reduce is without its first `skipped` reduce-scatter steps."""
    return 2 * (ranks - 1) / (2 * (ranks - 1) - skipped)


MODELS: dict[str, Callable[..., float]] = {
    model.__name__: model
    for model in (
        all_reduce_s,
        bus_gbyte_per_s,
        all_reduce_from,
        step_s,
        efficiency,
        throughput,
        wire_halved,
        half_precision_hours,
        data_parallel_hours,
        local_steps_hours,
        one_bit_speedup,
        sparse_speedup,
        skipped_ring_speedup,
    )
}


EXCHANGE, STEP, GAIN = "an exchange alone", "a step, or how steps scale", "what sending less gains"
KINDS = {
    "all_reduce_s": EXCHANGE,
    "bus_gbyte_per_s": EXCHANGE,
    "all_reduce_from": EXCHANGE,
    "step_s": STEP,
    "efficiency": STEP,
    "throughput": STEP,
    "data_parallel_hours": STEP,
    "wire_halved": GAIN,
    "half_precision_hours": GAIN,
    "local_steps_hours": GAIN,
    "one_bit_speedup": GAIN,
    "sparse_speedup": GAIN,
    "skipped_ring_speedup": GAIN,
}


# The page.


def summary(found: Sequence[Row]) -> list[str]:
    """Return the table of errors by what is predicted, in Markdown."""
    lines = [
        f"| predicted | rows counted | within {100 * GOAL:.0f} % | median error | errors |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for kind in dict.fromkeys(KINDS.values()):
        errors = sorted(row.error for row in found if row.kind == kind and row.counted and row.error is not None)
        within = sum(abs(error) <= GOAL for error in errors)
        median = statistics.median(map(abs, errors))
        listed = ", ".join(f"{100 * error:+.0f}" for error in errors)
        lines.append(f"| {kind} | {len(errors)} | {within} | {100 * median:.0f} % | {listed} % |")
    return lines


def page() -> str:
    """Return the page that compares all rows, in Markdown."""
    found, classes = rows()
    errors = counted(found)
    within = sum(error <= GOAL for error in errors)
    lines = [
        "# Published figures, predicted",
        "",
        MARK,
        "",
        "Each row is a figure that somebody has published, and what `sparsync.predict` says of that set-up from the parameters in the",
        "same source. Nothing is fitted to a row: what a source does not say is one assumption for all links of a kind, or is marked as",
        "assumed. The published figures were known when the rows were written. No input was changed afterwards, save where a row says so",
        "and is not counted.",
        "",
        "    sparsync simulate --published --page docs/published.md",
        "",
        f"**{len(errors)} rows counted: median error {100 * statistics.median(errors):.0f} %, {within} of them within "
        f"{100 * GOAL:.0f} %.** Most misses predict too quick an exchange: the model knows neither congestion nor stragglers, nor the "
        "time that a GPU loses to the kernels that communicate. Errors are of the figure as published: 93 % of scaling efficiency for 90 % "
        "is an error of 3 %, though of 28 % in what is lost.",
        "",
        *summary(found),
        "",
        "| links | share of the rate that payload gets | latency | why |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {each.efficiency:g} | {1e6 * each.latency_s:g} µs | {each.why} |" for name, each in classes.items()
    ]
    lines += ["", "| row | predicted | published | error | why |", "| --- | ---: | ---: | ---: | --- |"]
    lines += [_row(row) for row in found if row.predicted is not None and row.published]
    missing = [row for row in found if row.predicted is None or not row.published]
    lines += ["", "## Rows without a comparison", "", "| row | what is known | why |", "| --- | --- | --- |"]
    lines += [
        f"| {row.what} ({row.source}) | {_value(row.predicted or row.published, row.unit)} | {row.why} |"
        for row in missing
    ]
    lines += [
        "",
        "## Inputs",
        "",
        "| row | source of the figure | inputs | source of the inputs |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.what} | {row.source} | {', '.join(f'{key} {_plain(value)}' for key, value in row.inputs.items())} | {row.inputs_source} |"
        for row in found
        if row.predicted is not None
    ]
    return "\n".join(lines) + "\n"


def _row(row: Row) -> str:
    assert row.error is not None
    why = row.why if row.counted else f"not counted: {row.why}"
    values = f"{_value(row.predicted, row.unit)} | {_value(row.published, row.unit)}"
    return f"| {row.what} | {values} | {100 * row.error:+.0f} % | {why} |"


def _value(value: Number | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "s" and value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}".strip()


def _plain(value: Any) -> str:  # Any: of TOML
    return f"{value:.6g}" if isinstance(value, float) else str(value)

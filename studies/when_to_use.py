"""Writes "when to use what" of docs/advise.md: ranks x link -> method, for SGD and for AdamW, and how each method is written.

    .venv/bin/python -m studies when_to_use [--print]

Predicted from the closed forms, with assumptions that stand under the table: accelerators that compute at RATE, and a flat network. The
factor of extra steps of a method is the largest that it had in the trainings of `sparsync advise`. Nothing is measured here.
"""

from collections.abc import Mapping, Sequence

from sparsync.base import registry
from sparsync.base.scheme_text import STEPS
from sparsync_lab.advise import extra_steps
from sparsync_lab.advise.command import even_backward, step
from sparsync_lab.predict import advice
from sparsync_lab.predict.advice import Extra
from sparsync_lab.predict.network import Link, flat_switch
from sparsync_lab.predict.probe_file import KERNELS, Kernel, Latency, Memory, Probe, ProbedGroup
from sparsync_lab.report.format import significant
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from studies import parts

PAGE, PART = "docs/advise.md", "when to use what"
RANKS = (4, 16, 64)
LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}
PARAMETERS = 100_000_000
TOKENS = 8192  # of a rank in a step
RATE = 1e14  # floating-point operations a rank does in a second; 6 for each parameter and token (arXiv:2001.08361)
LATENCY_S = 50e-6
MEMORY = 1e12  # bytes/s of a rank's memory
KERNEL_RATE = MEMORY / 40  # elements/s of each kind of kernel: some ten passes of 4 bytes
CALL_S = 20e-6
ANNOUNCE_S = 100e-6
STEPS_08 = "steps/two_shot:density=0.03:values=sign:density_down=0.12"
# Methods are left out beyond this number of ranks, where they lose more or were not tried (docs/frontier.md).
MOST_RANKS = {STEPS_08: 16}
MOST_EXTRA = 2.0  # what needs more steps than so may not get there at all
MARGIN = 1.1  # the upper end of a factor, times the largest that was measured
SHORT = {
    "two_shot:density=1.0:values=int4": "`two_shot`, all in int4",
    "two_shot:density=0.05:values=int4": "`two_shot`, 5 % in int4",
    "topk:density=0.01:values=int8": "`topk`, 1 % in int8",
    "oktopk:density=0.01:values=int8": "`oktopk`, 1 % in int8",
    "micro:density=0.01:values=int8": "`micro`, 1 % in int8",
    "skip_reduce:skip=1": "`skip_reduce`, 1 step",
    "local_steps(every=4)/two_shot:density=1.0:values=int4": "local steps, every 4, int4",
    "local_steps(every=8)/dense": "local steps, every 8",
    STEPS_08: "AdamW steps, 0.8 bits",
    "bf16": "dense bf16",
}


def main(argv: Sequence[str]) -> None:
    options = parts.options("when_to_use", __doc__).parse_args(argv)
    parts.put(PAGE, PART, table(), options.print)


def table() -> str:
    """Return the table as Markdown, its assumptions, and a table of its methods as they are written."""
    heads = ["link of a rank", *(f"{P} ranks, {kind}" for kind in ("SGD", "AdamW") for P in RANKS)]
    answers = [
        [answer(P, bits_per_s, PARAMETERS, adaptive) for adaptive in (False, True) for P in RANKS]
        for bits_per_s in LINKS.values()
    ]
    rows = [[link, *map(cell, found)] for link, found in zip(LINKS, answers, strict=True)]
    chosen = {label for found in answers for label, _ in found}
    lines = [
        parts.table(heads, rows),
        "",
        f"Predicted, not measured: speed-up over dense bf16 (time to dense's quality) for {PARAMETERS / 1e6:g} M parameters. Assumed: "
        f"{TOKENS} tokens per",
        f"rank and step at {RATE / 1e12:g} TFLOP/s, a flat network with {1e6 * LATENCY_S:g} µs latency, buckets of 25 MB, memory of "
        f"{MEMORY / 1e9:g} GB/s, kernels at a",
        "tenth of it (none was timed on a GPU). Extra steps are the most seen in trainings of small models on 4 ranks "
        "([below](#how-extra-steps-are-estimated));",
        f"methods that needed more than {MOST_EXTRA:g} times the steps are left out.",
        "",
        parts.table(
            ["method", "in commands", "in a script"],
            [[SHORT[label], f"`{label}`", f"`{in_python(label)}`"] for label in SHORT if label in chosen],
        ),
    ]
    return "\n".join(lines)


def in_python(label: str) -> str:
    """Return the line that reduces with a method."""
    (choice,) = parse_schemes(label, 0.01)
    made = f"sparsync.{registry.where(choice.name).rpartition(':')[2]}{_arguments(choice.config)}"
    return f"sparsync.attach(model, {made}, optimizer=optimizer{_exchange(choice)})"


def _exchange(choice: SchemeChoice) -> str:
    return "" if choice.local is None else f", exchange=sparsync.{STEPS[choice.steps]}{_arguments(choice.local)}"


def _arguments(settings: Mapping[str, object]) -> str:
    given = (f"{key}={value!r}".replace("'", '"') for key, value in settings.items())
    return f"({', '.join(given)})"


def cell(found: tuple[str, float]) -> str:
    """Return a verdict in words."""
    label, gain = found
    return SHORT[label] + ("" if label == "bf16" else f", {significant(gain, 2)}x")


def answer(P: int, bits_per_s: float, n: int, adaptive: bool) -> tuple[str, float]:
    """Return the label of the method to use, and its speed-up over dense bf16."""
    factors: dict[str, float] = {}
    for each in extra_steps.trainings():
        if each.adaptive == adaptive:
            factors[each.method] = max(factors.get(each.method, 1.0), each.factor)
    others = [
        label for label in SHORT if MOST_RANKS.get(label, P) >= P and factors.get(label, MOST_EXTRA + 1) <= MOST_EXTRA
    ]
    labels = ["dense", "bf16", *others]
    compute_s = 6 * n * TOKENS / RATE
    backward = even_backward(n, 25.0, compute_s / 3, 2 * compute_s / 3, 0.0)
    probe = Probe(
        ProbedGroup(P, "assumed", P, "assumed", "cuda", 8, "", ""),
        (),
        Latency(2 * LATENCY_S, 2 * LATENCY_S, 0.0, 1.0, ANNOUNCE_S),
        Memory(MEMORY),
        tuple(Kernel(kind, KERNEL_RATE, CALL_S) for kind in KERNELS),
    )
    network = flat_switch(Link(bits_per_s, LATENCY_S), all_reduce="best")
    steps = {each.label: step(each, probe, backward, network) for each in parse_schemes(",".join(labels), 0.01)}
    extra = {label: Extra(factors[label], 1.0, MARGIN * factors[label]) for label in labels if label in factors}
    chosen = advice.verdict(steps, extra).label
    return chosen, steps["bf16"].step_s / (steps[chosen].step_s * extra.get(chosen, Extra()).factor)

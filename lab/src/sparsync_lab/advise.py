"""`sparsync advise`: the predicted step of each method on the group of a probe, what its quality is known to be, and which to use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparsync.recipes import Family, Recipe, bits_of, recipe, rows
from sparsync_lab.labels import short_labels
from sparsync_lab.predict import advice
from sparsync_lab.predict.advice import BASELINES, PredictedStep, Recommendation
from sparsync_lab.predict.exchanges import Exchange
from sparsync_lab.predict.network import Network
from sparsync_lab.predict.probe_file import Backward, Probe
from sparsync_lab.predict.probed import ProbedNetwork
from sparsync_lab.report.format import significant
from sparsync_lab.scheme_choice import SchemeChoice, check_labels
from sparsync_lab.slow_kernels import SLOW_KERNELS, SLOW_KERNELS_FIX
from sparsync_lab.terminal import NOTHING, WIDTH, Table, lines_of
from sparsync_lab.workloads import one_process
from sparsync_lab.workloads.base import Workload

FAR = 32  # times the largest measured exchange of its kind, beyond which a prediction is marked as a guess
OTHERS = (
    "local_steps(every=4)/two_shot:density=1.0:values=int4",
    "topk:density=0.01:values=int8",
    "exact_oktopk:density=0.01:values=int8",
)
_LITTLE = 0.1  # of a step, below which what it waits for is not worth shortening
HEADS = (
    "method",
    "step\nms",
    "\nhidden",
    "x\ndense",
    "x\nbf16",
    "bits\nsent",
    "state\nMB",
    "quality after\n1000 steps",
)


@dataclass(frozen=True)
class Advice:
    """The prediction of every method, what is known of its quality, and the verdict."""

    elements: int
    steps: Mapping[str, PredictedStep]
    quality: Mapping[str, str]  # of the plain all-reduces and the recipes; of other methods it is not known
    verdict: Recommendation
    fixed_s: float  # of bf16's reductions, what they take however few bytes there are
    attach: str = ""  # the line that uses the method of the verdict, where it is a recipe


def advised_schemes(family: Family, ranks: int) -> str:
    """Return the methods that are predicted unless others are named: the plain all-reduces, the recipes, local steps, published schemes."""
    recipes = ("default", *(each.name for each in rows(family, ranks)[1:]))
    return ",".join(("dense", "bf16", *recipes, *OTHERS))


def check_model(workload: Workload, backward: Backward) -> None:
    """Raise ValueError where the job has another number of parameters than the model of the probe."""
    probed = sum(each.elements for each in backward.bucket)
    found = sum(each.numel() for each in one_process.trained_parameters(workload.model(0)))
    if probed != found:
        raise ValueError(
            f"the model of the probe has {probed} parameters, the job of --workload has {found}; "
            "probe with the same --workload and --option"
        )


def advise(probe: Probe, backward: Backward, choices: Sequence[SchemeChoice], family: Family = "steps") -> Advice:
    """Predict a step of every method, and say which to use. `family`: of the recipes, by the job's optimizer.

    Raises ValueError where dense or bf16 is not among the methods, or the probe lacks what a method needs.
    """
    check_labels(choices)
    have = [choice.label for choice in choices]
    missing = [label for label in BASELINES if label not in have]
    if missing:
        raise ValueError(f"--schemes needs {' and '.join(missing)} to compare with, got {', '.join(have)}")
    steps = {choice.label: step(choice, probe, backward) for choice in choices}
    found = {label: _recipe_of(label, family, probe.group.ranks) for label in have}
    quality = {label: each.quality for label, each in found.items() if each} | dict.fromkeys(BASELINES, "as dense")
    verdict = advice.verdict({label: each for label, each in steps.items() if label in quality}, quality)
    if probe.group.kernels == SLOW_KERNELS:
        verdict = Recommendation(
            "", "The probe ran on the slow reference kernels, so it does not show which method to use."
        )
    [bf16] = (choice for choice in choices if choice.label == "bf16")
    fixed_s = min(steps["bf16"].reduce_s, step(bf16, probe, _smallest(backward, probe.group.ranks)).reduce_s)
    line = attach_line(verdict.label, family, probe.group.ranks)
    return Advice(sum(each.elements for each in backward.bucket), steps, quality, verdict, fixed_s, line)


def _recipe_of(label: str, family: Family, ranks: int) -> Recipe | None:
    """Return the recipe that a label asks for or writes out; None where it is none."""
    try:
        return recipe(family, ranks, bits_of(label))
    except LookupError:
        return next((each for each in rows(family, ranks) if each.text == label), None)


def attach_line(label: str, family: Family, ranks: int) -> str:
    """Return the call of `sparsync.attach` that takes the recipe which is this method; "" where none is."""
    found = _recipe_of(label, family, ranks)
    if found is None:
        return ""
    return f"sparsync.attach(model, optimizer=optimizer{'' if found is rows(family, ranks)[0] else f', {found.name}'})"


def _smallest(backward: Backward, elements: int) -> Backward:
    """Return the same timeline with smaller buckets."""
    buckets = (replace(each, elements=min(each.elements, elements)) for each in backward.bucket)
    return replace(backward, bucket=tuple(buckets))


def step(choice: SchemeChoice, probe: Probe, backward: Backward, network: Network | None = None) -> PredictedStep:
    """Return the prediction of a step of one method: under DistributedDataParallel, or of local steps or AdamW steps.

    Raises ValueError where the probe has not measured what the method needs.
    """
    scheme = choice.make()
    try:
        if choice.local is None:
            return advice.step(choice.label, scheme, probe, backward, network=network)
        steps = "local_steps" if choice.steps == "local_steps" else "adamw_steps"
        return advice.step_around(steps, choice.label, scheme, probe, backward, choice.local, network)
    except advice.MissingKernelError as error:
        raise ValueError(f"{choice.label}: {error}, or leave this method out of --schemes") from error


def table(found: Advice, names: Mapping[str, str] | None = None) -> Table:
    """Return the table, the fastest step on top; `names`: what stands for each label."""
    dense, bf16 = (found.steps[label].step_s for label in BASELINES)
    rows = tuple(
        (
            label if names is None else names[label],
            f"{'' if each.probed else '~'}{significant(1e3 * each.step_s)}",
            f"{100 * each.hidden:.0f} %",
            f"{dense / each.step_s:.2f}",
            f"{bf16 / each.step_s:.2f}",
            significant(each.bits(found.elements)),
            significant(each.state_nbytes / 1e6),
            found.quality.get(label, NOTHING),
        )
        for label, each in sorted(found.steps.items(), key=lambda item: item[1].step_s)
    )
    return Table("", HEADS, rows, less=("state\nMB", "\nhidden", "x\ndense", "bits\nsent"))


def text(
    found: Advice,
    probe: Probe,
    backward: Backward,
    choices: Sequence[SchemeChoice],
    width: int = WIDTH,
    colour: bool = False,
    ascii_only: bool = False,
) -> str:
    """Return the whole answer to `advise` with these arguments as lines of at most `width` columns."""
    names = short_labels(list(found.steps))
    group = probe.group
    buckets = len(backward.bucket)
    head = (
        f"{group.ranks} ranks, {group.backend}, {group.link}; {found.elements} parameters in {buckets} bucket{'s' * (buckets > 1)}, "
        f"{1e3 * _computing_s(backward):.3g} ms of computing a step"
    )
    notes = [
        "bits sent: by a rank per parameter per step. quality: of small language models, with the part of docs/frontier.md; -: train with "
        "`sparsync compare` or `frontier` to know it.",
    ]
    unknown = [label.rpartition("/")[2] for label, each in found.steps.items() if not each.probed]
    if unknown:
        notes.append(
            f"~: the probe has no buckets of {', '.join(dict.fromkeys(unknown))}, so these times come from its exchanges and kernels "
            "alone, and are often too short; probe with them in --schemes."
        )
    notes += _guesses(choices, probe, backward)
    loud: list[tuple[str, str]] = []
    if group.kernels == SLOW_KERNELS:
        said = f"!!! THE SLOW REFERENCE KERNELS RAN IN THE PROBE: THESE TIMES PROVE NOTHING ABOUT A METHOD. {SLOW_KERNELS_FIX}"
        loud = [(said, "bold white on red")]
    above = [*loud, (head, ""), (_bottleneck(found, backward), "")]
    below = [*((note, "dim") for note in notes), *loud, (f"\n{found.verdict.why}", "bold")]
    below += [(found.attach, "bold")] if found.attach else []
    return lines_of([table(found, names)], above, below, width, colour, ascii_only)


def _bottleneck(found: Advice, backward: Backward) -> str:
    """Return what a step of dense bf16 waits for, in words, and what would shorten that."""
    step, computing_s = found.steps["bf16"], _computing_s(backward)
    waiting_s = max(0.0, step.step_s - computing_s)
    words = (
        f"With dense bf16 a step takes {significant(1e3 * step.step_s)} ms, {significant(1e3 * waiting_s)} of them beyond computing. "
        f"Its all-reduces take {significant(1e3 * step.reduce_s)} ms, "
        f"{significant(1e3 * found.fixed_s)} of them for any number of bytes"
    )
    if waiting_s < _LITTLE * step.step_s:
        return f"{words}: there is little to gain."
    if found.fixed_s > step.reduce_s / 2:
        return f"{words}: fewer exchanges help, by larger buckets or local steps."
    return f"{words}: fewer bytes help."


def _computing_s(backward: Backward) -> float:
    return backward.forward_s + backward.backward_s + backward.optimizer_s


@dataclass
class _Reaching:
    """The network of a probe, and how far into each of its tables predictions have reached."""

    network: ProbedNetwork
    farthest: dict[str, tuple[float, int]] = field(default_factory=dict)  # by kind: bytes, and where the table ends

    def seconds(self, exchange: Exchange, P: int) -> float:
        reach = self.network.reach(exchange, P)
        self.farthest[exchange.kind] = max(reach, self.farthest.get(exchange.kind, reach))
        return self.network.seconds(exchange, P)


def _guesses(choices: Sequence[SchemeChoice], probe: Probe, backward: Backward) -> list[str]:
    """Return a line for each kind of operation that methods use far beyond the largest measured one."""
    farthest: dict[str, tuple[float, int]] = {}
    methods: dict[str, list[str]] = {}
    for choice in choices:
        network = _Reaching(ProbedNetwork(probe))
        step(choice, probe, backward, network)
        for kind, (nbytes, end) in network.farthest.items():
            if nbytes > FAR * end:
                farthest[kind] = max((nbytes, end), farthest.get(kind, (nbytes, end)))
                methods.setdefault(kind, []).append(choice.label)
    return [
        f"{kind} of up to {nbytes:.0f} bytes ({', '.join(methods[kind])}) is far beyond the probe's, which ends at {end}: such times are "
        "guesses; probe for longer (--seconds)."
        for kind, (nbytes, end) in farthest.items()
    ]

"""`sparsync advise`: predict the step time of each method on a probed group, show its known quality and recommend one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sparsync.recipes import Family, Recipe, bits_of, recipe, rows
from sparsync_lab.predict import advice
from sparsync_lab.predict.advice import BASELINES, PredictedStep
from sparsync_lab.predict.probe_file import Backward, Probe
from sparsync_lab.report.format import significant
from sparsync_lab.scheme_choice import SchemeChoice, check_labels
from sparsync_lab.slow_kernels import SLOW_KERNELS, SLOW_KERNELS_FIX
from sparsync_lab.terminal import NOTHING, Table, lines_of
from sparsync_lab.workloads import one_process
from sparsync_lab.workloads.base import Workload

OTHERS = (
    "local_steps(every=4)/two_shot:density=1.0:values=int4",
    "topk:density=0.01:values=int8",
    "exact_oktopk:density=0.01:values=int8",
)
_LITTLE = 0.1  # share of a step; a shorter wait is not worth reducing
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
    """The predicted step of every method, the known qualities and the recommendation."""

    elements: int
    steps: Mapping[str, PredictedStep]
    quality: Mapping[str, str]  # of the plain all-reduces and the recipes; unknown for other methods
    why: str  # the recommendation
    fixed_s: float  # time of the bf16 all-reduces when they carry almost no bytes
    attach: str = ""  # the `sparsync.attach` call for the recommended recipe


def advised_schemes(family: Family, ranks: int, parameters: int) -> str:
    """List the methods predicted by default: the plain all-reduces, the recipes, local steps and published schemes."""
    recipes = ("default", *(each.name for each in rows(family, ranks, parameters)[1:]))
    return ",".join(("dense", "bf16", *recipes, *OTHERS))


def check_model(workload: Workload, backward: Backward) -> None:
    """Raise ValueError if the job and the probed model differ in their number of parameters."""
    probed = sum(each.elements for each in backward.bucket)
    found = sum(each.numel() for each in one_process.trained_parameters(workload.model(0)))
    if probed != found:
        raise ValueError(
            f"the model of the probe has {probed} parameters, the job of --workload has {found}; "
            "probe with the same --workload and --option"
        )


def advise(probe: Probe, backward: Backward, choices: Sequence[SchemeChoice], family: Family = "steps") -> Advice:
    """Predict a step of every method and recommend one. `family` selects the recipes that suit the job's optimizer.

    Raises ValueError if dense or bf16 is not among the methods, or the probe lacks what a method needs.
    """
    check_labels(choices)
    have = [choice.label for choice in choices]
    missing = [label for label in BASELINES if label not in have]
    if missing:
        raise ValueError(f"--schemes needs {' and '.join(missing)} to compare with, got {', '.join(have)}")
    steps = {choice.label: step(choice, probe, backward) for choice in choices}
    elements = sum(each.elements for each in backward.bucket)
    found = {label: _recipe_of(label, family, probe.group.ranks) for label in have}
    quality = {label: each.quality_at(elements) for label, each in found.items() if each}
    quality |= dict.fromkeys(BASELINES, "as dense")
    # Not one of fewer bits than the default whose quality was not shown at this size.
    default = rows(family, probe.group.ranks)[0]
    sure = [label for label, each in found.items() if each and (each.shows(elements) or each == default)]
    best, why = advice.verdict({label: steps[label] for label in steps if label in (*BASELINES, *sure)}, quality)
    if probe.group.kernels == SLOW_KERNELS:
        best, why = "", "The probe ran on the slow reference kernels, so it does not show which method to use."
    [bf16] = (choice for choice in choices if choice.label == "bf16")
    tiny = tuple(replace(each, elements=min(each.elements, probe.group.ranks)) for each in backward.bucket)
    fixed_s = min(steps["bf16"].reduce_s, step(bf16, probe, replace(backward, bucket=tiny)).reduce_s)
    line = attach_line(best, family, probe.group.ranks)
    return Advice(elements, steps, quality, why, fixed_s, line)


def _recipe_of(label: str, family: Family, ranks: int) -> Recipe | None:
    """Look up the recipe that a label names or spells out; None if there is none."""
    try:
        return recipe(family, ranks, bits_of(label))
    except LookupError:
        return next((each for each in rows(family, ranks) if each.text == label), None)


def attach_line(label: str, family: Family, ranks: int) -> str:
    """Write the `sparsync.attach` call for this method; "" if it is not a recipe."""
    found = _recipe_of(label, family, ranks)
    if found is None:
        return ""
    return f"sparsync.attach(model, optimizer=optimizer{'' if found is rows(family, ranks)[0] else f', {found.name}'})"


def step(choice: SchemeChoice, probe: Probe, backward: Backward) -> PredictedStep:
    """Predict a step of one method, under DistributedDataParallel or with local or AdamW steps.

    Raises ValueError if the method has no closed form, or the probe has not measured what it needs.
    """
    scheme = choice.make()
    if choice.local is None:
        return advice.step(choice.label, scheme, probe, backward)
    steps = "local_steps" if choice.steps == "local_steps" else "adamw_steps"
    return advice.step_around(steps, choice.label, scheme, probe, backward, choice.local)


def table(found: Advice) -> Table:
    """Tabulate the predictions, fastest first."""
    dense, bf16 = (found.steps[label].step_s for label in BASELINES)
    rows = tuple(
        (
            label,
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
    return Table("", HEADS, rows)


def text(found: Advice, probe: Probe, backward: Backward) -> str:
    """Format the complete answer of `advise` for standard output."""
    group = probe.group
    buckets = len(backward.bucket)
    head = (
        f"{group.ranks} ranks, {group.backend}, {group.link}; {found.elements} parameters in {buckets} bucket{'s' * (buckets > 1)}, "
        f"{1e3 * _computing_s(backward):.3g} ms of computing a step"
    )
    notes = [
        "bits sent: by a rank per parameter per step. quality: of small language models, with the part of docs/frontier.md; -: train with "
        "`sparsync compare` or `frontier` to know it."
    ]
    unknown = [label.rpartition("/")[2] for label, each in found.steps.items() if not each.probed]
    if unknown:
        notes.append(
            f"~: the probe has no buckets of {', '.join(dict.fromkeys(unknown))}, so these times come from its exchanges and kernels "
            "alone, and are often too short; probe with them in --schemes."
        )
    if far := [label for label, each in found.steps.items() if each.far]:
        notes.append(
            f"{', '.join(far)}: far beyond the probe's largest exchange, so a guess; probe for longer (--seconds)."
        )
    loud: list[tuple[str, str]] = []
    if group.kernels == SLOW_KERNELS:
        said = f"!!! THE SLOW REFERENCE KERNELS RAN IN THE PROBE: THESE TIMES PROVE NOTHING ABOUT A METHOD. {SLOW_KERNELS_FIX}"
        loud = [(said, "bold white on red")]
    above = [*loud, (head, ""), (_bottleneck(found, backward), "")]
    below = [*((note, "dim") for note in notes), *loud, (f"\n{found.why}", "bold")]
    below += [(found.attach, "bold")] if found.attach else []
    return lines_of([table(found)], above, below)


def _bottleneck(found: Advice, backward: Backward) -> str:
    """Describe what a dense bf16 step waits for and what would shorten it."""
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

"""`sparsync advise`: what each method would bring on the group of a probe, as a table, and which to use."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch.optim import SGD, AdamW

from sparsync.recipes import Family, bits_of, recipe, rows
from sparsync_lab.advise import extra_steps
from sparsync_lab.advise.replay import deviations
from sparsync_lab.labels import short_labels
from sparsync_lab.predict import advice
from sparsync_lab.predict.advice import BASELINES, Extra, PredictedStep, Recommendation
from sparsync_lab.predict.exchanges import Exchange
from sparsync_lab.predict.network import Network
from sparsync_lab.predict.probe_file import Backward, Probe
from sparsync_lab.predict.probed import ProbedNetwork
from sparsync_lab.report.format import significant
from sparsync_lab.scheme_choice import SchemeChoice, check_labels
from sparsync_lab.slow_kernels import SLOW_KERNELS, SLOW_KERNELS_FIX
from sparsync_lab.terminal import NOTHING, WIDTH, Table, lines_of
from sparsync_lab.traffic.stream import Recorded, recorded
from sparsync_lab.workloads import one_process
from sparsync_lab.workloads.base import Workload, family_of_job

FAR = 32  # times the largest measured exchange of its kind, beyond which a prediction is marked as a guess
_LITTLE = 0.1  # of a step, below which what it waits for is not worth shortening
HEADS = (
    "method",
    "step\nms",
    "\nhidden",
    "x\ndense",
    "x\nbf16",
    "bits\nsent",
    "state\nMB",
    "extra steps\n(interval)",
    "x bf16 to\ndense's\nquality",
)


@dataclass(frozen=True)
class Advice:
    """The prediction of every method, its extra steps where they are known, and the verdict."""

    elements: int
    steps: Mapping[str, PredictedStep]
    extra: Mapping[str, Extra]  # of those methods whose effect was measured, and of those that change nothing
    verdict: Recommendation
    fixed_s: float  # of bf16's reductions, what they take however few bytes there are
    replayed: Recorded | None = None  # the gradients of which the extra steps come
    exchanged_nothing: tuple[str, ...] = ()  # labels of methods that exchanged nothing in the replay
    attach: str = ""  # the line that uses the method of the verdict, where it is a recipe


def _check_one_model(workload: Workload, backward: Backward, stream: Recorded | None) -> None:
    """Raise ValueError where the probe's model, the job and the recorded gradients are not of one size."""
    counts = {
        "the model of the times": sum(each.elements for each in backward.bucket),
        "the job of --workload": sum(each.numel() for each in one_process.trained_parameters(workload.model(0))),
    } | ({} if stream is None else {"the gradients of --gradients": stream.layout[-1].span.stop})
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{what} has {count} parameters" for what, count in counts.items())
        raise ValueError(
            f"{found}; they must be of one model: probe with the same --workload and --option, and record its gradients by "
            "`sparsync gradients`"
        )


def _check_recording(workload: Workload, seed: int, stream: Recorded) -> None:
    """Raise ValueError where the recorded gradients are not those of the first steps of this job, in a row, from this seed's weights."""
    job = workload.describe()["workload"]
    if stream.job != job:
        raise ValueError(
            f"--gradients are of the job {stream.job!r}, and --workload is {job!r}; record those of that job"
        )
    if stream.seed != seed:
        raise ValueError(
            f"--gradients were recorded with --seed {stream.seed}, and are replayed from the weights of --seed {seed}; "
            f"give --seed {stream.seed}"
        )
    if stream.every != 1:
        raise ValueError(
            f"--gradients has one of {stream.every} steps, and a replay needs all of them; record them with --every 1"
        )


def advise(
    probe: Probe,
    backward: Backward,
    choices: Sequence[SchemeChoice],
    workload: Workload | None = None,
    gradients: Path | None = None,
    seed: int = 0,
    total_steps: int = 300,
    worth: float = advice.WORTH,
) -> Advice:
    """Predict every method, and say which to use. With `workload` and `gradients`, recorded of it, also how many steps each needs."""
    check_labels(choices)
    have = [choice.label for choice in choices]
    missing = [label for label in BASELINES if label not in have]
    if missing:
        raise ValueError(f"--schemes needs {' and '.join(missing)} to compare with, got {', '.join(have)}")
    stream = None if gradients is None or workload is None else recorded(gradients)
    if workload is not None:
        _check_one_model(workload, backward, stream)
    steps = {choice.label: step(choice, probe, backward) for choice in choices}
    extra: dict[str, Extra] = {label: Extra() for label in BASELINES}
    if stream is not None and workload is not None:
        _check_recording(workload, seed, stream)
        lossy = [choice for choice in choices if choice.label not in extra]
        curve = extra_steps.curve(adaptive(workload))
        found = deviations(workload, seed, stream, lossy, total_steps)
        extra |= {
            choice.label: curve.extra(each) for choice, each in zip(lossy, found, strict=True) if not each.stands_still
        }
    known = {label: each for label, each in steps.items() if label in extra}
    still = () if stream is None else tuple(label for label in steps if label not in extra)
    verdict = advice.verdict(known, extra, worth)
    others = {label: each for label, each in steps.items() if label not in extra and label not in still}
    if others:
        best = min(others, key=lambda label: others[label].step_s)
        ratio = steps["bf16"].step_s / others[best].step_s
        verdict = replace(
            verdict,
            why=f"{verdict.why} What the other methods cost in quality is not known without --gradients. The fastest of them is "
            f"{best}: its step is {ratio:.2f} times as fast as bf16's"
            + (f", so it gains if it needs less than {ratio:.2f} times as many steps." if ratio > 1 else "."),
        )
    [bf16] = (choice for choice in choices if choice.label == "bf16")
    if probe.group.kernels == SLOW_KERNELS:
        verdict = Recommendation(
            "", "The probe ran on the slow reference kernels, so it does not show which method to use."
        )
    fixed_s = min(steps["bf16"].reduce_s, step(bf16, probe, _smallest(backward, probe.group.ranks)).reduce_s)
    line = attach_line(verdict.label, "steps" if workload is None else family_of_job(workload), probe.group.ranks)
    return Advice(sum(each.elements for each in backward.bucket), steps, extra, verdict, fixed_s, stream, still, line)


def attach_line(label: str, family: Family, ranks: int) -> str:
    """Return the call of `sparsync.attach` that takes the recipe which is this method; "" where none is."""
    known = rows(family, ranks)
    try:
        found = recipe(family, ranks, bits_of(label))
    except LookupError:
        found = next((each for each in known if each.text == label), None)
    if found is None:
        return ""
    return f"sparsync.attach(model, optimizer=optimizer{'' if found is known[0] else f', {found.name}'})"


def _smallest(backward: Backward, elements: int) -> Backward:
    """Return the same timeline with smaller buckets."""
    buckets = (replace(each, elements=min(each.elements, elements)) for each in backward.bucket)
    return replace(backward, bucket=tuple(buckets))


def adaptive(workload: Workload) -> bool:
    """Return whether the job's optimizer divides by second moments: anything but SGD is taken to."""
    optimizer, _ = workload.optimizer(workload.model(0), 1)
    return not isinstance(optimizer, SGD)


def trained_by_adamw(workload: Workload) -> bool:
    """Return whether the job's optimizer is an AdamW, whose steps can be exchanged."""
    optimizer, _ = workload.optimizer(workload.model(0), 1)
    return isinstance(optimizer, AdamW)


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
    """Return the table, the method that reaches dense's quality soonest on top; `names`: what stands for each label."""
    dense, bf16 = (found.steps[label].step_s for label in BASELINES)

    def to_quality(label: str) -> float:
        return found.steps[label].step_s * found.extra.get(label, Extra()).factor

    rows: list[tuple[str, ...]] = []
    for label in sorted(found.steps, key=lambda each: (each not in found.extra, to_quality(each))):
        each, extra = found.steps[label], found.extra.get(label)
        factor = "not known" if extra is None else _interval(extra)
        gain = NOTHING if extra is None else f"{bf16 / to_quality(label):.2f}"
        if label in found.exchanged_nothing:
            factor, gain = "exchanged\nnothing", NOTHING
        rows.append(
            (
                label if names is None else names[label],
                f"{'' if each.probed else '~'}{significant(1e3 * each.step_s)}",
                f"{100 * each.hidden:.0f} %",
                f"{dense / each.step_s:.2f}",
                f"{bf16 / each.step_s:.2f}",
                significant(each.bits(found.elements)),
                significant(each.state_nbytes / 1e6),
                factor,
                gain,
            )
        )
    return Table("", HEADS, tuple(rows), less=("state\nMB", "\nhidden", "x\ndense", "bits\nsent"))


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
    replayed = found.replayed
    head = (
        f"{group.ranks} ranks, {group.backend}, {group.link}; {found.elements} parameters in {_counted(len(backward.bucket), 'bucket')}, "
        f"{1e3 * _computing_s(backward):.3g} ms of computing a step"
        + (
            ""
            if replayed is None
            else f"; {_counted(replayed.steps, 'step')} of {_counted(replayed.ranks, 'rank')} replayed"
        )
    )
    notes = [
        "bits sent: by a rank per parameter per step. extra steps: factor of steps to dense's quality, and its 80 % interval over the "
        "trainings it was fitted to. Effects of local steps on later gradients, and other learning rates, are not included.",
    ]
    if replayed is not None and replayed.ranks != group.ranks:
        notes.append(f"They are of gradients of {_counted(replayed.ranks, 'rank')}, not of {group.ranks}.")
    unknown = [label.rpartition("/")[2] for label, each in found.steps.items() if not each.probed]
    if unknown:
        notes.append(
            f"~: the probe has no buckets of {', '.join(dict.fromkeys(unknown))}, so these times come from its exchanges and kernels "
            "alone, and are often too short; probe with them in --schemes."
        )
    notes += _guesses(choices, probe, backward)
    loud = [
        (
            f"!!! {label} EXCHANGED NOTHING in the replayed steps: what it costs in quality is not known. Record at least as many steps "
            "as lie between two exchanges, without NaN.",
            "bold white on red",
        )
        for label in found.exchanged_nothing
    ]
    if group.kernels == SLOW_KERNELS:
        said = f"!!! THE SLOW REFERENCE KERNELS RAN IN THE PROBE: THESE TIMES PROVE NOTHING ABOUT A METHOD. {SLOW_KERNELS_FIX}"
        loud.insert(0, (said, "bold white on red"))
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


def write(found: Advice, where: str) -> None:
    """Write everything as one JSON object to a file; "-": to standard output. Raises RuntimeError where it cannot be written."""
    if where == "-":
        print(as_json(found))
        return
    try:
        Path(where).write_text(as_json(found) + "\n", encoding="utf-8")
    except OSError as error:
        raise RuntimeError(f"cannot write {where}: {error.strerror}; choose another file with --json") from error


def as_json(found: Advice) -> str:
    """Return everything as one JSON object."""
    content = {
        "elements": found.elements,
        "steps": {label: asdict(each) | {"bits": each.bits(found.elements)} for label, each in found.steps.items()},
        "extra": {label: asdict(each) for label, each in found.extra.items()},
        "verdict": asdict(found.verdict),
        "attach": found.attach,
        "fixed_s": found.fixed_s,
    }
    return json.dumps(content, indent=1)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _interval(extra: Extra) -> str:
    if extra.factor == extra.low == extra.high == 1:
        return "1"
    return f"{extra.factor:.2f} ({extra.low:.2f} to {extra.high:.2f})"

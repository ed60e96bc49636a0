"""Count the launches and host syncs of every recipe and scheme on a CPU: tests/counts.json, whose numbers may only fall."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

from sparsync import Bucket, recipes, schemes
from sparsync.base import registry
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.core import generator, laid_out
from sparsync.exchanges import adamw_steps
from sparsync.feedback import Accumulator
from sparsync.kernels import operations
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync_lab.workloads.gpt import Decoder, Gpt
from studies import parts
from studies.gpu.launches import Counts, counted

FILE = parts.ROOT / "tests" / "counts.json"
PAGE, PART = "docs/gpu.md", "counts"
SHOWN = {  # rows of the page, and their methods
    "default (4.6 bits)": recipes.recipe("steps", 4).text,
    "3.1 bits, own weights": recipes.recipe("steps", 4, 3.1).text,
    "0.8 bits": recipes.recipe("steps", 4, 0.8).text,
    "Muon, the default": f"muon {recipes.recipe('muon', 4).text}",
    "gradients, int4": "int4",
    "TwoShot, 5 %": "two_shot:density=0.05:values=int4",
    "ExactMiCRO": "exact_micro",
    "ExactExDyna": "exact_exdyna",
    "ExactOkTopk": "exact_oktopk",
    "SkipReduce": "skip_reduce",
}
RANKS = (1, 4)
STEPS = 10  # AdamW steps 0 to 7 measure their ratio, and step 8 unless `measure_every` is longer; step 9 does not
COUNTED = 5  # the last steps: schemes that rotate roles have had all of them
DENSITY = 0.01  # for schemes without their own
IN_TENSORS = (
    "squares_fit",
    "packets_fit",
    "finite_each",
    *(each for each in vars(operations) if each.startswith("accumulate")),
)
# Goals for a step's launches and host syncs, by kind; the papers' schemes exchange counts.
GOALS: dict[str, list[int | None]] = {
    "default": [40, 0],
    "0.8 bits": [120, 0],
    "int4 gradients": [30, 0],
    "papers' schemes": [150, None],
}
EVERY_ELEMENT = ("in_turn", "dense", "bf16", "quantized", "int4")
Pair = list[int]  # launches and syncs


def texts() -> list[str]:
    """List every recipe, with "muon " before those for Muon, and every scheme with its default settings."""
    steps = [f"muon {each.text}" if each.family == "muon" else each.text for each in recipes.TABLE]
    own = [name for name in schemes.names() if registry.where(name).startswith("sparsync.")]
    return list(dict.fromkeys([*steps, *own]))


def count(text: str) -> dict[str, dict[str, Pair]]:
    """Count the launches and syncs of rank 0 in a settled step and at most, for each number of ranks."""
    muon, method = text.startswith("muon "), text.removeprefix("muon ")
    choice = parse_schemes(method, DENSITY)[0]
    with as_on_a_gpu():
        return {f"P={P}": LocalWorld(P).run(lambda comm: _of_rank(choice, muon, comm))[0] for P in RANKS}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Make kernels return flags as tensors, as on a GPU, and disable hints for the next selection."""
    with ExitStack() as stack:
        for name in IN_TENSORS:
            stack.enter_context(patch.object(operations, name, _in_tensors(getattr(operations, name))))
        stack.enter_context(patch.object(Accumulator, "_hinted", False))
        stack.enter_context(patch.object(adamw_steps, "host_is_ahead", lambda _: True))
        yield


def _in_tensors(kernel: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(kernel)
    def called(*given: Any, **named: Any) -> Any:  # Any: as the kernel
        found = kernel(*given, **named)
        return (found[0], torch.as_tensor(found[1])) if isinstance(found, tuple) else torch.as_tensor(found)

    return called


def kind_of(text: str) -> str:
    """Find which goals apply to a method, such as "steps/two_shot:density=0.03:values=sign", "default" or "bits=0.8"."""
    with suppress(LookupError):
        text = recipes.recipe("steps", 4, recipes.bits_of(text)).text
    around, _, scheme = text.rpartition("/")
    every_element = "density=1.0" in scheme or scheme.partition(":")[0] in EVERY_ELEMENT
    default, sparse_steps, gradients, papers = GOALS
    return (default if every_element else sparse_steps) if around else (gradients if every_element else papers)


def write() -> None:
    """Count everything, write the file and the page's table, and print all counts as a table."""
    found: dict[str, dict[str, Any]] = {
        text: {"goal": GOALS[kind_of(text)], **count(text)} for text in texts()
    }  # Any: JSON
    lines = [f"{json.dumps(text)}: {json.dumps(each)}" for text, each in found.items()]
    FILE.write_text("{\n " + ",\n ".join(lines) + "\n}\n")
    parts.put(PAGE, PART, page_table(found))
    heads = ["method", "goal", *(f"P={P}, {which}" for P in RANKS for which in ("settled", "heaviest"))]
    rows = [
        [f"`{text}`", _shown(each["goal"]), *(_shown(pair) for P in RANKS for pair in each[f"P={P}"].values())]
        for text, each in found.items()
    ]
    print(f"Launches / host syncs of a step of rank 0:\n\n{parts.table(heads, rows)}\n\nWritten: {FILE}")


def page_table(found: Mapping[str, Mapping[str, Any]]) -> str:  # Any: JSON
    """Format the page's table, with 4 ranks."""
    counted_of = {name: found[text] for name, text in SHOWN.items()}
    rows = [
        [name, *(_shown(pair) for pair in (each["goal"], *each["P=4"].values()))] for name, each in counted_of.items()
    ]
    return parts.table(["", "goal", "settled", "most"], rows)


def _shown(pair: Sequence[float | None]) -> str:
    return " / ".join("-" if each is None else f"{each:g}" for each in pair)


def _of_rank(choice: SchemeChoice, muon: bool, comm: LocalComm) -> dict[str, Pair]:
    step = _step_of(choice, muon, comm)
    found: list[Counts] = []
    for number in range(STEPS):
        take = step(number)
        with counted() if comm.rank == 0 and number >= STEPS - COUNTED else nullcontext(Counts()) as counts:
            take()
        found.append(counts)
    heaviest, last = [max(each.launches for each in found), max(each.syncs for each in found)], found[-1]
    return {"settled": [last.launches, last.syncs], "heaviest": heaviest}


def _step_of(choice: SchemeChoice, muon: bool, comm: LocalComm) -> Callable[[int], Callable[[], object]]:
    """Make a function that prepares the step with a number, and returns the function that takes it."""
    job = Gpt(width=64, layers=2, context=32, optimizer_name="muon" if muon else "adamw")
    torch.manual_seed(0)
    model = Decoder(65, job.context, job.width, job.layers, job.heads)
    parameters = list(model.named_parameters())
    drawn = generator(0, "counts", comm.rank)
    if choice.local is None:
        state, layout = choice.make().start(), laid_out((name, each.shape) for name, each in parameters)
        n = layout[-1].span.stop

        def reduce(number: int) -> Callable[[], object]:
            bucket = Bucket("counts", torch.randn(n, generator=drawn), number, layout)
            return lambda: state.reduce(bucket, comm)

        return reduce
    optimizer = job.optimizer(model, STEPS)[0]
    handle = choice.make_local(model, optimizer, comm=comm)

    def exchange(number: int) -> Callable[[], object]:
        for _, parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=drawn)
        return handle.step

    return exchange

"""Writes the table of agreement in docs/cost_model.md anew: closed forms beside what is counted, to 1024 ranks in this process.

    .venv/bin/python -m studies cost_forms [--print] [--ranks 4 16 64 256 1024] [--limit-s 60] [--estimates-limit-s 8]

Every scheme reduces drawn gradients in a LocalWorld: one step where settings determine what is sent, three of which the first is not
counted where gradients do. A cell is what the form with its estimates says that the busiest rank sends, over what a MeteredComm counted
there, as a mean over steps; "=" where rounds, messages and bytes are equal. A world that would take more processor time than the
limit, going by the one before, is left out. Takes about five minutes of processor time.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sparsync import Bucket, Cost, LocalWorld, MeteredComm, State
from sparsync.comm.local import LocalComm
from sparsync_lab.predict.exchanges import Given, Plan
from sparsync_lab.predict.schemes import plan_of
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync_lab.traffic.stream import Synthetic
from studies import parts

PAGE, PART = "docs/cost_model.md", "agreement"
RANKS = (4, 64, 1024)
ELEMENTS = 20_000
DENSITY = 0.01
# What settings alone determine, the same in each step.
SETTLED = (
    "dense,bf16,topk,two_shot,two_shot:density=1.0:values=int4,in_turn,skip_reduce,skip_reduce:form=direct,quantized,powersgd,"
    "dgc:warmup_steps=0,sparse_loco,demo,gtopk"
)
# The same after a first step.
WARMED_UP = "onebit_adam:warmup_steps=1,auto_protect:observe_steps=1"
ESTIMATED = "micro,micro:values=int4,micro.published,exdyna,exdyna.published,oktopk,oktopk:values=int4,oktopk.published,topk_dsa"
SCHEMES = f"{SETTLED},{WARMED_UP},{ESTIMATED}"


@dataclass(frozen=True)
class FormCheck:
    """One scheme on some number of ranks: means over steps of what the form says, and of what the busiest rank sends."""

    form: Cost
    rounds: float
    messages: float
    nbytes: float

    @property
    def ratio(self) -> float:
        return self.form.nbytes / self.nbytes

    def cell(self) -> str:
        exact = (self.form.steps, self.form.messages, self.form.nbytes) == (self.rounds, self.messages, self.nbytes)
        return "=" if exact else f"{self.ratio:.3f}"


class Sent(BaseException):
    """Ends a rank's step after its last exchange; a BaseException, so that no `except Exception` in a scheme catches it."""


@dataclass
class EndsWithItsExchanges:
    """Passes calls on, and raises Sent after as many as a plan has exchanges; a chain of sends is as many calls as it has rounds."""

    inner: MeteredComm
    left: int

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def send_recv(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        self.inner.send_recv(out, to, into, source)
        self._count()

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        gathered = self.inner.all_gather(x, counts)
        self._count()
        return gathered

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        received = self.inner.all_to_all(parts, counts)
        self._count()
        return received

    def all_reduce(self, x: Tensor) -> Tensor:
        total = self.inner.all_reduce(x)
        self._count()
        return total

    def _count(self) -> None:
        self.left -= 1
        if not self.left:
            raise Sent


def main(argv: Sequence[str]) -> None:
    parser = parts.options("cost_forms", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument(
        "--limit-s", type=float, default=60.0, help="of one scheme on one number of ranks, about, in processor seconds"
    )
    parser.add_argument(
        "--estimates-limit-s", type=float, default=8.0, help="the same where gradients decide what is sent"
    )
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    made = table(options.ranks, options.schemes, options.limit_s, options.estimates_limit_s)
    parts.put(PAGE, PART, made, options.print)


def table(ranks: Sequence[int], schemes: str, limit_s: float, estimates_limit_s: float) -> str:
    """Return the table as Markdown, below the names of the schemes whose form is exact everywhere."""
    choices = parse_schemes(schemes, DENSITY)
    cells: dict[str, list[str]] = {choice.label: [] for choice in choices}
    took = dict.fromkeys(cells, 0.0)
    for before, P in zip((1, *ranks), ranks, strict=False):
        stream = Synthetic(P, ELEMENTS)
        drawn = [stream.gradients(step) for step in range(3)]
        for choice in choices:
            # A rank sends to all others, or handles what all others send.
            limit = limit_s if _determined(choice) else estimates_limit_s
            if took[choice.label] * (P / before) ** 2 > limit:
                took[choice.label] = float("inf")
                cells[choice.label].append("")
                continue
            began = time.process_time()
            cells[choice.label].append(agreement(choice, stream, drawn).cell())
            took[choice.label] = time.process_time() - began
    heads = ["scheme", *(f"P = {P}" for P in ranks)]
    exact = [f"`{label}`" for label, found in cells.items() if set(found) <= {"=", ""}]
    rows = ([f"`{label}`", *found] for label, found in cells.items() if set(found) - {"=", ""})
    return f"Equal everywhere: {', '.join(exact)}.\n\n{parts.table(heads, rows)}"


def agreement(choice: SchemeChoice, stream: Synthetic, drawn: Sequence[Sequence[Tensor]]) -> FormCheck:
    """Return form and count of `choice` on drawn gradients, three steps of them or as many as its form needs."""
    P = stream.ranks
    scheme = choice.make()
    states = [scheme.start() for _ in range(P)]
    plan = plan_of(scheme, Given(stream.elements, P, layout=stream.layout))
    determined, before = _determined(choice), int(choice.label not in _labels(SETTLED))
    steps = before + 1 if determined else len(drawn)
    counted = [
        sent(states, stream, step, drawn[step], plan if determined and step == steps - 1 else None)
        for step in range(steps)
    ][before:]
    means = (statistics.fmean(getattr(cost, what) for cost in counted) for what in ("steps", "messages", "nbytes"))
    return FormCheck(plan.cost(), *means)


def sent(states: Sequence[State], stream: Synthetic, step: int, gradients: Sequence[Tensor], plan: Plan | None) -> Cost:
    """Return what the busiest ranks send in a step.

    With a plan all ranks but rank 0 end the step after as many exchanges as the plan has: P ranks need not handle the P messages that
    arrive in the last one. Raises DeadlockError where rank 0 makes more exchanges than the plan has, and AssertionError where ranks
    make fewer.
    """
    calls = sum(round(each.rounds) if each.kind == "send_recv" else 1 for each in plan.exchanges) if plan else 0

    def reduce(comm: LocalComm) -> Cost:
        metered = MeteredComm(comm)
        bucket = Bucket("forms", gradients[comm.rank].clone(), step, stream.layout)
        if not calls or not comm.rank:
            states[comm.rank].reduce(bucket, metered)
            return metered.take()[0]
        try:
            states[comm.rank].reduce(bucket, EndsWithItsExchanges(metered, calls))
        except Sent:
            return metered.take()[0]
        raise AssertionError(f"{states[0].name} makes fewer exchanges than its plan on {stream.ranks} ranks")

    costs = LocalWorld(stream.ranks).run(reduce)
    return Cost(*(max(getattr(cost, what) for cost in costs) for what in ("steps", "messages", "nbytes")))


def _determined(choice: SchemeChoice) -> bool:
    return choice.label in _labels(f"{SETTLED},{WARMED_UP}")


@cache
def _labels(text: str) -> frozenset[str]:
    return frozenset(choice.label for choice in parse_schemes(text, DENSITY))

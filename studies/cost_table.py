"""Writes the table of costs in docs/traffic.md anew: what each scheme sends, counted in this process.

    .venv/bin/python -m studies cost_table [--print]

Every scheme of the registry, as published and with our settings, reduces a few steps of drawn gradients on 4 and 16 ranks of a
LocalWorld. The cost that its reports state must be what a MeteredComm counts. Takes half a minute.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsync import Bucket, Cost, LocalWorld, MeteredComm, Report
from sparsync.comm.local import LocalComm
from sparsync_lab.report.format import significant
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync_lab.traffic.stream import Synthetic
from studies import parts

PAGE, PART = "docs/traffic.md", "costs"
RANKS = (4, 16)
ELEMENTS = 50_000
DENSITY = 0.01
STEPS = 4  # the first is not in the means
# Warm-ups of one step: what they send stands in the text.
SCHEMES = (
    "dense,bf16,topk,two_shot,two_shot:density=1.0:values=int4,in_turn,skip_reduce,"
    "auto_protect:observe_steps=1,micro,micro:values=int4,micro.published,exdyna,exdyna:values=int4,exdyna.published,oktopk,"
    "oktopk:values=int4,oktopk.published,quantized,int4,powersgd,loco,sparse_loco,demo,onebit_adam:warmup_steps=1,dgc:warmup_steps=0,"
    "ring_pruning,topk_dsa,gtopk"
)
WORD_NBYTES = 4


@dataclass(frozen=True)
class Counted:
    """Means over ranks and steps of one scheme on some number of ranks."""

    rounds: float
    nbytes: float
    union: float  # K

    def cells(self) -> tuple[str, ...]:
        words = self.nbytes / WORD_NBYTES
        return tuple(map(_shown, (self.rounds, self.nbytes / 1000, self.union, words / self.union)))


def main(argv: Sequence[str]) -> None:
    options = parts.options("cost_table", __doc__).parse_args(argv)
    torch.set_num_threads(1)
    parts.put(PAGE, PART, table(), options.print)


def table(ranks: Sequence[int] = RANKS) -> str:
    """Return the table as Markdown; each cell has a figure for each number of ranks."""
    heads = ["scheme", "rounds", "kB", "K", "words / K"]
    rows = list[list[str]]()
    for choice in parse_schemes(SCHEMES, DENSITY):
        columns = zip(*(counted(choice, P).cells() for P in ranks), strict=True)
        rows.append([f"`{choice.label}`", *(", ".join(column) for column in columns)])
    return parts.table(heads, rows)


def counted(choice: SchemeChoice, P: int) -> Counted:
    """Return what `choice` sends on P ranks. Raises RuntimeError where its reports say otherwise than what was counted."""
    stream = Synthetic(P, ELEMENTS)
    scheme = choice.make()
    states = [scheme.start() for _ in range(P)]
    found: list[Report] = []
    for step in range(STEPS):
        gradients = stream.gradients(step)

        def reduce(
            comm: LocalComm, step: int = step, gradients: Sequence[torch.Tensor] = gradients
        ) -> tuple[Report, Cost]:
            metered = MeteredComm(comm)
            report = states[comm.rank].reduce(Bucket("costs", gradients[comm.rank], step, stream.layout), metered)
            return report, metered.take()[0]

        seen = LocalWorld(P).run(reduce)
        for rank, (report, sent) in enumerate(seen):
            if report.cost != sent:
                raise RuntimeError(
                    f"{choice.label}, P = {P}, step {step}, rank {rank}: reported {report.cost}, counted {sent}"
                )
        found += [report for report, _ in seen] if step else []

    costs = [report.cost for report in found]
    return Counted(
        statistics.fmean(cost.steps for cost in costs),
        statistics.fmean(cost.nbytes for cost in costs),
        statistics.fmean(report.union for report in found),
    )


def _shown(number: float) -> str:
    """Return whole numbers as they are, others with 3 significant digits."""
    return f"{number:.0f}" if number == int(number) else significant(number, 3)

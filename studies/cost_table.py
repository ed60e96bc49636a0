"""Rewrite the table of costs in docs/traffic.md: what each scheme sends, counted in this process.

    .venv/bin/python -m studies cost_table [--print]

Every scheme of the registry, as published and with our settings, reduces drawn gradients for a few steps on 4 and 16 ranks of a LocalWorld.
Takes half a minute.
"""

from collections.abc import Sequence
from statistics import fmean

import torch

from sparsync_lab.report.format import significant
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync_lab.traffic.observe import Observed
from sparsync_lab.traffic.stream import Synthetic
from studies import parts

PAGE, PART = "docs/traffic.md", "costs"
RANKS = (4, 16)
ELEMENTS = 50_000
DENSITY = 0.01
STEPS = 4  # the first is left out of the means
# Warm-ups take one step: the text states what they send.
SCHEMES = (
    "dense,bf16,topk,two_shot,two_shot:density=1.0:values=int4,in_turn,skip_reduce,"
    "auto_protect:observe_steps=1,exact_micro,exact_micro:values=int4,micro,exact_exdyna,exact_exdyna:values=int4,exdyna,exact_oktopk,"
    "exact_oktopk:values=int4,oktopk,quantized,int4,powersgd,loco,sparse_loco,demo,onebit_adam:warmup_steps=1,dgc:warmup_steps=0,"
    "ring_pruning,topk_dsa,gtopk"
)


def main(argv: Sequence[str]) -> None:
    options = parts.options("cost_table", __doc__).parse_args(argv)
    torch.set_num_threads(1)
    parts.put(PAGE, PART, table(), options.print)


def table(ranks: Sequence[int] = RANKS) -> str:
    """Format the table as Markdown; each cell has a figure per number of ranks."""
    heads = ["scheme", "rounds", "kB", "K", "words / K"]
    rows = list[list[str]]()
    for choice in parse_schemes(SCHEMES, DENSITY):
        columns = zip(*(map(_shown, counted(choice, P)) for P in ranks), strict=True)
        rows.append([f"`{choice.label}`", *(", ".join(column) for column in columns)])
    return parts.table(heads, rows)


def counted(choice: SchemeChoice, P: int) -> tuple[float, float, float, float]:
    """Count rounds, kilobytes, K and words over K of `choice` on P ranks, averaged over ranks and steps."""
    stream = Synthetic(P, ELEMENTS)
    observed = Observed(choice, P, stream.layout)
    seen = [observed.reduce(step, stream.gradients(step)) for step in range(STEPS)][1:]
    rounds, nbytes = (fmean(number for record in seen for number in record[what]) for what in ("rounds", "bytes"))
    union = fmean(record["union"] for record in seen)
    return rounds, nbytes / 1000, union, nbytes / 4 / union  # words of 4 bytes


def _shown(number: float) -> str:
    """Format whole numbers without decimals, others with 3 significant digits."""
    return f"{number:.0f}" if number == int(number) else significant(number, 3)

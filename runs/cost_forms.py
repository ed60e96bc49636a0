"""Writes the table of agreement in docs/cost_model.md anew: closed forms beside what is counted, to 256 ranks in this process.

    .venv/bin/python runs/cost_forms.py [--print] [--ranks 4 16 64 256] [--limit-s 8]

Every scheme reduces a few steps of drawn gradients in a LocalWorld. A cell is what the form with its estimates says that the busiest
rank sends, over what a MeteredComm counted there, as a mean over steps; "=" where rounds, messages and bytes are equal. A world that
would take more processor time than the limit, going by the one before, is left out. Takes about three minutes of processor time.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsync import Bucket, Cost, LocalWorld, MeteredComm
from sparsync.comm.local import LocalComm
from sparsync.comm.plan import Given
from sparsync.lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync.lab.traffic.stream import Synthetic

PAGE = Path(__file__).parent.parent / "docs" / "cost_model.md"
BEGIN, END = "<!-- begin agreement -->", "<!-- end agreement -->"
RANKS = (4, 16, 64, 256)
ELEMENTS = 20_000
DENSITY = 0.01
STEPS = 3  # the first is not in the means
SCHEMES = (
    "dense,bf16,topk,two_shot,two_shot:density=1.0:values=int4,skip_reduce,skip_reduce:form=direct,random_k,quantized,powersgd,"
    "onebit_adam:warmup_steps=1,dgc:warmup_steps=0,sparse_loco,demo,cltk,gtopk,spardl,auto_protect:observe_steps=1,micro,"
    "micro:values=int4,micro.published,exdyna,exdyna.published,oktopk,oktopk:values=int4,oktopk.published,topk_union,topk_dsa,"
    "deft,hard_threshold,gaussiank,sidco"
)


@dataclass(frozen=True)
class Agreement:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print the table, and leave the page as it is")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument(
        "--limit-s", type=float, default=8.0, help="of one scheme on one number of ranks, about, in processor seconds"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = table(options.ranks, options.schemes, options.limit_s)
    if options.print:
        print(made)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}")


def table(ranks: Sequence[int] = RANKS, schemes: str = SCHEMES, limit_s: float = 8.0) -> str:
    """Return the table as Markdown."""
    choices = parse_schemes(schemes, DENSITY)
    cells: dict[str, list[str]] = {choice.label: [] for choice in choices}
    took = dict.fromkeys(cells, 0.0)
    for before, P in zip((1, *ranks), ranks, strict=False):
        stream = Synthetic(P, ELEMENTS)
        drawn = [stream.gradients(step) for step in range(STEPS)]
        for choice in choices:
            # Every rank handles what all others send.
            if took[choice.label] * (P / before) ** 2 > limit_s:
                took[choice.label] = float("inf")
                cells[choice.label].append("")
                continue
            began = time.process_time()
            cells[choice.label].append(agreement(choice, stream, drawn).cell())
            took[choice.label] = time.process_time() - began
    heads = ["scheme", *(f"P = {P}" for P in ranks)]
    rows = [heads, ["---"] * len(heads), *([f"`{label}`", *found] for label, found in cells.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def agreement(choice: SchemeChoice, stream: Synthetic, drawn: Sequence[Sequence[torch.Tensor]]) -> Agreement:
    """Return form and count of `choice` on drawn gradients, of which the first step is not counted."""
    P = stream.ranks
    schemes = [choice.make() for _ in range(P)]
    busiest: list[Cost] = []
    for step, gradients in enumerate(drawn):

        def reduce(comm: LocalComm, step: int = step, gradients: Sequence[torch.Tensor] = gradients) -> Cost:
            metered = MeteredComm(comm)
            bucket = Bucket("forms", gradients[comm.rank].clone(), step, stream.layout)
            schemes[comm.rank].reduce(bucket, metered)
            return metered.take()[0]

        sent = LocalWorld(P).run(reduce)
        if step:
            busiest.append(
                Cost(*(max(getattr(cost, what) for cost in sent) for what in ("steps", "messages", "nbytes")))
            )
    form = schemes[0].plan(Given(stream.elements, P, layout=stream.layout)).cost()
    means = (statistics.fmean(getattr(cost, what) for cost in busiest) for what in ("steps", "messages", "nbytes"))
    return Agreement(form, *means)


if __name__ == "__main__":
    main()

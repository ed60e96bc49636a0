"""Writes the table of unequal ranks and links in docs/simulate.md anew: schemes on a virtual clock.

    .venv/bin/python runs/stragglers.py [--print]

Each scheme reduces a few steps of drawn gradients on 32 ranks of a LocalWorld whose clock moves as messages would: on equal links of
1 Gbit/s, with one link at a tenth of it, with one rank that comes late, and on 4 nodes of 8 ranks that share such a link each. Takes
20 s of processor time.
"""

import argparse
from pathlib import Path

import torch

from sparsync.base import registry
from sparsync.core import Bucket, generator
from sparsync.predict import clock
from sparsync.predict.network import Link, Tiers, flat_switch, nodes
from sparsync.predict.plans import plan

PAGE = Path(__file__).parent.parent / "docs" / "simulate.md"
BEGIN, END = "<!-- begin stragglers -->", "<!-- end stragglers -->"
RANKS, ELEMENTS, STEPS, LATE_S = 32, 2**18, 3, 0.05
LINK = Link(1e9, latency_s=50e-6)
SLOW = Link(1e8, latency_s=50e-6)
SCHEMES = {
    "dense": {},
    "topk": {"density": 0.01},
    "two_shot": {"density": 0.05, "values": "int4"},
    "micro": {"density": 0.01},
    "oktopk": {"density": 0.01},
    "skip_reduce": {"skip": 16, "protect": ()},
    "gtopk": {"density": 0.01},
}


def main() -> None:
    """Write the table, or print it with --print."""
    parser = argparse.ArgumentParser(description="write the table of unequal ranks and links anew")
    parser.add_argument("--print", action="store_true", dest="only_print")
    options = parser.parse_args()
    text = "\n".join(table())
    if options.only_print:
        print(text)
        return
    page = PAGE.read_text()
    before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    PAGE.write_text(f"{before}\n{text}\n{after}")


def table() -> list[str]:
    """Return the lines of the table: milliseconds of a step, mean of those after the first."""
    flat, shared = flat_switch(LINK), nodes(Link(100e9, latency_s=5e-6), LINK, 8)
    one_slow = flat_switch(*[SLOW if rank == 5 else LINK for rank in range(RANKS)])
    lines = [
        "| scheme | closed form | equal links | one link at a tenth | one rank 50 ms late | 4 nodes of 8 on a link each |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, settings in SCHEMES.items():
        planned = plan(registry.get(name, **settings), ELEMENTS, RANKS)
        closed = sum(flat.seconds(exchange, RANKS) for exchange in planned.exchanges)
        runs = [step_s(name, settings, network) for network in (flat, one_slow)]
        runs += [step_s(name, settings, flat, late=True), step_s(name, settings, shared)]
        lines.append(f"| `{name}` | " + " | ".join(f"{1000 * seconds:.3g}" for seconds in (closed, *runs)) + " |")
    return lines


def step_s(name: str, settings: dict, network: Tiers, late: bool = False) -> float:
    """Return the mean seconds between the ends of two steps, of which the last rank's counts."""
    made = [registry.get(name, **settings) for _ in range(RANKS)]

    def body(comm: clock.ClockedComm) -> list[float]:
        ends = []
        for step in range(STEPS):
            grad = torch.randn(ELEMENTS, generator=generator(0, str(comm.rank), step))
            if late and comm.rank == 5:
                comm.work(LATE_S)
            made[comm.rank].reduce(Bucket("bucket", grad, step), comm)
            ends.append(comm.now_s)
        return ends

    ends, _ = clock.run(network, RANKS, body)
    return (max(each[-1] for each in ends) - max(each[0] for each in ends)) / (STEPS - 1)


if __name__ == "__main__":
    main()

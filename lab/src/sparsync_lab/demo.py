"""The comparisons of `sparsync demo`: two, which finish within minutes on two cores."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Half:
    """One comparison of the demo: its report folder, its title and the arguments of `sparsync compare`."""

    folder: str
    title: str
    arguments: str


HALVES = (
    Half(
        "lstm",
        "A word-level language model (LSTM), trained by SGD",
        "--workload shakespeare-small --ranks 4 --link 100mbit --target 90 --steps 80 --eval-every 10 --seed 0 --schemes "
        "dense,bf16,default,bits=0.8,topk:density=0.01:values=int4,exact_micro:density=0.01:values=int4",
    ),
    Half(
        "gpt",
        "A character-level transformer, trained by AdamW",
        "--workload gpt --ranks 4 --link 100mbit --target 15 --steps 120 --eval-every 10 --seed 0 --schemes "
        # The lowest rank at which PowerSGD matches dense here.
        "dense,bf16,powersgd:rank=16,default,bits=0.8",
    ),
)


def commands(out: Path, steps: int | None = None, halves: Sequence[Half] = HALVES) -> list[list[str]]:
    """Build the `sparsync` arguments that run each half, with results under `out`; `steps` overrides its number of steps."""
    more = [] if steps is None else ["--steps", str(steps)]
    return [["compare", *shlex.split(half.arguments), *more, "--out", str(out / half.folder)] for half in halves]

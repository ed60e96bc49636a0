"""Measure processor time and memory of an AdamWSteps step, compared with torch's AdamW, on given gradients.

    python -m studies bench steps [--ranks 1,2,4 --width 128 --layers 5 --density 0.07 --values sign]
    python -m studies bench steps --memory --width 512 [--ranks 1,4 --bucket-mb 25]

The parameters are a GPT's; the defaults have 1 M, a width of 512 has 16 M. One JSON line per case. Torch uses one thread.

Time: ranks are threads of one process that run one at a time, so the seconds of rank 0's thread are computing time without waits. The cases
are interleaved, in changing order; `ratio` is the median over rounds of a case's seconds to those of torch's fused AdamW in the same round.
`backward_s` is the additional time of forward and backward pass with the handle.

Memory: ranks are processes, joined by gloo. `settled` and `peak` are rank 0's bytes per parameter, as Linux counts them, after some steps
and at most, in addition to weights and gradients; the C library returns freed memory at once. With few parameters they are noise.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import sparsync
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Comm, generator
from sparsync_lab.workloads.gpt import Decoder
from studies.bench import frame
from studies.bench.frame import Row

WARMUP = 10  # rounds: the first 8 steps measure the ratio
GRADIENTS = 4  # used in turn
FUSED, DEFAULT, OURS = "torch's AdamW, fused", "torch's AdamW", "AdamWSteps"
CASES = (FUSED, DEFAULT, OURS)


class Given(nn.Module):
    """Parameters whose gradients are given numbers, at the cost of one product."""

    def __init__(self, like: nn.Module, rank: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(each.detach().clone()) for each in like.parameters())
        drawn = generator(0, "steps", rank)
        self.given = [[torch.randn(each.shape, generator=drawn) for each in self.parts] for _ in range(GRADIENTS)]

    def forward(self, number: int) -> Tensor:
        """Compute a loss whose gradients are the given ones of this number."""
        given = self.given[number % GRADIENTS]
        return torch.stack([(part * each).sum() for part, each in zip(self.parts, given, strict=True)]).sum()


def main(arguments: Sequence[str]) -> None:
    options = _options(arguments)
    torch.set_num_threads(1)
    settings = {each: getattr(options, each) for each in ("density", "values", "keep", "bucket_mb", "rounds")}
    elements = sum(each.numel() for each in _gpt(options).parameters())
    rows: list[Row] = []
    for ranks in map(int, options.ranks.split(",")):
        if options.memory:
            found = {name: frame.memory(ranks, _prepare, name, options) for name in CASES}
        else:
            found = LocalWorld(ranks).run(lambda comm: _measured(comm, options))[0]
        rows += [
            {"case": name, "ranks": ranks, "elements": elements, **each, **settings} for name, each in found.items()
        ]
    frame.write(rows)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = frame.options("steps", __doc__)
    add = parser.add_argument
    add("--ranks", default="1,2,4", help="numbers of ranks (default: 1,2,4)")
    add("--width", type=int, default=128, help="of the GPT (default: 128)")
    add("--layers", type=int, default=5, help="of the GPT (default: 5)")
    add("--density", type=float, default=0.07, help="of TwoShot (default: 0.07)")
    add("--values", default="sign", help="of TwoShot (default: sign)")
    add("--keep", type=float, default=sparsync.Steps().keep)
    add("--bucket-mb", type=float, default=sparsync.Steps().bucket_mb)
    add("--rounds", type=int, default=24, help="in which every case is measured once (default: 24)")
    add("--memory", action="store_true", help="measure memory in place of time")
    return parser.parse_args(arguments)


def _measured(comm: LocalComm, options: argparse.Namespace) -> dict[str, Row]:
    models = {name: Given(_gpt(options), comm.rank) for name in CASES}
    steps = {name: _step(name, model, options, comm) for name, model in models.items()}

    def measured(name: str, number: int) -> tuple[float, float]:
        """Time the forward and backward pass, and the step, in seconds of this thread."""
        start = time.thread_time()
        models[name](number).backward()
        middle = time.thread_time()
        steps[name]()
        end = time.thread_time()
        models[name].zero_grad()
        return middle - start, end - middle

    found = frame.interleaved(CASES, measured, options.rounds, WARMUP)
    rows: dict[str, Row] = {}
    for name, seconds in zip(CASES, found, strict=True):
        pairs = list(zip(seconds, found[0], strict=True))
        rows[name] = {
            "step_s": statistics.median(step for _, step in seconds),
            "ratio": statistics.median(step / base for (_, step), (_, base) in pairs),
            "backward_s": statistics.median(passes - base for (passes, _), (base, _) in pairs),
        }
    return rows


def _gpt(options: argparse.Namespace) -> nn.Module:
    return Decoder(65, 64, options.width, options.layers, 4)


def _step(name: str, model: nn.Module, options: argparse.Namespace, comm: Comm | None) -> Callable[[], object]:
    """Make an optimizer of this model, and return its step."""
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=name == FUSED)
    if name != OURS:
        return adamw.step
    scheme = sparsync.schemes.TwoShot(density=options.density, values=options.values)
    steps = {"keep": options.keep, "bucket_mb": options.bucket_mb}
    return sparsync.AdamWSteps(model, adamw, scheme, comm=comm, **steps).step


def _prepare(rank: int, name: str, options: argparse.Namespace) -> tuple[int, Callable[[], Callable[[], object]]]:
    """Prepare for `frame.memory`, after a small step that loads modules."""
    small = Given(nn.Linear(64, 64), rank)
    step = _step(name, small, options, None)
    small(0).backward()
    step()
    model = Given(_gpt(options), rank)
    model(0).backward()
    return sum(each.numel() for each in model.parameters()), lambda: _step(name, model, options, None)

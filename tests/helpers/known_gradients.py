"""A model whose gradients are known beforehand, and what a scheme must make of them.

The gradients are small whole numbers, so sums over ranks are exact in any order and every comparison is `==`. The expected values come
from a LocalWorld that runs the same scheme, without DDP, over the same buckets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from invariants.table import BY_ID, Row
from sparsync import Bucket, Report
from sparsync.base.state import Rollback
from sparsync.comm import LocalWorld
from sparsync.core import Comm, ParameterSpan, generator
from sparsync.schemes import State
from sparsync.testing.world import same_bits

# One of each kind, for tests that hardly depend on the scheme.
FEW = ("dense-ring", "topk-0.1", "skip-default", "skip-default-feedback", "skip-random-ring-contributors-flat-auto")

Step = list[tuple[ParameterSpan, ...]]  # layouts of one step's buckets, in order
Gradient = Callable[[int, int, str], Tensor]  # (rank, step, parameter name) -> [n]


def row(id: str) -> Row:
    """Look up the row of the table of schemes with this id."""
    return BY_ID[id]


def whole_numbers(n: int, rank: int, step: int, name: str) -> Tensor:
    """Draw the gradient of parameter `name` on this rank at this step: integers in [-4, 4], [n]."""
    return torch.randint(-4, 5, (n,), generator=generator(rank, name, step)).float()


class Pair(nn.Module):
    """Two parameters of `n` elements each."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n, dtype=dtype))
        self.bias = nn.Parameter(torch.ones(n, dtype=dtype))


class KnownGradients(nn.Module):
    """A chain of parameters of `n` elements, whose gradients are exactly the inputs of `forward`, or None.

    `count` is even. The names match those that the table of schemes protects: embed.weight, block1.bias, head.bias and so on.
    """

    def __init__(self, count: int, n: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.n = n
        self.embed = Pair(n, dtype)
        for number in range(1, count // 2 - 1):
            self.add_module(f"block{number}", Pair(n, dtype))
        self.head = Pair(n, dtype)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.named_parameters()]

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        total = torch.zeros(())
        for name, parameter in self.named_parameters():
            if name in inputs:
                total = total + (parameter * inputs[name]).sum()
        return total

    def inputs(self, rank: int, step: int) -> dict[str, Tensor]:
        """Make the inputs that give every parameter the gradient `whole_numbers`."""
        return {name: whole_numbers(self.n, rank, step, name).to(p.dtype) for name, p in self.named_parameters()}

    def gradients(self) -> Tensor:
        """Concatenate all gradients in the order of the parameters, [count * n]; NaN if there is none."""
        return torch.cat([torch.full_like(p, torch.nan) if p.grad is None else p.grad for p in self.parameters()])


def noted(state: State, around: Callable[[Bucket], object] = lambda bucket: None) -> dict[int, Step]:
    """Record from now on which buckets a state reduces, by step; `around` is called before and after each."""
    steps, reduce = dict[int, Step](), state.reduce

    def noting(bucket: Bucket, comm: Comm) -> Report:
        steps.setdefault(bucket.step, []).append(bucket.layout)
        around(bucket)
        report = reduce(bucket, comm)
        around(bucket)
        return report

    state.reduce = noting
    return steps


@dataclass
class Expected:
    """The expected result: `grads` [steps, elements] in the order of the names, and each rank's residual, by name."""

    grads: Tensor
    residuals: list[dict[str, Tensor]]


def expected(
    id: str, P: int, steps: Mapping[int, Step], names: Sequence[str], gradient: Gradient, keys: Sequence[str] = ()
) -> Expected:
    """Reduce `gradient` with a row's scheme in a LocalWorld of P ranks, bucket by bucket as recorded.

    `keys` name the buckets of a step; by default "bucket0" and so on, as with DDP.
    """

    def program(comm: Comm) -> tuple[Tensor, dict[str, Tensor]]:
        state, skipped = row(id).make().start(), Rollback()
        rows = []
        for step, layouts in steps.items():
            reduced: dict[str, Tensor] = {}
            for number, layout in enumerate(layouts):
                flat = torch.cat([gradient(comm.rank, step, slot.name) for slot in layout])
                bucket = Bucket(keys[number] if keys else f"bucket{number}", flat, step, layout)
                skipped.reduced(state, bucket, state.reduce(bucket, comm))
                reduced |= {slot.name: slot.span.of(flat) for slot in layout}
            rows.append(torch.cat([reduced[name] for name in names]))
        return torch.stack(rows), state.state_dict().get("residual", {})

    results = LocalWorld(P).run(program)
    for rank, (grads, _) in enumerate(results):
        assert same_bits(grads, results[0][0]), f"the expectation itself differs between rank 0 and rank {rank}"
    return Expected(results[0][0], [residual for _, residual in results])

"""How much longer a rank's own gradient is than the mean gradient, measured with a few numbers from each rank.

A sketch of a vector is sums of its elements, each with a random sign. It is linear, and the expectation of its square norm is that of the
vector (AMS sketches, Alon, Matias and Szegedy 1996). So the mean of all ranks' sketches tells the norm of the mean gradient, which no rank
has seen: of all parameters together for LocalSteps, of each block of adjacent elements for steps that are exchanged.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Comm, Report, Span, generator
from sparsync.runtime.connection import Reduction

LENGTH = 64  # one sketch is off by sqrt(2 / 64) = 18 % of the square norm
FIRST = 8  # steps that all measure ratios
_MEMORY = 0.9  # of older measurements of the factor, from exchange to exchange
_MEMORY_OF_BLOCKS = 0.98  # of the ratios
_SIGNS = 256  # blocks with different signs; then the same ones again


class MeanOfSketches(Reduction):
    """The mean over ranks in bfloat16."""

    name = "bf16"

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        comm = MeteredComm(comm)
        total = comm.all_reduce(bucket.grad.bfloat16())
        bucket.grad.copy_(total.to(bucket.grad.dtype) / comm.size)
        n = bucket.grad.numel()
        return Report(self.name, bucket.key, bucket.step, n, n, n, comm.sent)


class BlockRatios:
    """The square norms of each block of `block` adjacent elements, of the mean gradient and of the own one, for all vectors of `like`."""

    def __init__(self, like: Sequence[Tensor], block: int, every: int) -> None:
        self.block, self._every = block, every
        self.of_mean = [
            each.new_zeros(-(-each.numel() // block)) for each in like
        ]  # older measurements with less weight
        self.of_own = [each.clone() for each in self.of_mean]
        self.measured, self.measure_until = 0, FIRST  # times it was; steps below this number all measure

    def due(self, step: int) -> bool:
        """Return whether this step measures; it depends on step numbers only, which agree after a failure too."""
        return step < self.measure_until or step % self._every == 0

    def ratio(self, place: int, P: int) -> Tensor:
        """Return the share of the own squares that the mean gradient has, [blocks]; 1 for blocks that were zero whenever measured.

        For gradients without a mean it is 1/P; half of that is the least, for the measurement is noisy.
        """
        return (self.of_mean[place] / self.of_own[place]).nan_to_num_(1.0).clamp_(0.5 / P, 1.0)

    def spread(self, of_blocks: Tensor, span: Span) -> Tensor:
        """Return what `of_blocks` [blocks] has for each element of a span."""
        first = span.start // self.block
        elements = of_blocks[first : -(-span.stop // self.block)].repeat_interleave(self.block)
        return Span(span.start - first * self.block, span.stop - first * self.block).of(elements)

    def sums(self, gradients: Sequence[Tensor], keys: Sequence[str], step: int) -> Tensor:
        """Return the sketch of each block, [blocks of all]; `gradients` are [blocks, block], with signs drawn from their keys."""
        signed = []
        for blocks, key in zip(gradients, keys, strict=True):
            signs = torch.randint(0, 2, (_SIGNS, self.block), generator=generator(0, f"ratio/{key}", step))
            signs = (2 * signs - 1).to(blocks)
            # A last row of signs is cut, and so is what it is multiplied with.
            parts = [(part * signs[: len(part)]).sum(1) for part in blocks.split(_SIGNS)]
            signed.append(torch.cat(parts).to(gradients[0].device))
        return torch.cat(signed)

    def observe(self, of_mean: Tensor, gradients: Sequence[Tensor], taking: Sequence[Sequence[Span]]) -> None:
        """Add a measurement: `of_mean` has the squares of the mean of all ranks' `sums`. Blocks without an element of `taking` stay."""
        self.measured += 1
        weight = max(1 - _MEMORY_OF_BLOCKS, 1 / self.measured)
        found = of_mean.split([len(each) for each in gradients])
        for i, (mean, blocks, spans) in enumerate(zip(found, gradients, taking, strict=True)):
            weights = torch.zeros_like(self.of_own[i])
            for span in spans:
                weights[span.start // self.block : -(-span.stop // self.block)] = weight
            self.of_mean[i].lerp_(mean.to(weights), weights)
            self.of_own[i].lerp_(torch.linalg.vector_norm(blocks, dim=1).square_(), weights)

    def clip_factor(self, P: int) -> float:
        """Return how much longer the own gradient is than the mean one: in [1, sqrt(P)], and 1 before the first measurement."""
        own, mean = (sum(float(each.sum()) for each in squares) for squares in (self.of_own, self.of_mean))
        return min(P, max(1.0, own / mean)) ** 0.5 if mean > 0 else 1.0

    def state_dict(self, keys: Sequence[str]) -> dict[str, Any]:  # Any: numbers and tensors
        """Return the measurements, by the keys of the vectors."""
        return {
            key: {"block": self.block, "mean": mean.clone(), "own": own.clone()}
            for key, mean, own in zip(keys, self.of_mean, self.of_own, strict=True)
        }

    def load_state_dict(self, saved: Mapping[str, Any], keys: Sequence[str], step: int) -> None:  # Any: as state_dict
        """Continue from what `state_dict` returned before `step`; measure again if that has other vectors or blocks."""
        known = [saved.get(key, {"block": None}) for key in keys]
        fits = all(
            one["block"] == self.block and one["mean"].shape == mean.shape
            for one, mean in zip(known, self.of_mean, strict=True)
        )
        if not fits:
            self.measured, self.measure_until = 0, step + FIRST
        for one, mean, own in zip(known, self.of_mean, self.of_own, strict=True):
            mean.copy_(one["mean"]) if fits else mean.zero_()
            own.copy_(one["own"]) if fits else own.zero_()


def sketch(parameters: Mapping[str, nn.Parameter], number: int) -> Tensor:
    """Return the sketch, [64] in float64, of the gradients of all parameters; with other signs for each `number`, the same on all ranks."""
    total = torch.zeros(LENGTH, dtype=torch.float64)
    for name, parameter in parameters.items():
        if parameter.grad is None:
            continue
        flat = parameter.grad.detach().to_dense().flatten()
        rows = -(-flat.numel() // LENGTH)
        signs = torch.randint(0, 2, (rows,), generator=generator(0, f"sketch/{name}", number)).to(flat.dtype) * 2 - 1
        signs = signs.to(flat.device)
        whole = flat.numel() // LENGTH
        total += (signs[:whole] @ flat[: whole * LENGTH].view(whole, LENGTH)).double().cpu()
        rest = flat[whole * LENGTH :].double().cpu()
        total[: rest.numel()] += rest * (float(signs[-1]) if rest.numel() else 0.0)
    return total


@dataclass
class ClipFactor:
    """The root of the mean square norm of the ranks' own gradients over the square norm of their mean; in [1, sqrt(P)]."""

    P: int
    own: float = 0.0  # square norms, older ones with less weight
    mean: float = 0.0

    def observe(self, sketches: Iterable[Tensor]) -> None:
        """Add one measurement, the sketches of all ranks in rank order; of one that has no gradient it is zero, and does not count."""
        found = [each for each in sketches if bool(each.isfinite().all()) and bool(each.any())]
        if not found:
            return
        together = torch.stack(found)
        self.own = _MEMORY * self.own + float(together.square().sum(1).mean())
        self.mean = _MEMORY * self.mean + float(together.mean(0).square().sum())

    @property
    def value(self) -> float:
        """The factor; sqrt(P), as for pure noise, before the first measurement."""
        most = self.P**0.5
        return most if self.own >= self.mean * self.P else max(1.0, (self.own / self.mean) ** 0.5)

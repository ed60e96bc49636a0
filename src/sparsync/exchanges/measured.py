"""Measure a step's gradients: whether they are finite, so that all ranks skip the same steps, and the ratio.

The ratio compares the squares of the mean gradient with those of the rank's gradient, for each block of adjacent elements. Steps are
divided by the root of a rank's own second moments; the ratio scales these down to the mean gradient's. Without Muon, the message of a
measurement also has what moved the mean of each block of second moments, and blocks become as large as their mean over ranks: of a rare
row, one rank sees too few gradients.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsync.comm.metered import MeteredComm
from sparsync.core import Arriving, Bucket, Comm, ParameterSpan, Report, Span, SpanSet, digest, exact_divisor
from sparsync.kernels import operations as kernels
from sparsync.runtime.connection import Reduction

FIRST = 8  # first steps, which all measure the ratio
_MEMORY = 0.98  # weight of older measurements
_NEAR = 0.998  # of the means of second moments that ranks share; what is left for each to tell is small, and is rounded
_LEAST = 1e-30  # mean of a block's second moments below which it counts as this
_FLAT = 1e-9  # share of the mean over ranks below which a rank's own block says nothing about its elements
_SHARED = 16  # measurements after which a block weighs as much as its whole parameter
_SEED = 0xFFFFFFFF  # of the signs of a sketch


@dataclass(frozen=True)
class Gradients:
    """This rank's gradients of a bucket, in the loop's memory, with the first element and the factor of each."""

    tensors: Sequence[Tensor]
    starts: Sequence[int]
    factors: Sequence[float]


def fit(gradients: Iterable[Gradients]) -> bool | Tensor:
    """Tell whether the sum of the squares of all gradients is finite; on a GPU by a tensor []."""
    given = list(gradients)
    tensors = [each for one in given for each in one.tensors]
    factors = [each for one in given for each in one.factors]
    return kernels.squares_fit(tensors, factors, torch.finfo(torch.float32).max)


def host_is_ahead(device: torch.device) -> bool:
    """Tell whether the host may run ahead of the device."""
    return device.type == "cuda"


class Skip:
    """The decision to skip a step on all ranks, as a number on a device. The host reads it one step later, without waiting."""

    def __init__(self, fits: Tensor) -> None:
        """Skip if not `fits` [], on this rank; see `agree`."""
        # [1], not zero: skip
        self.flag = torch.logical_not(fits.view(1), out=torch.empty(1, dtype=torch.float32, device=fits.device))
        self._agreed = False

    def agree(self, comm: Comm) -> Tensor:
        """Skip if any rank does, and return the flag: 4 bytes, before the first bucket."""
        if not self._agreed and comm.size > 1:
            self.flag = comm.all_reduce(self.flag)
        self._agreed = True
        return self.flag

    def send_to_host(self) -> None:
        """Begin to copy the flag to the host, after the step."""
        self._arriving = Arriving(self.flag)

    @property
    def seen(self) -> bool:
        """True if the step was skipped, as copied to the host."""
        return bool(self._arriving)


@dataclass(frozen=True)
class Pending:
    """A step that the host counts as taken until the device tells whether it was skipped."""

    skip: Skip
    counted: Collection[str]  # parameters that took part
    measured: bool


class BlockRatios:
    """The square norms of the mean and the local gradient in each block of adjacent elements, for all vectors of `squares`.

    A sketch of each block, a sum with random signs, estimates the mean gradient's. `squares`: this rank's second moments. `layouts`: the
    parameters in each vector, one after the other. A block belongs to the parameter of its first element.
    """

    averaged = False  # see `average`

    def __init__(
        self, squares: Sequence[Tensor], layouts: Iterable[Sequence[ParameterSpan]], block: int, every: int
    ) -> None:
        self.squares, self.block, self.every = squares, block, every
        # The number of blocks per parameter, the parameter of each block, and whether it has elements of no other.
        self._lengths, self._owners, self._whole = list[Tensor](), list[Tensor](), list[Tensor]()
        for each, layout in zip(squares, layouts, strict=True):
            stops = torch.tensor([entry.span.stop for entry in layout], device=each.device)
            first = torch.arange(0, each.numel(), block, device=each.device)
            owners = torch.searchsorted(stops, first, right=True)
            last = (first + block - 1).clamp_(max=each.numel() - 1)
            self._owners.append(owners.int())
            self._lengths.append(torch.bincount(owners, minlength=len(layout)))
            self._whole.append(owners == torch.searchsorted(stops, last, right=True))
        self.of_mean = [each.new_zeros(-(-each.numel() // block)) for each in squares]  # older measurements weigh less
        self.of_own = [each.clone() for each in self.of_mean]
        self._of_all = self.of_own  # of the average rank, if averaged
        self._shared = list[Tensor]()  # means of blocks of second moments over ranks, if averaged
        self.measured, self.measure_until = 0, FIRST  # measurements so far; steps below this number all measure
        self._known: dict[tuple[int, int, int, bool], Tensor] = {}  # ratios of the last measurement
        # The sum over the blocks of each vector, mean gradients first, as far as the host knows.
        self._sums: list[float] | None = [0.0] * (2 * len(squares))
        self._sums_of_all: list[float] | None = None  # likewise
        self._arriving: Arriving | None = None

    def average(self, averaged: bool) -> None:
        """Make blocks of `squares` as large as their mean over ranks at each measurement from here on, or no longer."""
        if averaged != self.averaged:
            self.averaged, self._of_all = averaged, [each.clone() for each in self.of_own] if averaged else self.of_own
            self._shared = [torch.zeros_like(each) for each in self.of_own if averaged]
            self._sums_of_all = None

    def due(self, step: int) -> bool:
        """Tell whether this step measures. It depends only on the step number, which ranks agree on after a failure too."""
        return step < self.measure_until or step % self.every == 0

    def ratio(self, place: int, P: int) -> Tensor:
        """Compute the squares of the mean gradient over the local ones, [blocks]; 1 for parameters that were always zero.

        One measurement of a block is noisy, and a small value makes its steps too long. So a block is averaged with its whole parameter:
        its weight is small at first, and close to 1 later. If second moments are averaged, blocks of one parameter have its ratio, with
        the squares of the average rank. A gradient that is all noise has 1/P, the lower bound.
        """
        key = place, P, self.measured, self.averaged
        if (known := self._known.get(key)) is not None:
            return known
        ratios = self._of_parameter(place, self.of_own)
        ratios.lerp_(self.of_mean[place] / self.of_own[place], self.measured / (self.measured + _SHARED))
        if self.averaged:
            ratios = torch.where(self._whole[place], self._of_parameter(place, self._of_all), ratios)
        ratios = self._known[key] = ratios.nan_to_num_(1.0).clamp_(1 / P, 1.0)
        return ratios

    def _of_parameter(self, place: int, own: Sequence[Tensor]) -> Tensor:
        lengths = self._lengths[place]
        sums = (torch.segment_reduce(each[place], "sum", lengths=lengths, unsafe=True) for each in (self.of_mean, own))
        return torch.div(*sums).index_select(0, self._owners[place])

    def settle(self) -> None:
        """Read the result of the last measurement, if a device made it."""
        if self._arriving is not None:
            self._sums, self._arriving = self._arriving.read(), None

    def forget_last(self) -> None:
        """Uncount the last measurement: its step was skipped, so it changed nothing."""
        self.measured -= 1

    def _totals(self, of_own: Sequence[Tensor]) -> Tensor:
        return torch.stack([each.sum().to(self.of_mean[0].device) for each in (*self.of_mean, *of_own)])

    def _changed(self) -> None:
        self._known.clear()
        self._sums_of_all = None
        self._sums = self._arriving = None

    def observe(
        self,
        of_mean: Tensor,
        of_own: Sequence[Tensor],
        taking: Sequence[Sequence[Span]],
        skip: Tensor | None = None,
        of_all: Sequence[Tensor] = (),
    ) -> None:
        """Add a measurement: the squares of the mean sums, and of this rank's blocks. Blocks without an element of `taking` stay.

        `of_all`: the squares of blocks on the average rank, if averaged.
        With `skip`, [1], all blocks stay if it is not zero, and a non-finite mean sum counts as zero; the host does not wait.
        """
        self._known.clear()
        self._sums_of_all = None
        self.measured += 1
        weight = max(1 - _MEMORY, 1 / self.measured)
        counts = None if skip is None else skip == 0
        of_mean = of_mean if skip is None else of_mean.nan_to_num(0.0, 0.0, 0.0)
        means = of_mean.split([len(each) for each in of_own])
        for i, (mean, own, spans) in enumerate(zip(means, of_own, taking, strict=True)):
            done = 0
            for span in spans:
                blocks = slice(max(done, span.start // self.block), done := -(-span.stop // self.block))
                every = [(self.of_mean[i], mean.to(own)), (self.of_own[i], own)]
                for vector, found in [*every, (self._of_all[i], of_all[i])] if of_all else every:
                    kept, new = vector[blocks], found[blocks]
                    kept.lerp_(new if counts is None else torch.where(counts.to(new.device), new, kept), weight)
        self._arriving = Arriving(self._totals(self.of_own))
        if skip is None:
            self.settle()

    def share(self, place: int, before: Tensor, moved: Tensor, skip: Tensor | None) -> None:
        """Make each block of `squares` as large as its mean over ranks `before` this step's gradients, and what these changed.

        `moved`: how far that mean is from `_NEAR` of the one that ranks share. Nothing changes if `skip`, [1], is not zero, and in blocks
        of several parameters, of which ranks may see different ones.
        """
        square, shared = self.squares[place], self._shared[place]
        mean, now = (_NEAR * shared + moved.to(shared)).clamp_(min=0.0), _means(square, self.block)
        wanted, own = mean + (now - before).clamp_(min=0.0), torch.maximum(now, before)
        taken = self._whole[place] & mean.isfinite()
        if skip is not None:
            taken &= skip.to(now.device) == 0
        flat = own < _FLAT * wanted
        factors = torch.where(taken, torch.where(flat, 0.0, wanted / own), 1.0)
        added = torch.where(taken & flat, wanted, 0.0)
        shared.copy_(torch.where(taken, mean, shared))
        end = square.numel() // self.block * self.block  # of the blocks before a shorter one
        for part, of_part in ((square[:end], slice(end // self.block)), (square[end:], slice(-1, None))):
            if part.numel():
                part.view(len(now[of_part]), -1).mul_(factors[of_part, None]).add_(added[of_part, None])

    def regrouped(self, step: int, before: int, ranks: int) -> None:
        """Convert the measurements of `before` ranks to `ranks` ranks; the `FIRST` steps from `step` on all measure.

        The mean of P gradients has the square s + (own - s) / P, with the squares s of the expected and own of a rank's gradient.
        """
        self._changed()
        self.measure_until = step + FIRST
        for each in self._shared:  # a joined rank has none
            each.zero_()
        if before == 1:  # one rank measures nothing, so what it holds is of other ranks
            self.measured = 0
        if before > 1 and ranks > 1:
            for mean, own in zip(self.of_mean, self._of_all, strict=True):
                expected = ((before * mean - own) / (before - 1)).clamp_(min=0.0)
                mean.copy_(expected + (own - expected) / exact_divisor(own, ranks))

    def clip_factor(self, P: int) -> float:
        """Compute the norm of the local gradient over the norm of the mean one, in [1, sqrt(P)]; 1 before the first measurement.

        The host learns of a device's last measurement in `settle`.
        """
        return self._factor(self._sums, P)

    def own_factor(self, P: int) -> float:
        """Compute `clip_factor` of the ranks whose gradients `squares` hold, after the last measurement: a device is waited for."""
        if self._sums_of_all is None:
            self._sums_of_all = self._totals(self._of_all).tolist()
        return self._factor(self._sums_of_all, P)

    def _factor(self, sums: list[float] | None, P: int) -> float:
        mean, own = map(sum, self._split(sums))
        return min(P, max(1.0, own / mean)) ** 0.5 if mean > 0 else 1.0

    def _split(self, sums: list[float] | None) -> tuple[list[float], list[float]]:
        """Split the sums into those of the mean and of this rank's gradients; None: compute them."""
        if sums is None:
            sums = self._sums = self._totals(self.of_own).tolist()
        return sums[: len(self.of_mean)], sums[len(self.of_mean) :]

    def state_dict(self, keys: Sequence[str]) -> dict[str, Any]:  # Any: numbers and tensors
        """Return the measurements, by the keys of the vectors; `known`: their sums, which a device may deliver a step late."""
        known = [
            torch.tensor(pair, dtype=torch.float64, device="cpu") for pair in zip(*self._split(self._sums), strict=True)
        ]
        return {
            key: {
                "block": self.block,
                "known": sums,
                **{name: each[place].clone() for name, each in self._kept().items()},
            }
            for place, (key, sums) in enumerate(zip(keys, known, strict=True))
        }

    def _kept(self) -> dict[str, list[Tensor]]:
        kept = {"mean": self.of_mean, "own": self.of_own}
        return {**kept, "all": self._of_all, "shared": self._shared} if self.averaged else kept

    def load_state_dict(self, saved: Mapping[str, Any], keys: Sequence[str], step: int) -> None:  # Any: as state_dict
        """Continue from a state before `step`; measure again if it has other vectors or blocks."""
        self._changed()
        known = [saved.get(key, {"block": None}) for key in keys]
        fits = all(
            one["block"] == self.block and one["mean"].shape == mean.shape
            for one, mean in zip(known, self.of_mean, strict=True)
        )
        if not fits:
            self.measured, self.measure_until = 0, step + FIRST
        for name, vectors in self._kept().items():
            for one, each in zip(known, vectors, strict=True):
                # A state of ranks that did not average has only its own.
                each.copy_(one[name if name in one else "own"]) if fits and name in {*one, "all"} else each.zero_()
        if fits:
            self._sums = [float(one["known"][place]) for place in (0, 1) for one in known]
            self._arriving = Arriving(self._totals(self.of_own))


@dataclass(eq=False)
class MeanOfSketches(Reduction):
    """The mean over ranks, sent in bfloat16; its first `squared` elements become their squares.

    The report's "overflow" says whether they hold NaN or Inf. With `skip` it does not: only the device knows.
    """

    squared: int
    skip: Skip | None = None
    name = "bf16"

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        comm = MeteredComm(comm)
        if self.skip is not None:
            self.skip.agree(comm)
        total = bucket.grad.copy_(comm.all_reduce(bucket.grad.bfloat16()))
        total.div_(exact_divisor(total, comm.size))[: self.squared].square_()
        n, overflow = bucket.grad.numel(), self.skip is None and not kernels.all_finite(bucket.grad)
        return Report(self.name, bucket.key, bucket.step, n, n, n, comm.sent, details={"overflow": overflow})


class Measurement:
    """A measurement of the ratio in one step. `gradients`: this rank's, by bucket. If they are not `finite`, all sums are NaN.

    If second moments are averaged, ranks hold the same means of blocks, and each sends how far its own are from nearly these, so that what
    is rounded is small, and a difference between ranks dies out; and the mean over its blocks of each parameter's squares.
    """

    def __init__(
        self,
        ratios: BlockRatios,
        keys: Sequence[str],
        step: int,
        finite: bool,
        gradients: Sequence[Gradients],
        skip: Skip | None = None,
    ) -> None:
        self._ratios, self._own, self._skip, found = ratios, list[Tensor](), skip, list[Tensor]()
        for key, like, given in zip(keys, ratios.squares, gradients, strict=True):
            seed = digest(f"ratio/{key}/{step}") & _SEED
            sums, own = kernels.sketch(given.tensors, given.starts, given.factors, like, ratios.block, seed)
            found.append(sums.to(found[0].device) if found else sums)
            self._own.append(own)
        for each in () if finite else found:
            each.fill_(torch.nan)
        self._before = [_means(each, ratios.block) for each in ratios.squares if ratios.averaged]
        for place, before in enumerate(self._before):
            lengths = ratios._lengths[place]
            whole = torch.segment_reduce(self._own[place], "sum", lengths=lengths, unsafe=True) / lengths.clamp(min=1)
            found += [(before - _NEAR * ratios._shared[place]).to(found[0]), whole.to(found[0])]
        self._bucket = Bucket("ratio", torch.cat(found) if len(found) > 1 else found[0], step)

    @property
    def reduction(self) -> tuple[Bucket, MeanOfSketches]:
        """The bucket of all blocks, and the reduction to the squares of their mean sums, and to means over ranks."""
        return self._bucket, MeanOfSketches(sum(map(len, self._own)), self._skip)

    def observe(self, taking: Iterable[Sequence[ParameterSpan]]) -> None:
        """Add the reduced measurement, without NaN and Inf; `taking`: the participating parameters of each bucket.

        With `skip` it may hold NaN or Inf, and counts unless the step is skipped.
        """
        flag = None if self._skip is None else self._skip.flag
        ratios, taken = self._ratios, [SpanSet.of(each).spans for each in taking]
        sizes = [len(each) for pair in zip(self._before, ratios._lengths, strict=False) for each in pair]
        of_mean, *means = self._bucket.grad.split([sum(map(len, self._own)), *sizes])
        known = zip(means[1::2], self._own, ratios._owners, strict=False)
        of_all = [each.to(own).nan_to_num_(0.0, 0.0, 0.0).index_select(0, owners) for each, own, owners in known]
        ratios.observe(of_mean, self._own, taken, flag, of_all)
        for place, (before, moved) in enumerate(zip(self._before, means[::2], strict=True)):
            ratios.share(place, before, moved, flag)


def _means(square: Tensor, block: int) -> Tensor:
    return kernels.over_means(square, block, _LEAST).reciprocal_()

"""What a rank sends of its gradients, and how the mean of what all ranks have sent moves the weights: in the numbers of three passes.

The passes themselves are kernels: see `sparsync.kernels.step_reference`.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.base.scheme import Scheme
from sparsync.collectives.values import QuantizedMean
from sparsync.comm.metered import MeteredComm
from sparsync.core import Arriving, Bucket, Comm, ParameterSpan, Report, Span, SpanSet, digest, exact_divisor
from sparsync.exchanges.block_ratios import BlockRatios
from sparsync.exchanges.rules import MuonRule, ParameterGroups, Rule, Value, move_matrices_
from sparsync.exchanges.steps_options import Steps
from sparsync.exchanges.training_loop import GradientDivisor
from sparsync.exchanges.weights import Weights
from sparsync.kernels import operations as kernels
from sparsync.kernels.step_reference import Move, Spread
from sparsync.runtime.connection import Reduction

VECTORS = ("momentum", "square")  # m, the same on all ranks; v, each rank's own
_SEED = 0xFFFFFFFF  # of the signs of a sketch
COUNTS = ("applied", "seen")  # steps that moved a parameter; gradients of it in the second moments


@dataclass(frozen=True)
class Gradients:
    """This rank's gradients of a bucket, where they lie: each from an element on, and times a factor."""

    tensors: Sequence[Tensor]
    starts: Sequence[int]
    factors: Sequence[float]


@dataclass(frozen=True)
class StepsToMake:
    """What this rank's gradients become steps by; see `kernels.make_steps_`."""

    gradients: Gradients
    square: Tensor
    ratio: Tensor
    block: int
    spans: Sequence[Span]
    numbers: Sequence[Spread]

    def make(self, out: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
        """Return the steps, in `out` [n] if given, after the gradients were added to the second moments; see `kernels.make_steps_`."""
        return self._made(self.numbers, out, skip)

    def again(self) -> Tensor:
        """Return what `make` wrote, from second moments that have these gradients."""
        return self._made([(rate, 1.0, eps, unbiased) for rate, _, eps, unbiased in self.numbers])

    def encode(self, residual: Tensor, rank: int, P: int, bits: int, skip: Tensor | None) -> Tensor:
        """Return the packets of all chunks but the own one; see `kernels.encode_steps_`."""
        given = self.gradients
        made = given.tensors, given.starts, given.factors, self.square, self.ratio, self.block, self.spans, self.numbers
        return kernels.encode_steps_(residual, *made, rank, P, bits, skip)

    def _made(self, numbers: Sequence[Spread], out: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
        out, given = torch.empty_like(self.square) if out is None else out, self.gradients
        moments = self.square, self.ratio, self.block, self.spans, numbers
        kernels.make_steps_(out, given.tensors, given.starts, given.factors, *moments, skip)
        return out


class Skip:
    """Whether all ranks skip a step, on a device: nobody waits for it but who asks, one step later."""

    def __init__(self, fits: Tensor) -> None:
        """Skip if not `fits` [], on this rank; see `agree`."""
        # [1], not zero where it is to be skipped
        self.flag = torch.logical_not(fits.view(1), out=torch.empty(1, dtype=torch.float32, device=fits.device))
        self._agreed = False

    def agree(self, comm: Comm) -> Tensor:
        """Skip if any rank does, and return the flag: 4 bytes, before the first bucket."""
        if not self._agreed and comm.size > 1:
            self.flag = comm.all_reduce(self.flag)
        self._agreed = True
        return self.flag

    def send_to_host(self) -> None:
        """Begin to copy it to this machine's memory, after the step."""
        self._arriving = Arriving(self.flag)

    @property
    def seen(self) -> bool:
        """Return what came to the host."""
        return bool(self._arriving)


@dataclass(frozen=True)
class Pending:
    """A step of which a device knows whether it was skipped, and the host counts as if it was not."""

    skip: Skip
    counted: Collection[str]  # parameters that took part
    measured: bool


class Sender:
    """The moments and counts of `weights`, by which gradients become steps, and mean steps move the weights.

    `vectors` has the tensors of all buckets, and `counts` the numbers of each parameter, by name.
    """

    def __init__(self, groups: ParameterGroups, weights: Weights, options: Steps) -> None:
        self.groups, self.weights, self.options = groups, weights, options
        self.keys = [each.key for each in weights.buckets]
        self.vectors = {key: [each.empty().zero_() for each in weights.buckets] for key in VECTORS}
        self.counts = {key: dict.fromkeys(weights.trained, 0) for key in COUNTS}
        layouts = [each.layout for each in weights.buckets]
        self.ratios = BlockRatios(self.vectors["momentum"], layouts, options.block, options.measure_every)
        self.idle: frozenset[str] = frozenset()  # parameters that take no part in the step

    def gradients(self, place: int, divisor: GradientDivisor) -> Gradients:
        """Return this rank's gradients of the parameters of bucket `place` that take part."""
        tensors, starts, factors = list[Tensor](), list[int](), list[float]()
        bucket = self.weights.buckets[place]
        for entry, parameter in zip(bucket.layout, bucket.parameters.values(), strict=True):
            if (gradient := parameter.grad) is not None and entry.name not in self.idle:
                tensors.append(gradient.to_dense() if gradient.is_sparse else gradient)
                starts.append(entry.span.start)
                factors.append(divisor.undone(entry.name))
        return Gradients(tensors, starts, factors)

    def steps_to_make(self, place: int, gradients: Gradients, P: int) -> StepsToMake:
        """Count a gradient of each parameter of bucket `place` that takes part, and return what makes steps of them."""

        def made(rule: Rule, entry: ParameterSpan, t: int) -> Spread:
            beta2 = self.beta2(rule)
            return rule.sent_rate(entry.shape), beta2, rule.eps, 1 - beta2**t

        found = self._counted(place, "seen", made)
        spans, numbers = [span for span, _ in found], [number for _, number in found]
        ratio, block = self.ratios.ratio(place, P), self.ratios.block
        return StepsToMake(gradients, self.vectors["square"][place], ratio, block, spans, numbers)

    def move(self, place: int, mean: Tensor | QuantizedMean, skip: Tensor | None = None) -> None:
        """Move the common weights of bucket `place` by the mean step of all ranks, [n], unless `skip`, [1], is not zero."""
        bucket, momentum = self.weights.buckets[place], self.vectors["momentum"][place]
        found = self._counted(place, "applied", lambda rule, _, t: rule.move(t))
        rules = [(entry, self.groups.rules[self.groups.number[entry.name]]) for entry in self.taking(place)]
        matrices = [(entry, rule) for entry, rule in rules if isinstance(rule, MuonRule)]

        def move(
            targets: Sequence[Tensor], starts: Sequence[int], m: Tensor, moves: Sequence[tuple[Span, Move]]
        ) -> None:
            numbers = [span for span, _ in moves], [number for _, number in moves]
            if isinstance(mean, Tensor):
                kernels.move_steps_(targets, starts, m, mean, *numbers, skip)
            else:
                assert mean.kernel_bits is not None  # of a whole form
                kernels.apply_steps_(targets, starts, m, mean.packets, mean.kernel_bits, *numbers, skip)

        with bucket.moved() as (targets, starts):
            followed = momentum.clone() if matrices else momentum
            move(targets, starts, momentum, found)
            if matrices:
                move([], [], followed, [(entry.span, (rule.memory, 1.0, 0.0)) for entry, rule in matrices])
                weights = [(bucket.weights_of(entry), entry.span.of(followed), rule) for entry, rule in matrices]
                move_matrices_(weights, skip)

    def taking(self, place: int) -> Sequence[ParameterSpan]:
        """Return the parameters of bucket `place` that take part in this step."""
        layout = self.weights.buckets[place].layout
        return [entry for entry in layout if entry.name not in self.idle] if self.idle else layout

    def beta2(self, rule: Rule) -> float:
        """Return the memory of the second moments of a parameter with this rule."""
        return rule.remembers(self.options.beta2)

    def keep_for(self, options: Steps, scheme: Scheme) -> float:
        """Return `keep` of these options, or what suits the scheme and the optimizers."""
        return options.keep_for(scheme, any(isinstance(rule, MuonRule) for rule in self.groups.rules))

    def uncount(self, names: Iterable[str]) -> None:
        """Count the last step of these parameters no longer."""
        for name in names:
            for each in self.counts.values():
                each[name] -= 1
        self.groups.recount()

    def load(self, counts: dict[str, dict[str, int]]) -> None:
        """Take other counts."""
        self.counts |= counts
        self.groups.recount()

    def _counted(
        self, place: int, key: str, value_of: Callable[[Rule, ParameterSpan, int], Value]
    ) -> list[tuple[Span, Value]]:
        """Count a step of each parameter of a bucket that takes part; return the spans of equal values. See ParameterGroups.counted."""
        return self.groups.counted((key, place), self.taking(place), self.counts[key], value_of)


class MeanOfSketches(Reduction):
    """The squares of the mean over ranks, which is sent in bfloat16.

    The report's "overflow" says whether they hold NaN or Inf; not with `skip`, where it is found out on the device.
    """

    name = "bf16"

    def __init__(self, skip: Skip | None = None) -> None:
        self._skip = skip

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        comm = MeteredComm(comm)
        if self._skip is not None:
            self._skip.agree(comm)
        total = bucket.grad.copy_(comm.all_reduce(bucket.grad.bfloat16()))
        total.div_(exact_divisor(total, comm.size)).square_()
        n, overflow = bucket.grad.numel(), self._skip is None and not kernels.all_finite(bucket.grad)
        return Report(self.name, bucket.key, bucket.step, n, n, n, comm.sent, details={"overflow": overflow})


class Measurement:
    """A measurement of the ratio in one step. `gradients` are this rank's of each bucket. Where they are not `finite`, all sums are NaN."""

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
        for key, like, given in zip(keys, ratios.like, gradients, strict=True):
            seed = digest(f"ratio/{key}/{step}") & _SEED
            sums, own = kernels.sketch(given.tensors, given.starts, given.factors, like, ratios.block, seed)
            found.append(sums.to(found[0].device) if found else sums)
            self._own.append(own)
        sums = torch.cat(found) if len(found) > 1 else found[0]
        self._bucket = Bucket("ratio", sums if finite else sums.fill_(torch.nan), step)

    @property
    def reduction(self) -> tuple[Bucket, MeanOfSketches]:
        """What is to be reduced: the sums of all blocks, which become the squares of their means; and how."""
        return self._bucket, MeanOfSketches(self._skip)

    def observe(self, taking: Iterable[Sequence[ParameterSpan]]) -> None:
        """Take the measurement in, once it was reduced and holds neither NaN nor Inf; `taking` are the parameters of each bucket.

        With `skip` it may hold them, and is taken in unless the step is skipped.
        """
        flag = None if self._skip is None else self._skip.flag
        self._ratios.observe(self._bucket.grad, self._own, [SpanSet.of(each).spans for each in taking], flag)


def fit(gradients: Iterable[Gradients]) -> bool | Tensor:
    """Return whether the sum of the squares of all gradients is finite; on a GPU a tensor [] that says so."""
    given = list(gradients)
    tensors = [each for one in given for each in one.tensors]
    factors = [each for one in given for each in one.factors]
    return kernels.squares_fit(tensors, factors, torch.finfo(torch.float32).max)

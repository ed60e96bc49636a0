"""Steps on their way from gradients to weights: make them, exchange them, and move the weights by their mean.

`StepsToMake` makes steps from gradients, `WholeStep` exchanges steps that send every element in few bits, and `Sender` moves the weights.
Each is one pass over memory, by a kernel, see `sparsync.kernels.step_reference`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from sparsync.collectives.values import QuantizedMean
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Comm, ParameterSpan, Report, Span, phase, spans
from sparsync.exchanges.measured import BlockRatios, Gradients, Skip
from sparsync.exchanges.rules import MuonRule, ParameterGroups, Rule, Value, move_matrices_
from sparsync.exchanges.steps_options import Steps
from sparsync.exchanges.training_loop import GradientDivisor
from sparsync.exchanges.weights import Weights
from sparsync.kernels import operations as kernels
from sparsync.kernels.step_reference import Move, Scales, Spread
from sparsync.kernels.value_reference import nan_packet
from sparsync.runtime.connection import Reduction
from sparsync.wire import ValueCodec, Values

VECTORS = ("momentum", "square")  # m, the same on all ranks; v, see `Sender.common`
COUNTS = ("applied", "seen")  # per parameter: steps that moved it; gradients in its second moments
_FLOOR = 0.1  # added to the root of an element's second moment over its block's
_LEAST = 1e-30  # first second moment of an element, so that blocks without gradients have a scale


@dataclass(frozen=True)
class StepsToMake:
    """Gradients, and the coefficients that turn them into steps, or into scaled gradients; see `kernels.make_steps_`."""

    gradients: Gradients
    square: Tensor
    ratio: Tensor
    block: int
    spans: Sequence[Span]
    numbers: Sequence[Spread]

    def make(self, out: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
        """Add the gradients to the second moments, and compute the steps, into `out` [n] if given; see `kernels.make_steps_`."""
        return self._made(self.numbers, out, skip)

    def again(self) -> Tensor:
        """Compute the steps of `make` again; the second moments contain these gradients already."""
        return self._made([(rate, 1.0, eps, unbiased) for rate, _, eps, unbiased in self.numbers])

    def encode(self, residual: Tensor, rank: int, P: int, bits: int, skip: Tensor | None) -> Tensor:
        """Encode the packets of all chunks but this rank's; see `kernels.encode_steps_`."""
        given = self.gradients
        made = given.tensors, given.starts, given.factors, self.square, self.ratio, self.block, self.spans, self.numbers
        return kernels.encode_steps_(residual, *made, rank, P, bits, skip)

    def _made(self, numbers: Sequence[Spread], out: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
        out, given = torch.empty_like(self.square) if out is None else out, self.gradients
        moments = self.square, self.ratio, self.block, self.spans, numbers
        kernels.make_steps_(out, given.tensors, given.starts, given.factors, *moments, skip)
        return out


class Sender:
    """The moments and counts of `weights`: turns gradients into steps, and moves the weights by mean steps.

    `vectors` has the tensors of all buckets, and `counts` the counts of all parameters by name.

    With `common`, second moments are those of mean gradients, the same on all ranks. A rank sends its gradient g over the scale
    D = sqrt(v / the mean of v in the block) + 0.1, all ranks multiply the mean by D, and take a step of LaProp with it. Otherwise
    second moments are averaged by block (see BlockRatios), or with Muon a rank's own, and it sends steps.
    """

    common = False
    shares = False  # moments were loaded or converted: until this step ends, those of ranks may differ

    def __init__(self, groups: ParameterGroups, weights: Weights, options: Steps) -> None:
        self.groups, self.weights, self.options = groups, weights, options
        self.keys = [each.key for each in weights.buckets]
        self.vectors = {key: [each.empty().zero_() for each in weights.buckets] for key in VECTORS}
        self.counts = {key: dict.fromkeys(weights.trained, 0) for key in COUNTS}
        layouts = [each.layout for each in weights.buckets]
        self.ratios = BlockRatios(self.vectors["square"], layouts, options.block, options.measure_every)
        self.idle: frozenset[str] = frozenset()  # parameters that take no part in the step

    def gradients(self, place: int, divisor: GradientDivisor) -> Gradients:
        """Collect this rank's gradients of the parameters in bucket `place` that take part."""
        tensors, starts, factors = list[Tensor](), list[int](), list[float]()
        bucket = self.weights.buckets[place]
        for entry, parameter in zip(bucket.layout, bucket.parameters.values(), strict=True):
            if (gradient := parameter.grad) is not None and entry.name not in self.idle:
                tensors.append(gradient.to_dense() if gradient.is_sparse else gradient)
                starts.append(entry.span.start)
                factors.append(divisor.undone(entry.name))
        return Gradients(tensors, starts, factors)

    def steps_to_make(self, place: int, gradients: Gradients, P: int) -> StepsToMake:
        """Return the steps of bucket `place` to make; unless these are scaled gradients, count one for each participating parameter."""
        if self.common:
            square, over, block, floor = self._scales(place)
            spans = [entry.span for entry in self.taking(place)] if self.idle else [Span(0, square.numel())]
            return StepsToMake(gradients, square, over, block, spans, [(1.0, 1.0, floor, 1.0)] * len(spans))
        square, block = self.vectors["square"][place], self.ratios.block
        counted = self._counted(place, "seen", self._spread)
        spans, numbers = [span for span, _ in counted], [number for _, number in counted]
        return StepsToMake(gradients, square, self.ratios.ratio(place, P), block, spans, numbers)

    def _spread(self, rule: Rule, entry: ParameterSpan, t: int) -> Spread:
        beta2 = rule.remembers(self.options.beta2)
        return rule.sent_rate(entry.shape), beta2, rule.eps, 1 - beta2**t

    def _scales(self, place: int) -> Scales:
        """Compute the scales of a bucket's gradients. In a step that shares second moments all elements have one, because they differ."""
        square, block = self.vectors["square"][place], self.ratios.block
        if self.shares:
            return square, square.new_zeros(-(-square.numel() // block)), block, 1.0 + _FLOOR
        return square, kernels.over_means(square, block, _LEAST), block, _FLOOR

    def move(self, place: int, mean: Tensor | QuantizedMean, skip: Tensor | None = None) -> None:
        """Move the common weights of bucket `place` by the mean of what all ranks sent, [n], unless `skip`, [1], is not zero."""
        bucket, momentum = self.weights.buckets[place], self.vectors["momentum"][place]
        rules = [(entry, self.groups.rules[self.groups.number[entry.name]]) for entry in self.taking(place)]
        matrices = [(entry, rule) for entry, rule in rules if isinstance(rule, MuonRule)]
        scales, moves = self._scales(place) if self.common else None, self._moves(place)
        with bucket.moved() as (targets, starts):
            followed = momentum.clone() if matrices else momentum
            _move(targets, starts, momentum, mean, moves, skip, scales)
            if matrices:
                remembers = [(entry.span, (rule.memory, 1.0, 0.0)) for entry, rule in matrices]
                _move([], [], followed, mean, remembers, skip, None)
                weights = [(bucket.weights_of(entry), entry.span.of(followed), rule) for entry, rule in matrices]
                move_matrices_(weights, skip)

    def _moves(self, place: int) -> list[tuple[Span, Move]]:
        """Count a move of each participating parameter of a bucket; return the spans of equal coefficients, and these."""

        def numbers(rule: Rule, entry: ParameterSpan, t: int) -> Move:
            return (*rule.move(t), *self._spread(rule, entry, t)) if self.common else rule.move(t)

        counted = self._counted(place, "applied", numbers)
        if self.common:
            self.counts["seen"] |= {each.name: self.counts["applied"][each.name] for each in self.taking(place)}
        return counted

    @property
    def own_squares(self) -> bool:
        """Tell whether second moments are this rank's alone."""
        return not self.common and not self.ratios.averaged

    @property
    def has_muon(self) -> bool:
        """Tell whether any parameter moves by Muon."""
        return any(isinstance(rule, MuonRule) for rule in self.groups.rules)

    def take_squares(self, common: bool, were_common: bool, P: int) -> None:
        """Go on with second moments of the mean gradients if `common`, or with this rank's own, which are larger by the ratio."""
        self.common, self.shares = common, self.shares or (common and not were_common)
        for place, square in enumerate(self.vectors["square"]):
            if common != were_common:
                ratio = self.ratios.ratio(place, P).repeat_interleave(self.ratios.block)[: square.numel()]
                square.mul_(ratio if common else 1 / ratio)
            if common:
                square.clamp_(min=_LEAST)

    def taking(self, place: int) -> Sequence[ParameterSpan]:
        """List the parameters of bucket `place` that take part in this step."""
        layout = self.weights.buckets[place].layout
        return [entry for entry in layout if entry.name not in self.idle] if self.idle else layout

    def uncount(self, names: Iterable[str]) -> None:
        """Undo the count of the last step of these parameters."""
        for name in names:
            for each in self.counts.values():
                each[name] -= 1
        self.groups.recount()

    def load(self, counts: dict[str, dict[str, int]]) -> None:
        """Replace counts."""
        self.counts |= counts
        self.groups.recount()

    def _counted(
        self, place: int, key: str, value_of: Callable[[Rule, ParameterSpan, int], Value]
    ) -> list[tuple[Span, Value]]:
        """Count a step for each participating parameter of a bucket; return the spans of equal values. See ParameterGroups.counted."""
        return self.groups.counted((key, place), self.taking(place), self.counts[key], value_of)


def _move(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    m: Tensor,
    mean: Tensor | QuantizedMean,
    moves: Sequence[tuple[Span, Move]],
    skip: Tensor | None,
    scales: Scales | None,
) -> None:
    numbers = [span for span, _ in moves], [number for _, number in moves], skip, scales
    if isinstance(mean, Tensor):
        kernels.move_steps_(targets, starts, m, mean, *numbers)
    else:
        assert mean.kernel_bits is not None  # of a whole form
        kernels.apply_steps_(targets, starts, m, mean.packets, mean.kernel_bits, *numbers)


@dataclass(eq=False)
class WholeStep(Reduction):
    """The exchange of one bucket's step, with every element sent in few bits. Only the residual is kept between two steps.

    The packets and the mean have the same bits as in `quantized_all_reduce_`. `steps` None: this rank's gradient is not finite, and it
    sends NaN. With `skip` the device decides: nothing changes if a rank's gradient is not finite, and the host does not know yet.
    """

    name: str  # of the scheme
    bucket: Bucket  # its gradient is the residual
    values: tuple[Values, Values]  # up and down
    steps: StepsToMake | None
    skip: Skip | None = None
    mean: QuantizedMean | None = field(default=None, init=False)  # once it has arrived, unless the step is skipped
    # Partials rather than bound methods: a cycle with this object would keep gradients alive.
    _undo: list[Callable[[], None]] = field(default_factory=list, init=False)

    @property
    def has_residual(self) -> bool:
        return True

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        """Exchange the step of `bucket`, which holds the residual. With "overflow" in the report the residual is unchanged."""
        comm, rank, P, residual, n = MeteredComm(comm), comm.rank, comm.size, bucket.grad, bucket.grad.numel()
        up, down = map(ValueCodec, self.values)
        chunks, dtype = spans(n, P), residual.dtype
        sizes = [up.nbytes(len(chunk), dtype) * (owner != rank) for owner, chunk in enumerate(chunks)]
        mine, bits, bits_down = chunks[rank], up.kernel_bits, down.kernel_bits
        assert bits is not None and bits_down is not None
        flag = None if self.skip is None else self.skip.agree(comm)
        with phase("encode"):
            if self.steps is None:
                lengths = [len(chunk) for owner, chunk in enumerate(chunks) if owner != rank]
                sent = [nan_packet(length, bits, residual.device) for length in lengths]
                sent.insert(rank, residual.new_empty(0, dtype=torch.uint8))
            else:
                sent = list(self.steps.encode(residual, rank, P, bits, flag).split(sizes))
                self._undo.append(partial(_take_back, residual, chunks, rank, sent, up))
        try:
            size = up.nbytes(len(mine), dtype)
            received = comm.all_to_all(sent, [size * (source != rank) for source in range(P)])
            with phase("decode"):
                others = [packet for source, packet in enumerate(received) if source != rank]
                if self.steps is None or (
                    flag is None and not kernels.packets_fit(others, [len(mine)] * len(others), bits, P)
                ):
                    packet = nan_packet(len(mine), bits_down, residual.device)
                else:
                    packet = kernels.reduce_shares_(mine.of(residual), others, bits, P, bits_down, flag)
                    self._undo.append(partial(_take_sum_back, mine.of(residual), packet, others, up, down, P))
            mean = QuantizedMean(
                comm.all_gather(packet, [down.nbytes(len(chunk), dtype) for chunk in chunks]), down, n, dtype
            )
            overflow = flag is None and not mean.fits(P)
        except BaseException:
            if self.skip is None:  # else nobody knows after a lost connection whether the step was skipped
                self._forget(bucket)
            raise
        if overflow:
            self._forget(bucket)
        else:
            self.mean = mean
        return Report(self.name, bucket.key, bucket.step, n, n, n, comm.sent, details={"overflow": overflow})

    def whole(self) -> Tensor | None:
        """Decode the mean into a vector, [n]; None if the step is skipped."""
        return None if self.mean is None else self.mean.decoded()

    def rollback(self, bucket: Bucket) -> None:
        """Put what was sent back into the residual; nothing if a device skips the step, because its packets hold NaN."""
        self.mean = None
        before = None if self.skip is None or not self._undo else bucket.grad.clone()
        while self._undo:
            self._undo.pop()()
        if before is not None and self.skip is not None:
            bucket.grad.copy_(torch.where(self.skip.flag == 0, bucket.grad, before))

    def _forget(self, bucket: Bucket) -> None:
        """Restore the residual from before the step, up to rounding."""
        made = bool(self._undo)
        self.rollback(bucket)
        if made and self.steps is not None:
            bucket.grad.sub_(self.steps.again())


def _take_back(residual: Tensor, chunks: Sequence[Span], rank: int, sent: Sequence[Tensor], codec: ValueCodec) -> None:
    for owner, (chunk, packet) in enumerate(zip(chunks, sent, strict=True)):
        if owner != rank:
            chunk.of(residual).add_(codec.decode(packet, len(chunk), residual.dtype), alpha=len(chunks))


def _take_sum_back(
    own: Tensor, packet: Tensor, others: Sequence[Tensor], up: ValueCodec, down: ValueCodec, P: int
) -> None:
    total = own.double().add_(down.decode(packet, len(own), own.dtype), alpha=P)
    for each in others:
        total.sub_(up.decode(each, len(own), own.dtype), alpha=P)
    own.copy_(total)

"""What a rank sends of its gradients, and how the mean of what all ranks have sent moves the weights: in the numbers of three passes.

The passes themselves are kernels: see `sparsync.kernels.step_reference`.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from sparsync.base.scheme import Scheme
from sparsync.collectives.values import QuantizedMean
from sparsync.core import ParameterSpan, Span
from sparsync.exchanges.block_ratios import BlockRatios
from sparsync.exchanges.rules import MuonRule, ParameterGroups, Rule, Value, move_matrices_
from sparsync.exchanges.steps_options import Steps
from sparsync.exchanges.training_loop import GradientDivisor
from sparsync.exchanges.weights import Weights
from sparsync.exchanges.whole_steps import Gradients, StepsToMake
from sparsync.kernels import operations as kernels
from sparsync.kernels.step_reference import Move, Spread

VECTORS = ("momentum", "square")  # m, the same on all ranks; v, each rank's own
COUNTS = ("applied", "seen")  # steps that moved a parameter; gradients of it in the second moments


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


def fit(gradients: Iterable[Gradients]) -> bool | Tensor:
    """Return whether the sum of the squares of all gradients is finite; on a GPU a tensor [] that says so."""
    given = list(gradients)
    tensors = [each for one in given for each in one.tensors]
    factors = [each for one in given for each in one.factors]
    return kernels.squares_fit(tensors, factors, torch.finfo(torch.float32).max)

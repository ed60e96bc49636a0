"""The base of methods that exchange an optimizer's steps: AdamWSteps.

Each rank turns its gradient into a step (`_to_step_`), the steps go through the scheme, and all ranks apply the mean step to the common
weights (`_move`). Also here: which parameters take part, the measured ratio, skipped steps, and the state.
"""

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.base.state import innermost, overflowed
from sparsync.collectives.values import QuantizedMean
from sparsync.core import Bucket, Comm, ParameterSpan, Report, Span
from sparsync.exchanges.agreement import FirstRanks, Gathered
from sparsync.exchanges.auto_bits import STEPS, Stopwatch
from sparsync.exchanges.block_ratios import BlockRatios, Measurement
from sparsync.exchanges.moments import Moments
from sparsync.exchanges.own_weights import CURE_OF_SET, CURE_OF_UNEXCHANGED, ShownWeights, frozen_and_copies
from sparsync.exchanges.rules import MuonRule, ParameterGroups, Rule, Value, exchangeable, move_matrices_
from sparsync.exchanges.step_method import State, StepMethod
from sparsync.exchanges.steps_options import Steps
from sparsync.exchanges.taken_optimizer import TakenOptimizer
from sparsync.exchanges.training_loop import GradientDivisor, Replica
from sparsync.exchanges.weights import FewNonzero, Mean, Reduced, WeightBucket, by_name
from sparsync.exchanges.whole_steps import Gradients, SchemeStep, Skip, StepsToMake, WholeStep
from sparsync.kernels import operations as kernels
from sparsync.kernels.step_reference import Move, Spread
from sparsync.recipes import Recipe
from sparsync.runtime.connection import Reduction
from sparsync.runtime.findings import steps_in_backward, warn_of
from sparsync.runtime.snapshot import Part, Snapshot
from sparsync.runtime.state_checks import check_fingerprint
from sparsync.runtime.step_in_flight import reduce_together
from sparsync.wire import Values

_LOG = logging.getLogger("sparsync")
_MOST_SKIPPED = 32  # steps in a row; a loss scaler halves 65536 to 1 in 16


@dataclass(frozen=True)
class Pending:
    """A step of which a device knows whether it was skipped, and the host counts as if it was not."""

    skip: Skip
    counted: Collection[str]  # parameters that took part
    measured: bool


class ExchangedSteps(StepMethod):
    """Takes the steps of `optimizer` for `model` on all ranks: its `step` is the one here until `close`, and it has the settings."""

    replaces_optimizer = True
    cure_of_set = "change them in the same way on all ranks, before the same step"
    cure_of_unexchanged = "change it in the same way on all ranks, before the same step"
    vectors: tuple[str, ...]  # of all elements, that the method keeps and saves
    counts: tuple[str, ...]  # the same, of each parameter
    chooses = False  # whether the first steps choose the recipe, or have chosen it

    def __init__(
        self,
        replica: Replica,
        optimizer: Optimizer | Sequence[Optimizer],
        scheme: Scheme,
        options: Steps,
        group: dist.ProcessGroup | None,
        comm: Comm | None,
        timeout_s: float,
        scaler: GradScaler | None = None,
    ) -> None:
        if steps_in_backward(replica.module):
            raise ValueError(
                "an optimizer steps during the backward pass and leaves no gradient for a step; remove it, or attach with "
                "exchange=sparsync.LocalSteps(every=...), which exchanges the result of each rank's optimizer"
            )
        self.optimizers = exchangeable(optimizer)
        self._given = [*self.optimizers, *([optimizer] if isinstance(optimizer, Optimizer) else optimizer)]
        if scaler is not None and len(self.optimizers) > 1:
            raise ValueError(
                f"a loss scaler unscales the gradients of one optimizer, and there are {len(self.optimizers)}; train in bfloat16 without a "
                "scaler, or attach with exchange=sparsync.Gradients()"
            )
        self._groups = ParameterGroups(self.optimizers, replica.owned)
        if options.keep != 0:
            self.cure_of_set, self.cure_of_unexchanged = CURE_OF_SET, CURE_OF_UNEXCHANGED
        super().__init__(replica, self.optimizers, scheme, options, group, comm, timeout_s)
        self.exchange = options
        self._keep = self._keep_for(options, scheme)
        # Where only rounding errors wait, a loop that goes back need not hear of them.
        self._told_of_loads = not self._keep and not scheme.leaves_out
        if not self._forget(options) and options.decay not in (None, 1.0):
            raise ValueError(
                f"decay={options.decay} needs a scheme with a residual and no decay setting, and {scheme.name} is none; leave "
                "decay out, or set it in the scheme"
            )
        buckets = self._weights.buckets
        self._keys = [each.key for each in buckets]
        self._vectors = {key: [each.empty().zero_() for each in buckets] for key in self.vectors}
        self._ratios = BlockRatios(
            self._vectors["momentum"], [each.layout for each in buckets], options.block, options.measure_every
        )
        self._counts = {key: dict.fromkeys(self._weights.trained, 0) for key in self.counts}
        self._ahead = 0  # how many more steps than this handle has taken are in the moments
        # Since moments were loaded: momentum is still to become rank 0's, and squares are those of the mean gradient.
        self._shares = self._of_mean = False
        self._totals = {"skipped": 0, **self._totals}
        self._skipped = 0  # steps in a row
        self._pending: Pending | None = None  # the last step, where it is not known yet whether it was skipped
        self._applied = -1  # the last step that was applied, or skipped
        self._catching_up = False  # since `_start_from`: the common weights are ahead of the steps taken
        self._idle: frozenset[str] = frozenset()  # parameters that did not take part in the last step
        self._called: str | None = None  # what the training loop calls: the optimizer's `step`, or the one here
        self._taken = TakenOptimizer(self.optimizers, self._step_for_optimizer, scaler)
        self._divisor = GradientDivisor(replica)
        if self._keep:
            self._show_own()
        self._stopwatch: Stopwatch | None = None  # while the bits are still to be chosen
        momentum, square = (by_name(self._weights.buckets, self._vectors[key]) for key in ("momentum", "square"))
        self._moments = Moments(
            replica,
            self._groups,
            momentum,
            square,
            lambda: self._counts,
            lambda rule: rule.remembers(self.exchange.beta2),
            lambda: self._ratios.clip_factor(self._comm.size, latest=True),
            self._take_moments,
        )
        self._take_moments()

    def choose_bits(self, recipes: Sequence[Recipe], method_of: Callable[[str], tuple[Scheme, Any]]) -> None:
        """Take 20 steps by the recipe that this handle has, and then one of `recipes`, by what these steps have measured; see `attach`.

        `method_of` makes the scheme and the Steps of a recipe's text. A state that is loaded decides by itself, if it had chosen.
        """
        self._method_of, self.chooses = method_of, True
        if len(recipes) > 1:
            self._stopwatch = Stopwatch(recipes)

    def _choose_bits(self) -> None:
        assert self._stopwatch is not None and self.recipe is not None
        watch, self._stopwatch = self._stopwatch, None
        times = watch.times(self.recipe.bits, partial(self._gathered, "times"))
        self._take_recipe(times.chosen(watch.recipes))
        _LOG.info("%s; from here on: %s", times.described(watch.recipes), self.recipe)

    def _gathered(self, key: str, own: Tensor) -> tuple[float, Tensor]:
        """Return how long this rank has waited for the numbers of all ranks, and these, [P, n]. Collective, between two steps."""
        bucket = Bucket(key, own.to(self._weights.buckets[0].device), self._step + 1)
        report = self._connection.reduce_before_step(bucket, gathered := Gathered())
        self._count([report])
        return report.wait_s or 0.0, gathered.rows

    def _take_recipe(self, recipe: Recipe) -> None:
        """Go on by another recipe from the next step on, with what is held back. The same on all ranks."""
        if recipe == self.recipe:
            return
        scheme, options = self._method_of(recipe.text)
        options = replace(options, check_weights_every=self.exchange.check_weights_every)
        self._take_scheme(scheme)
        self._forget(options)
        self.recipe, self.exchange = recipe, options
        self._keep = self._keep_for(options, scheme)
        self._ratios.every = options.measure_every
        if self._keep and self._shown is None:
            self._weights.hold_common()
            self._comparison.compare_besides(
                partial(frozen_and_copies, self._replica), CURE_OF_SET, CURE_OF_UNEXCHANGED
            )
            self._told_of_loads = False
            self._show_own()
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()  # what was compiled does not look for new hooks

    def _keep_for(self, options: Steps, scheme: Scheme) -> float:
        return options.keep_for(scheme, any(isinstance(rule, MuonRule) for rule in self._groups.rules))

    def _show_own(self) -> None:
        self._shown = ShownWeights(self._replica, self._weights, self._set_outside, self._adopt)

    def _forget(self, options: Steps) -> bool:
        """Have the residuals forget as `options` say; return whether any does so."""
        takes = [each.forget(options.decay_for(each.scheme)) for each in innermost(self.state)]
        return any(takes)

    def _steps_to_make(self, place: int, gradients: Gradients) -> StepsToMake:
        """Count a step of this rank for each parameter of bucket `place` that takes part, and return what makes it of the gradients."""
        ratios, spans, numbers = self._ratios, list[Span](), list[Spread]()

        def made(rule: Rule, entry: ParameterSpan, t: int) -> Spread:
            beta2 = rule.remembers(self.exchange.beta2)
            return rule.sent_rate(entry.shape), beta2, rule.eps, 1 - beta2**t

        for span, number in self._counted(place, "seen", made):
            spans.append(span)
            numbers.append(number)
        ratio = ratios.ratio(place, self._comm.size)
        return StepsToMake(gradients, self._vectors["square"][place], ratio, ratios.block, spans, numbers)

    def _gradients(self, place: int) -> Gradients:
        """Return this rank's gradients of the parameters of bucket `place` that take part."""
        tensors, starts, factors = list[Tensor](), list[int](), list[float]()
        bucket = self._weights.buckets[place]
        for entry, parameter in zip(bucket.layout, bucket.parameters.values(), strict=True):
            if (gradient := parameter.grad) is not None and entry.name not in self._idle:
                tensors.append(gradient.to_dense() if gradient.is_sparse else gradient)
                starts.append(entry.span.start)
                factors.append(self._divisor.undone(entry.name))
        return Gradients(tensors, starts, factors)

    def _move(self, place: int, mean: Tensor | QuantizedMean, skip: Tensor | None = None) -> None:
        """Move the common weights of bucket `place` by the mean step of all ranks, [n], unless `skip`, [1], is not zero."""
        bucket, momentum = self._weights.buckets[place], self._vectors["momentum"][place]
        found = self._counted(place, "applied", lambda rule, _, t: rule.move(t))
        rules = [(entry, self._groups.rules[self._groups.number[entry.name]]) for entry in self._taking(bucket)]
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

    def step(self) -> list[Report]:
        """Do what the optimizer's `step` does: take one step with the gradients of all ranks.

        Returns the reports, also of a step that is skipped: of the ratio, if measured, and of each bucket. A loop calls this or the
        optimizer's, on every rank. Weights that were set from outside since the last step, the same on all ranks, become the common ones.
        If only some ranks have a gradient of a parameter, it counts as zero on the others. A parameter that is frozen, or has a gradient
        on no rank, does not move; its moments stay, and what is unsent of it waits.
        Where a rank's gradient holds NaN or Inf, or its square norm or that of its sketch overflows, all ranks skip the step, with a
        warning: common weights, momentum and ratio stay, and what was sent returns to the residuals. Second moments of ranks with a
        finite gradient may have taken it in. Raises RuntimeError, on all ranks, where 32 steps in a row are skipped.
        Where it raises, the other ranks' calls raise too, what was sent returns to the residuals, and the next step starts on fresh
        connections. That one raises as well if ranks may have applied different steps, or the mean was applied in part: then continue
        from a checkpoint.
        """
        self._check_caller("steps.step()")
        return self._take_step()

    def close(self) -> None:
        """Give back connections and threads, and the optimizer its own `step`; see Handle."""
        try:
            self._settle()
        finally:  # it raises where this was the last of too many skipped steps
            self._moments.leave()
            self._taken.release()
            self._divisor.release()
            super().close()

    def detach(self) -> None:
        """Have the model train as before `attach`, from the common weights. Call it on all ranks, between two steps.

        The optimizers go on with the momentum, and with rank 0's squares; with new moments, where the ranks cannot be reached any more.
        """
        if any(self._counts["applied"].values()) and not self.closed:
            try:
                self._share_squares()
            except RuntimeError as error:
                warn_of(
                    f"the optimizer begins with new moments, because those of the ranks could not be made the same: {error}"
                )
                for each in self.optimizers:
                    each.state.clear()
        super().detach()

    def never_scaled(self) -> None:
        self._taken.never_scaled()

    def show_common(self) -> None:
        """Have the common weights in the model until it is trained again, also for what calls a part of it directly."""
        if self._shown is not None:
            self._shown.show(common=True)

    def _adopt(self) -> list[str]:
        """Adopt weights that were set from outside, and return their names. Where they are the common ones, own ones are put back."""
        changed, own_shown = self._set_outside(), self._shown is None or not self._shown.common
        loaded = [name for name in changed if name not in self._idle and self._weights.shows_common(name)]
        others = [name for name in changed if name not in loaded]
        self._take_from_model(others)
        if self._shown is not None:
            self._shown.take(others)
        if loaded and own_shown:
            self._write_own(frozenset(self._weights.trained) - frozenset(loaded))
        return others

    def _step_for_optimizer(self) -> bool | Tensor:
        """Take a step in place of the optimizer, and return whether all ranks skipped it; [1], not zero if so, where a device knows."""
        self._check_caller("optimizer.step()")
        self._take_step()
        return self._skipped > 0 if self._pending is None else self._pending.skip.flag

    def _check_caller(self, caller: str) -> None:
        if self._called not in (None, caller):
            raise RuntimeError(
                f"this loop has called {self._called} before, and {caller} would take a second step with the same gradients; "
                "call one of them"
            )
        self._called = caller

    @torch.no_grad()
    def _take_step(self) -> list[Report]:
        self._settle()
        self._ratios.settle()  # here alone, so that whether a state is saved changes nothing
        # A failed step counts, for it may have failed on some ranks only.
        self._step += 1
        # torch's schedules warn where the optimizer they belong to has not stepped.
        for each in self._given:
            each._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        with self._connection.step():
            self._weights.check_compared()
            later = _host_is_ahead(self._weights.buckets[0].device) and not self._weights.was_written()
            (self._check_shown if later else self._check_own)()
            self._take_moments()
            if later:
                self._weights.compare_later()
            self._go_back(self._step - 1)
            self._note_thrown_away()
            self._divisor.passes.stepped()  # also where the step fails
            self._check_trained()
            self._replica.take_gradients()
            self._groups.read()
            if self._rescaler.takes_back:
                self._rescaler.hold()
            self._idle = self._idle_now()
            reports, means = self._exchanged()
            # After buckets that all ranks have, in which they find that only some have loaded moments.
            reports += self._share_momentum() if self._shares else []
        self._count(reports)
        skipped = means is None
        with self._applying():
            to_apply = means or []
            for place in range(len(to_apply)):
                self._apply(place, to_apply.pop(0))
            self._write_own()  # after a skipped step too, for its residual may have changed
        if self._pending is not None:
            self._pending.skip.send_to_host()
        self._applied = self._step
        if not skipped:
            self._moments.follow_rates()
        self._moments.count()
        self._rescaler.applied()
        self._adopted.clear()
        self._loads.forget()
        self._divisor.next_step(self.clip_factor)
        if self._pending is None:
            self._tell_skipped(skipped, _where_not_finite(self._weights.trained) if skipped else "")
        if self._stopwatch is not None and self._stopwatch.note(reports):
            self._choose_bits()
        return reports

    def _take_moments(self) -> None:
        """Take moments that were loaded into the optimizers since the last step, unless those of this handle were loaded."""
        self._settle()  # before they are counted, or saved
        if self._loads.of_handle:
            self._moments.show()
        elif self._moments.take():
            self._shares, self._of_mean = True, self._comm.size > 1
            self._note_ahead()
            self._ratios.load_state_dict({}, self._keys, self._applied + 1)

    def _note_ahead(self) -> None:
        self._ahead = max(0, max(self._counts["applied"].values()) - self.done)

    def _share_momentum(self) -> list[Report]:
        """Make the momentum that of rank 0: converted by the squares of each rank, its last bits differ."""
        buckets = self._moment_buckets("momentum", self._step)
        reports = [self._connection.reduce(each, FirstRanks()) for each in buckets]
        self._shares = False
        return reports

    @torch.no_grad()
    def _share_squares(self) -> None:
        """Make all moments those of rank 0, with squares as large as those of the mean gradient: any optimizer goes on with these."""
        squares = self._moment_buckets("square", self._step + 1)
        factor = self._ratios.clip_factor(self._comm.size, latest=True)
        for each in squares:
            each.grad.div_(factor**2)
        for each in [*squares, *self._moment_buckets("momentum", self._step + 1)]:
            self._connection.reduce_before_step(each, FirstRanks())
        self._ratios.load_state_dict({}, self._keys, self._step + 1)
        self._counts["seen"] = dict(self._counts["applied"])

    def _moment_buckets(self, which: str, step: int) -> list[Bucket]:
        return [
            Bucket(f"{which}/{key}", each, step) for key, each in zip(self._keys, self._vectors[which], strict=True)
        ]

    def _go_back(self, last: int) -> list[str]:
        found = super()._go_back(last)
        if self._shares and "optimizer" not in found:
            self._comparison.loaded = [*found, "optimizer"]
        return found

    def _waits(self) -> bool:
        return True

    def _drop_held(self, moments: bool) -> None:
        super()._drop_held(moments)
        self._note_other_move()
        self._write_own()

    def _apply(self, place: int, mean: Mean) -> None:
        """Move the weights of a bucket. Nothing refers to the vector afterwards: writing own weights takes the same memory."""
        moves = (
            self._pending is None or not self._callbacks or not self._pending.skip.flag
        )  # a host sync where somebody listens
        if self._callbacks and moves and (whole := mean.whole()) is not None:
            self._note_move([whole], place=place, idle=sorted(self._idle))
        arrived = mean.arrived.mean if mean.arrived is not None else mean.whole()
        if arrived is not None:
            self._move(place, arrived, None if self._pending is None else self._pending.skip.flag)

    def _note_thrown_away(self) -> None:
        """Have the next exchange compare how many gradients were thrown away since the last step."""
        self._comparison.thrown_away = self._divisor.passes.thrown_away

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, **options: Any
    ) -> Tensor:  # Any: those of torch's function of this name
        """Clip this rank's gradient by the norm of all ranks' gradients, and return that norm: the same number on all ranks.

        It is the root of the mean square of their norms, which estimates the norm of the mean gradient, as each was divided by
        `clip_factor`. So a loop that skips a step where it is too large, or not finite, does so on all ranks. Call it on every rank, after
        the last backward pass of a step: it sends 8 bytes to each, and waits for them.
        Raises RanksDifferError, on all ranks, where one has thrown away a gradient that others have used; and RuntimeError, with
        `error_if_nonfinite`, for a norm that is NaN or Inf.
        """
        self._check_own()
        self._note_thrown_away()
        gradients = [each for each in self._replica.gradients() if each is not None]
        owned = [each.grad for each in self._replica.owned.values() if each.grad is not None]
        own: Any = nn.utils.get_total_norm(owned, norm_type, **options)  # Any: a DTensor, of an FSDP2 model
        own = own.full_tensor() if hasattr(own, "full_tensor") else own
        square = own.double().square().reshape(1).to(self._weights.buckets[0].device)
        norm = self._gathered("norm", square)[1].mean().sqrt()
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the norm of the gradients of all ranks is {float(norm)}, and cannot be clipped at {max_norm}; skip the step"
            )
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch has it
        for each in gradients:
            each.mul_(factor.to(each))
        return norm.to(torch.float32)

    @property
    def clip_factor(self) -> float:
        """The length of this rank's gradient over that of the mean one, as last measured: in [1, sqrt(P)], and 1 before.

        A GPU's measurement counts one step later.
        """
        return self._ratios.clip_factor(self._comm.size)

    @torch.no_grad()
    def flush(self) -> list[Report]:
        """Send all that is unsent, in full precision, and apply it: at the end of training. Return a report for each bucket.

        Call it on every rank; it counts no step. Afterwards own weights are the common ones, except for frozen parameters, of which what
        is unsent waits. An all-reduce of all parameters, of 4 bytes each, and nothing where the scheme holds nothing back.
        """
        self._check_own()
        self._settle()
        if not self.state.has_residual:
            return []
        self._idle = frozenset(name for name, each in self._weights.trained.items() if not each.requires_grad)
        for each in innermost(self.state):
            each.forget(1.0)
        try:
            with self._connection.step():
                means = [Mean(each.elements, each.part(self._idle)) for each in self._weights.buckets]
                taking = [
                    (mean, each) for mean, each in zip(means, self._weights.buckets, strict=True) if mean.part.layout
                ]
                reports = [self._reduce_one(mean, each.empty().zero_(), send_all=True) for mean, each in taking]
        finally:
            self._forget(self.exchange)
        self._count(reports)
        with self._applying():
            for bucket, mean in zip(self._weights.buckets, means, strict=True):
                if (whole := mean.whole()) is not None:
                    bucket.put_common(bucket.common.sub_(whole))
            self._note_other_move()
            self._write_own()
        return reports

    def stats(self) -> dict[str, int | float]:
        self._settle()
        common = self._shown is not None and self._shown.common
        found = super().stats()
        if common:
            self.show_common()
        return {**found, "exchanges": found["steps"] - found["skipped"]}

    def _method_state(self) -> dict[str, Any]:  # Any: as Handle.state_dict
        trained, ratios = self._weights.trained, self._ratios
        self._take_moments()
        return {
            **{key: self._weights.saved(vectors) for key, vectors in self._vectors.items()},
            **deepcopy(self._counts),
            "ratio": ratios.state_dict(self._keys),
            # These do not follow from the common ones and the residual.
            "own": {name: trained[name].detach().flatten().clone() for name in sorted(self._idle | self._adopted)},
            "idle": dict.fromkeys(sorted(self._idle), 1),
            "measured": ratios.measured,
            "measure_until": ratios.measure_until,
            "skipped": self._skipped,
        }

    def resized(self, states: Sequence[State]) -> dict[str, Any]:  # Any: as Handle
        """Return a state for this rank, made from those of all ranks of another number: with second moments and buffers of one of them.

        The ratio depends on the number of ranks, and is measured again; own weights follow from the common ones and from the residual.
        """
        own = states[self.place[0] % len(states)][self.integration]
        return {**super().resized(states), self.integration: {**own, "ratio": {}, "own": {}, "idle": {}}}

    @property
    def done(self) -> int:
        """The number of steps that were applied, or skipped on all ranks."""
        return self._applied + 1

    def _regrouped(self, comm: Comm) -> None:
        self._settle()
        before = self._comm.size
        super()._regrouped(comm)
        self._taken.forget_step()
        self._applied = self._step
        if not self._catching_up:
            # A step that failed may have counted before it did, and is taken again.
            self._counts = {
                key: {name: min(t, self.done + self._ahead) for name, t in each.items()}
                for key, each in self._counts.items()
            }
        self._groups.recount()
        self._check_own()
        self._ratios.regrouped(self._step + 1, before, comm.size)
        self._write_own()
        self._divisor.next_step(self.clip_factor)

    def snapshot(self, *, shared: bool = True) -> Snapshot:
        found = super().snapshot(shared=shared)  # a step that failed counts as taken until `regroup`
        return found if found.shared is None else found._replace(shared={**found.shared, "step": self._applied})

    def _parts(self, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
        vectors = self.vectors if self._step >= 0 else ()  # before the first step they are zeros
        moved = {key: state[key] for key in ("common", *vectors, *self.counts)}
        left_out = ("common", *self.vectors, "seen", "own", "idle")
        return moved, {key: value for key, value in state.items() if key not in left_out}

    def _still(self) -> Collection[str]:
        return {*super()._still(), *self._idle}

    def _start_from(self, moved: State) -> None:
        self._check_own()
        made = self._step >= 0
        self._take_common(self._weights.from_saved(moved["common"]))
        for key in self.vectors:
            # Second moments are a rank's own, if it has made steps.
            if not (made and key == "square"):
                for vector, values in zip(self._vectors[key], self._weights.from_saved(moved[key]), strict=True):
                    vector.copy_(values)
        self._catching_up = True
        self._counts |= {key: dict(moved[key]) for key in self.counts if not (made and key == "seen")}
        self._groups.recount()

    def _replay(self, move: Part) -> None:
        idle, place = self._idle, move["place"]
        self._take_settings(move["groups"])
        self._groups.read()
        self._idle = frozenset(move["idle"])
        (mean,) = move["means"]
        self._move(place, mean.to(self._weights.buckets[place].device))
        self._idle = idle

    def _movers(self) -> Sequence[Optimizer]:
        return self.optimizers

    def _joined(self, snapshot: Snapshot, mine: State) -> dict[str, Any]:  # Any: as Handle.state_dict
        joined, own = super()._joined(snapshot, mine), mine[self.integration]
        theirs = {**joined[self.integration], **(snapshot.moved or {})}
        kept = {key: own[key] for key in (*self.vectors, "common") if key not in theirs}
        if mine["step"] >= 0 or "seen" not in theirs:
            # This rank may be a step ahead, which those that went on without it have not taken.
            seen = {name: min(t, joined["step"] + 1 + self._ahead) for name, t in own["seen"].items()}
            kept |= {"square": own["square"], "seen": seen}
        return {**joined, self.integration: {**theirs, "own": {}, "idle": {}, **kept}}

    def load_state_dict(self, state: State) -> None:
        if self._stopwatch is not None:
            own = self.fingerprint()
            del own["scheme_name"]  # that of another recipe is taken below
            check_fingerprint(state, own)
            if state["step"] + 1 >= STEPS:
                names = {each.name: each for each in self._stopwatch.recipes}
                self._stopwatch = None  # it was chosen before
                if (chosen := names.get(state["recipe"])) is not None:
                    self._take_recipe(chosen)
        super().load_state_dict(state)

    def _load(self, state: State) -> None:
        saved, ratios = state[self.integration], self._ratios
        self._pending = None
        loaded = {key: self._weights.from_saved(saved[key]) for key in self.vectors}
        super()._load(state)
        self._applied, self._catching_up = self._step, False
        self._shares = self._of_mean = False
        for key, vectors in self._vectors.items():
            for vector, values in zip(vectors, loaded[key], strict=True):
                vector.copy_(values)
        self._counts = {key: dict(saved[key]) for key in self.counts}
        self._groups.recount()
        self._note_ahead()
        self._moments.show()
        self._groups.read()
        self._moments.follow_rates(restart=True)
        self._skipped, self._idle = saved["skipped"], frozenset(saved["idle"])
        ratios.measured, ratios.measure_until = saved["measured"], saved["measure_until"]
        ratios.load_state_dict(saved["ratio"], self._keys, self._step + 1)
        self._divisor.next_step(self.clip_factor)
        own = saved["own"] if self._keep else {}
        for name, values in own.items():
            parameter = self._weights.trained[name].detach()
            parameter.copy_(values.view(parameter.shape))
        self._write_own(frozenset(own))

    def _idle_now(self) -> frozenset[str]:
        """Return the parameters that are frozen or have a gradient on no rank. The same on all ranks."""
        named = self._weights.trained
        trained = [name for name, each in named.items() if each.requires_grad]
        own = [name for name in trained if named[name].grad is not None]
        return frozenset(named) - self._connection.any_of(own, trained, self._step)

    def _exchanged(self) -> tuple[list[Report], list[Mean] | None]:
        """Return the reports and the mean step of each bucket; None if all ranks skip the step."""
        buckets, done = self._weights.buckets, Reduced()
        gradients = [self._gradients(place) for place in range(len(buckets))]
        # False also where squares overflow, which would stay in the second moments.
        finite = _finite(gradients)
        # Not by what was found alone: a rank without gradients has found no tensor, and others have.
        device, later = buckets[0].device, isinstance(finite, Tensor) or _host_is_ahead(buckets[0].device)
        if later and self._skips_on_device():
            skip = Skip(torch.as_tensor(finite, device=device))
            self._pending = Pending(skip, [entry.name for each in buckets for entry in each.layout], self._measures())
            finite = True
        finite = self._replica.agreed(bool(finite))  # on a GPU a host sync, unless it skips there

        skip = None if self._pending is None else self._pending.skip
        sketch = (
            Measurement(self._ratios, self._keys, self._step, finite, gradients, skip) if self._measures() else None
        )
        first = sketch is not None and self._ratios.measured == 0
        try:
            # The first time before the steps, for which there is no ratio yet; later beside them, for the next ones. What is exchanged is
            # the same, because after a failure only some ranks may have measured it.
            if sketch is not None and first:
                self._observe(sketch, self._connection.reduce(*sketch.reduction), done)
            beside = [] if sketch is None or first else [sketch.reduction]
            reports = self._reduce(gradients if finite else None, done, beside)
            if sketch is not None and not first:
                self._observe(sketch, reports[0], done)
        except BaseException:
            # After an overflow it has returned already, see Rollback. With `takes_back` it depends on whether others have applied the step.
            returns = self.state.has_residual and not done.skipped and not self._rescaler.takes_back
            for each in done.means if returns else ():
                each.rollback(self.state)
            raise
        return done.reports, None if done.skipped else done.means

    def _measures(self) -> bool:
        return self._comm.size > 1 and self._ratios.due(self._step)

    def _skips_on_device(self) -> bool:
        """Return whether this step may be skipped without a word to the host: where nothing else depends on it."""
        alone = type(self._replica).agreed is Replica.agreed
        depends = self._idle or self._rescaler.takes_back or self._of_mean
        return alone and self.scheme.heeds_skip and not depends

    def _settle(self) -> None:
        """Learn whether the last step was skipped, where only a device knew: then it does not count."""
        pending, self._pending = self._pending, None
        if pending is None or self._applied != self._step:  # the step has failed
            return
        if skipped := pending.skip.seen:
            for key in self.counts:
                for name in pending.counted:
                    self._counts[key][name] -= 1
            self._groups.recount()
            self._moments.count()
            if pending.measured:
                self._ratios.forget_last()
        self._tell_skipped(skipped)

    def _observe(self, sketch: Measurement, report: Report, done: Reduced) -> None:
        """Take a measurement in that was reduced."""
        done.skipped |= (overflow := bool(report.details["overflow"]))
        if not overflow:
            sketch.observe(map(self._taking, self._weights.buckets))
            if self._of_mean:
                for each in self._vectors["square"]:
                    each.mul_(self.clip_factor**2)
                self._of_mean = False
        done.reports.insert(0, report)

    def _reduce(
        self, gradients: Sequence[Gradients] | None, done: Reduced, beside: Sequence[tuple[Bucket, Reduction]]
    ) -> list[Report]:
        """Reduce this rank's steps of each bucket to the mean over ranks, NaN without finite gradients; note it in `done`.

        Returns the reports of what is reduced `beside` them. What is sent as a whole is on its way at once.
        """
        pairs, others = list(beside), list[tuple[int, Mean]]()
        for place, bucket in enumerate(self._weights.buckets):
            mean = Mean(bucket.elements, bucket.part(self._idle))
            done.means.append(mean)
            form = None if mean.part.taking is not None else self._whole_form(place)
            if mean.part.layout and form is not None:
                steps = None if gradients is None else self._steps_to_make(place, gradients[place])
                pairs.append(self._whole_step(place, mean, form, steps))
            elif mean.part.layout:
                others.append((place, mean))

        def reduce_others() -> None:
            skip = None if self._pending is None else self._pending.skip
            for place, mean in others:
                empty, reduction = self._weights.buckets[place].empty, None
                steps = None if gradients is None else self._steps_to_make(place, gradients[place])
                if skip is not None and steps is not None:
                    own, reduction = empty(), SchemeStep(self.state, steps, skip)  # which makes them
                else:
                    own = empty().fill_(torch.nan) if steps is None else steps.make()
                done.note(self._reduce_one(mean, own, reduction))

        reports = reduce_together(self._connection, pairs, reduce_others if others else None)
        for each in reports[len(beside) :]:
            done.note(each)
        return reports[: len(beside)]

    def _whole_step(
        self, place: int, mean: Mean, form: tuple[tuple[Values, Values], Tensor], steps: StepsToMake | None
    ) -> tuple[Bucket, WholeStep]:
        """Return what makes, encodes and sends all of a bucket in one pass; note it in `mean`."""
        values, residual = form
        skip = None if self._pending is None else self._pending.skip
        mean.arrived = WholeStep(self.scheme.name, values, steps, skip)
        mean.bucket = self._weights.buckets[place].bucket(residual, self._step)
        return mean.bucket, mean.arrived

    def _whole_form(self, place: int) -> tuple[tuple[Values, Values], Tensor] | None:
        """Return the formats and the residual of a bucket that is sent as a whole; see `State.whole_form`."""
        bucket = self._weights.buckets[place]
        if bucket.dtype != torch.float32:
            return None
        return self.state.whole_form(bucket.bucket(self._vectors["square"][place], self._step))

    def _reduce_one(
        self, mean: Mean, own: Tensor, reduction: SchemeStep | None = None, send_all: bool = False
    ) -> Report:
        """Reduce `own` [n], note its mean in `mean`, and return the report, with "overflow"; `reduction`: in place of the scheme."""
        bucket, scheme = mean.part.bucket(own, self._step + send_all), self.scheme
        if send_all:
            bucket.key = f"unsent/{bucket.key}"  # another exchange than that of a step
        # Where a device skips, nobody asks it how many there are.
        few = (
            scheme.leaves_out and scheme.has_residual and not (send_all or reduction) and len(self._weights.buckets) > 1
        )
        held: list[Bucket] = []

        def written() -> Bucket:
            held.append(FewNonzero(bucket) if few else bucket)
            return held[0]

        report = self._connection.reduce(bucket, reduction or self.state, written, send_all=send_all)
        mean.bucket = held[0] if held else bucket
        return replace(report, details={**report.details, "overflow": overflowed(report, bucket.grad)})

    @torch.no_grad()
    def _write_own(self, left: frozenset[str] | None = None) -> None:
        """Write the own weights, the common ones less what is unsent, of all parameters but those `left`; None: the idle ones."""
        idle, left = self._idle, self._idle if left is None else left
        written = [
            each.write_less_unsent(self.state, self._comm, self._keep, idle, left) for each in self._weights.buckets
        ]
        self._replica.written()
        self._weights.note_written(written)

    def _taking(self, bucket: WeightBucket) -> Sequence[ParameterSpan]:
        """Return the parameters of a bucket that take part in this step."""
        return [entry for entry in bucket.layout if entry.name not in self._idle] if self._idle else bucket.layout

    def _counted(
        self, place: int, key: str, value_of: Callable[[Rule, ParameterSpan, int], Value]
    ) -> list[tuple[Span, Value]]:
        """Count a step of each parameter of a bucket that takes part; return the spans of equal values. See ParameterGroups.counted."""
        taking = self._taking(self._weights.buckets[place])
        return self._groups.counted((key, place), taking, self._counts[key], value_of)

    def _tell_skipped(self, skipped: bool, where: str = "of a rank") -> None:
        """Warn of the first of several skipped steps, and raise where there are too many. The same on all ranks.

        `where` says which gradient is not finite.
        """
        self._totals["skipped"] += skipped
        self._skipped = self._skipped + 1 if skipped else 0
        if not skipped:
            return
        found = f"the gradient {where} holds NaN or Inf, or is too long for its squares to be summed"
        if self._skipped == _MOST_SKIPPED:
            raise RuntimeError(
                f"the last {_MOST_SKIPPED} steps were skipped on all ranks, and no weight has moved: {found}; lower the learning rate, "
                "clip gradients, or find out where the loss is not finite"
            )
        if self._skipped == 1:
            warn_of(f"step {self._step} was skipped on all ranks: {found}; `stats()` counts these steps")


def _finite(gradients: Iterable[Gradients]) -> bool | Tensor:
    """Return whether the sum of the squares of all gradients is finite; on a GPU a tensor [] that says so."""
    tensors = [each for given in gradients for each in given.tensors]
    factors = [each for given in gradients for each in given.factors]
    return kernels.squares_fit(tensors, factors, torch.finfo(torch.float32).max)


def _host_is_ahead(device: torch.device) -> bool:
    """Return whether the host may go on before what it asked of a device is done."""
    return device.type == "cuda"


def _where_not_finite(trained: Mapping[str, nn.Parameter]) -> str:
    """Return where the first gradient without a finite square norm is, in words."""
    for name, each in trained.items():
        if each.grad is not None and not bool(each.grad.to_dense().square().sum().isfinite()):
            return f"of {name} on this rank"
    return "on another rank, or the mean step,"

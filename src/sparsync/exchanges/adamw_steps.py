"""AdamW with compressed communication: each rank divides its gradient, and second moments or momentum come after the exchange.

Compressing gradients costs AdamW quality, because dividing after the exchange enlarges the errors of small elements. The default form sends
every element in int3, and `keep` is 0. There each gradient g is divided by a scale that all ranks know:

    D      = sqrt(v / v's mean in the block) + 0.1
    mean   = D scheme.reduce(g / D)                        what is not sent stays in the residual
    v      = beta2 v + (1 - beta2) mean^2                  second moments, the same on all ranks
    step   = rate mean / (sqrt(v / (1 - beta2^t)) + eps)
    m      = beta1 m + (1 - beta1) step                    momentum, the same on all ranks
    A      = (1 - rate * weight_decay) A - m / (1 - beta1^t)
    W      = A - keep * unsent                             own weights, at which the next gradient is taken

In the other forms ranks send steps made with their own second moments, whose blocks are averaged over ranks except with Muon:

    v      = beta2 v + (1 - beta2) g^2
    step   = scheme.reduce(rate g / (sqrt(ratio v / (1 - beta2^t)) + eps))

The path of a step of the default, beside which other branches measure the ratio, skip steps, undo failed ones, and serve the other forms:

    backward pass     DDP's hook hands back each bucket as it is; GradientDivisor gives gradients the norm of the mean one, for clipping
    optimizer.step()  a hook of TakenOptimizer calls `_take_step`, and hides the gradients from the optimizer's own step
    _read_loop        takes what the loop has changed
    _exchanged        a WholeStep per bucket scales undivided gradients, exchanges them, and leaves rounding errors in the residual
    _apply            `Sender.move` updates second moments, momentum and weights

ratio: the squares of the mean gradient over the squares of the local one in earlier steps, see BlockRatios. A local gradient has P times
the variance of the mean one, so without the ratio steps would be too short. The default needs it for clipping only.

Differs from AdamW, even with one rank or when everything is sent: as in LaProp (arXiv 2002.04839), each gradient is divided by the second
moments, and multiplied by the rate, of its own step; and AdamW's beta2 is at least 0.999. With beta1 = 0 and the same beta2 both are equal.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.core import Bucket, Comm, Report
from sparsync.exchanges import own_weights
from sparsync.exchanges.measured import Gradients, Measurement, Pending, Skip, fit, host_is_ahead
from sparsync.exchanges.moments import Moments
from sparsync.exchanges.rules import ParameterGroups, exchangeable
from sparsync.exchanges.scheme_steps import SchemeMean
from sparsync.exchanges.sender import Sender, StepsToMake, WholeStep
from sparsync.exchanges.steps_options import Steps
from sparsync.exchanges.steps_state import StepsState
from sparsync.exchanges.training_loop import GradientDivisor, Replica, TakenOptimizer
from sparsync.runtime.connection import Reduction
from sparsync.runtime.findings import steps_in_backward, warn_of
from sparsync.runtime.step_in_flight import reduce_together

_MOST_SKIPPED = 32  # steps in a row; a loss scaler halves 65536 to 1 in 16

Mean = WholeStep | SchemeMean


class AdamWSteps(StepsState):
    """Take the steps of `optimizer`, an AdamW, for `model` on all ranks, and exchange them by `scheme`.

    `sparsync.attach` makes it, for wrapped models too, and returns it as the handle; make it yourself to pass `comm`. `optimizer.step()`
    exchanges until `close()`, which leaves the common weights in the model. The constructor copies rank 0's parameters and buffers to all
    ranks; later buffers differ between ranks. Common weights are float32, or float64 for float64 parameters; own weights of 16-bit
    parameters are rounded to 16 bits. Collective over the ranks of `group`, with the same settings.
    Memory, in vectors of all trained parameters: momentum, second moments, the state of the scheme, and common weights unless parameters
    have 32 bits and `keep=0.0`; during a step, if elements are left out, one bucket's step and the mean steps of the others.

    Args:
        model: bare, neither wrapped by DistributedDataParallel nor by FSDP.
        optimizer: a torch.optim.AdamW of all trained parameters, an Adam without weight decay, or several with a torch.optim.Muon. Every
            step reads its settings, and compares them between ranks, so schedules work. Its state has the moments.
        scheme: reduces the steps.
        options: the fields of Steps: `keep`, `block`, `measure_every`, `beta2`, `decay` and more.
        group: the ranks; None is the default group.
        comm: a communicator in place of `group`, such as one of a `LocalWorld`.
        timeout_s: seconds; a rank that waits longer for the others gives up.
        scaler: the GradScaler that scales the loss, if there is one. It learns of NaN and Inf on other ranks.
        replica: this rank's part of a wrapped or sharded model; `sparsync.attach` passes it. None: all of `model`.

    Raises:
        TypeError: if the model is wrapped, the optimizer is of another kind, or `scheme` is not a Scheme.
        ValueError: if a setting is out of range, model and optimizer train other parameters, or another open integration has the model.
        RuntimeError: if a rank is missing, or has other settings or other parameters.
    """

    origin = "sparsync.AdamWSteps"
    integration = "adamw_steps"
    replaces_optimizer = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        scheme: Scheme,
        *,
        group: dist.ProcessGroup | None = None,
        comm: Comm | None = None,
        timeout_s: float = 300.0,
        scaler: GradScaler | None = None,
        replica: Replica | None = None,
        **options: Any,  # Any: the fields of Steps
    ) -> None:
        replica, self.exchange = Replica(model) if replica is None else replica, Steps(**options)
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
        groups = ParameterGroups(self.optimizers, replica.owned)
        super().__init__(replica, self.optimizers, scheme, self.exchange, group, comm, timeout_s)
        if not self._forget(self.exchange) and self.exchange.decay not in (None, 1.0):
            raise ValueError(
                f"decay={self.exchange.decay} needs a scheme with a residual and no decay setting, unlike {scheme.name}; leave decay "
                "out, or set it in the scheme"
            )
        self._sender = Sender(groups, self._weights, self.exchange)
        self._totals = {"skipped": 0, **self._totals}
        self._taken = TakenOptimizer(self.optimizers, self._step_for_optimizer, scaler)
        self._divisor = GradientDivisor(replica)
        self._take_form(self.exchange.common_for(scheme, self._sender.has_muon))
        self._have_own_weights()
        self._moments = Moments(replica, self._sender, self._own_factor, self._take_moments)
        self._take_moments()

    def step(self) -> list[Report]:
        """Take one step with the gradients of all ranks, as `optimizer.step()` does.

        Returns the reports of the ratio, if measured, and of each bucket, also if the step is skipped. Call this or `optimizer.step()`, on
        every rank. Weights that were set from outside since the last step, the same on all ranks, become the common ones.
        If only some ranks have a gradient of a parameter, it counts as zero on the others. A parameter that is frozen, or without a
        gradient on any rank, does not move; its momentum stays, and its unsent part waits.
        If a rank's gradient holds NaN or Inf, or the square norm of the gradient or its sketch overflows, all ranks skip the step, with a
        warning: common weights, momentum and ratio stay, and what was sent returns to the residuals. A rank's own second moments may
        contain a finite gradient already. Raises RuntimeError, on all ranks, if 32 steps in a row are skipped.
        If it raises, the other ranks' calls raise too, what was sent returns to the residuals, and the next step starts on fresh
        connections. The next step raises too if ranks may have applied different steps, or one has applied the mean in part: then
        continue from a checkpoint.
        """
        self._taken.check_caller("handle.step()")
        # torch's schedules warn if their optimizer has not stepped.
        for each in self._given:
            each._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        return self._take_step()

    def _step_for_optimizer(self) -> bool | Tensor:
        """Take a step in place of the optimizer; return whether all ranks skipped it, as a tensor [1] if only a device knows."""
        self._take_step()
        return self._skipped > 0 if self._pending is None else self._pending.skip.flag

    @torch.no_grad()
    def _take_step(self) -> list[Report]:
        self._settle()
        self._sender.ratios.settle()  # only here, so that saving a state changes nothing
        self._step += 1  # even if it fails, because it may fail on some ranks only
        with self._connection.step():
            self._read_loop()
            reports, means = self._exchanged()
        self._count(reports)
        with self._applying():
            self._apply([] if means is None else means)
        self._end_step(skipped=means is None)
        if self._choosing is not None and self.recipe is not None and self._choosing.note(reports, self.recipe):
            self._choosing = None
        return reports

    def _read_loop(self) -> None:
        """Take what the loop has changed since the last step: weights, moments, settings and gradients."""
        weights, sender = self._weights, self._sender
        weights.check_compared()
        later = host_is_ahead(weights.buckets[0].device) and not weights.last_written.was_written()
        (self._check_shown if later else self._check_own)()
        self._take_moments()
        if later:
            weights.last_written.compare_later()
        # Ranks compare this, because moments must be the same on all of them.
        loaded = self._go_back(self._step - 1) if self._loads.found() else []
        self._comparison.loaded = sorted({*loaded, "optimizer"}) if sender.shares else loaded
        self._comparison.thrown_away = self._divisor.passes.thrown_away
        self._divisor.passes.stepped()  # even if the step fails
        self._check_trained()
        self._replica.take_gradients()
        sender.groups.read()
        if self._rescaler.takes_back:
            self._rescaler.hold()
        # Idle parameters are frozen, or have no gradient on any rank.
        trained = [name for name, each in weights.trained.items() if each.requires_grad]
        mine = [name for name in trained if weights.trained[name].grad is not None]
        sender.idle = frozenset(weights.trained) - self._connection.any_of(mine, trained, self._step)

    def _take_moments(self) -> None:
        """Take moments that were loaded into the optimizers since the last step, unless a state of this handle was loaded."""
        self._settle()  # before steps are counted or saved
        if self._loads.of_handle:
            self._moments.show()
        elif self._moments.take():
            self._sender.shares, self._of_mean = True, self._comm.size > 1 and not self._sender.common
            self._note_ahead()
            self._take_form(self._sender.common)
            self._sender.ratios.load_state_dict({}, self._sender.keys, self._applied + 1)

    def _exchanged(self) -> tuple[list[Report], Sequence[Mean] | None]:
        """Exchange this rank's steps; return the reports, and the mean step of each bucket or None if all ranks skip the step."""
        sender, means, reports = self._sender, list[Mean](), list[Report]()
        gradients = [sender.gradients(place, self._divisor) for place in range(len(self._weights.buckets))]
        measures = self._comm.size > 1 and sender.ratios.due(self._step)
        finite = self._found_finite(gradients, measures)
        skip = None if self._pending is None else self._pending.skip
        sketch = Measurement(sender.ratios, sender.keys, self._step, finite, gradients, skip) if measures else None
        first = sketch is not None and sender.ratios.measured == 0
        try:
            # The first measurement comes before the steps, which need a ratio. Later ones travel beside the steps and serve the next one.
            # The messages are the same in both cases, because after a failure only some ranks may have measured.
            if sketch is not None and first:
                reports.append(self._connection.reduce(*sketch.reduction))
                self._observe(sketch, reports[0])
            beside = [] if sketch is None or first else [sketch.reduction]
            self._reduce(gradients if finite else None, beside, means, reports, skip)
            if sketch is not None and not first:
                self._observe(sketch, reports[0])
            # After the buckets of all ranks: their comparison raises if only some ranks have loaded moments.
            reports += self._share_moments() if sender.shares else []
        except BaseException:
            # After an overflow the residuals are restored already. With `takes_back` the others may have applied the step.
            returns = self.state.has_residual and not _overflow(reports) and not self._rescaler.takes_back
            for each in means if returns else ():
                if each.bucket is not None:
                    each.rollback(each.bucket)
            raise
        return reports, None if _overflow(reports) else means

    def _found_finite(self, gradients: Sequence[Gradients], measures: bool) -> bool:
        """Tell whether the gradients are finite, as far as the host knows; False also if squares overflow."""
        finite, device = fit(gradients), self._weights.buckets[0].device
        # By the device too: a rank without gradients gets no tensor from `fit`, while others do.
        later = isinstance(finite, Tensor) or host_is_ahead(device)
        sharded = type(self._replica).agreed is not Replica.agreed  # then the shards of a copy agree on the host
        host_decides = sharded or self._sender.idle or self._rescaler.takes_back or self._of_mean
        if later and self.scheme.heeds_skip and not host_decides:
            self._pending = Pending(Skip(torch.as_tensor(finite, device=device)), list(self._weights.trained), measures)
            finite = True
        return self._replica.agreed(bool(finite))  # on a GPU a host sync, unless it skips there

    def _reduce(
        self,
        gradients: Sequence[Gradients] | None,
        beside: Sequence[tuple[Bucket, Reduction]],
        means: list[Mean],
        reports: list[Report],
        skip: Skip | None,
    ) -> None:
        """Reduce this rank's step of each bucket to the mean over ranks, appended to `means`, and the pairs `beside` it.

        WholeStep reduces a bucket that sends every element in few bits; the scheme reduces the others. `gradients` None: they are not
        finite, and NaN is sent.
        """
        sender, buckets, state, pairs = self._sender, self._weights.buckets, self.state, list(beside)
        by_scheme, at = list[tuple[int, SchemeMean]](), len(reports)

        def steps(place: int) -> StepsToMake | None:
            return None if gradients is None else sender.steps_to_make(place, gradients[place], self._comm.size)

        for place, bucket in enumerate(buckets):
            form = None
            if not sender.idle and bucket.dtype == torch.float32:
                like = sender.vectors["square"][place]  # only its size and type are read
                form = state.whole_form(bucket.bucket(like, self._step))
            if form is not None:
                values, residual = form
                mean = WholeStep(state.name, bucket.bucket(residual, self._step), values, steps(place), skip)
                means.append(mean)
                pairs.append((mean.bucket, mean))
            else:
                means.append(mean := SchemeMean(state, bucket.part(sender.idle), bucket.elements))
                by_scheme += [(place, mean)] if mean.part.layout else []

        def reduce_by_scheme() -> None:
            for place, mean in by_scheme:
                empty = buckets[place].empty()
                reports.append(mean.reduce(self._connection, empty, steps(place), self._step, skip, len(buckets) == 1))

        if by_scheme or len(pairs) > 1:
            reports[at:at] = reduce_together(self._connection, pairs, reduce_by_scheme if by_scheme else None)
        elif pairs:
            reports.append(self._connection.reduce(*pairs[0]))

    def _observe(self, sketch: Measurement, report: Report) -> None:
        """Add a reduced measurement, if it is finite."""
        if report.details["overflow"]:
            return
        sketch.observe(map(self._sender.taking, range(len(self._weights.buckets))))
        if self._of_mean:
            for each in self._sender.vectors["square"]:
                each.mul_(self._own_factor() ** 2)
            self._of_mean = False

    def _apply(self, means: Sequence[Mean]) -> None:
        """Move the common weights and write the own ones, also after a skipped step, which may have changed the residual."""
        skip, left = None if self._pending is None else self._pending.skip.flag, list(means)
        moves = skip is None or not self._callbacks or not skip  # a host sync if there are callbacks
        for place in range(len(left)):
            mean = left.pop(0)  # freed before own weights are written
            if self._callbacks and moves and (whole := mean.whole()) is not None:
                self._note_move([whole], place=place, idle=sorted(self._sender.idle))
            if (arrived := mean.mean) is not None:  # read once: it may be made here
                self._sender.move(place, arrived, skip)
        self._sender.shares = False
        self._write_own()

    def _adopt(self) -> list[str]:
        """Adopt weights that were set from outside, and return their names. If they are the common ones, put own ones back."""
        if self._shown is not None:
            return self._shown.adopt(self._sender.idle, self._take_from_model, self._write_own)
        self._take_from_model(changed := self._weights.last_written.changed())
        return changed

    @torch.no_grad()
    def _write_own(self, left: frozenset[str] | None = None) -> None:
        idle, buckets = self._sender.idle, self._weights.buckets
        left = idle if left is None else left
        written = list[Tensor | None]()
        for each in buckets:
            if self._keep:
                written.append(own_weights.write_own(each, self.state, self._comm, self._keep, idle, left))
            else:
                each.show(left)
        self._replica.written()
        self._weights.note_written(written)

    def _end_step(self, skipped: bool) -> None:
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
            self._tell_skipped(skipped)

    def _settle(self) -> None:
        """Learn from the device whether the last step was skipped, and if so, uncount it."""
        pending, self._pending = self._pending, None
        if pending is None or self._applied != self._step:  # nothing waits, or the step has failed
            return
        if skipped := pending.skip.seen:
            self._sender.uncount(pending.counted)
            self._moments.count()
            if pending.measured:
                self._sender.ratios.forget_last()
        self._tell_skipped(skipped)

    def _tell_skipped(self, skipped: bool) -> None:
        """Warn of the first skipped step in a row, and raise if there are too many: the same on all ranks."""
        self._totals["skipped"] += skipped
        self._skipped = self._skipped + 1 if skipped else 0
        reason = "the gradient of a rank holds NaN or Inf, or is too long for its squares to be summed"
        if self._skipped == _MOST_SKIPPED:
            raise RuntimeError(
                f"the last {_MOST_SKIPPED} steps were skipped on all ranks, and no weight has moved: {reason}; lower the learning rate, "
                "clip gradients, or find out where the loss is not finite"
            )
        if self._skipped == 1:
            warn_of(f"step {self._step} was skipped on all ranks: {reason}; `stats()` counts these steps")

    @property
    def clip_factor(self) -> float:
        """The norm of this rank's gradient over the norm of the mean one, as last measured: in [1, sqrt(P)], and 1 before.

        A measurement on a GPU counts one step later.
        """
        return self._sender.ratios.clip_factor(self._comm.size)

    def close(self) -> None:
        """Give back connections and threads, and the optimizer its own `step`; see Handle."""
        try:
            self._settle()
        finally:  # it raises after too many skipped steps
            self._moments.leave()
            self._taken.release()
            self._divisor.release()
            super().close()


def _overflow(reports: Sequence[Report]) -> bool:
    return any(bool(each.details["overflow"]) for each in reports)

"""Local steps: each rank trains with its own optimizer and weights, and every few steps the ranks exchange what they have learnt.

Local SGD (arXiv 1805.09767); DiLoCo's outer optimizer (2311.08105); Streaming DiLoCo's fragments and delay (2501.18512); SparseLoCo's
sparse exchange with error feedback (2508.15706). The bytes per step are the scheme's, divided by the steps between two exchanges.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.core import Comm, Report
from sparsync.exchanges.agreement import Agreement
from sparsync.exchanges.local_exchange import Exchanger, PendingExchange
from sparsync.exchanges.local_state import LocalState
from sparsync.exchanges.own_optimizers import OwnOptimizers
from sparsync.exchanges.own_weights import ShownWeights
from sparsync.exchanges.steps_options import LocalSteps
from sparsync.exchanges.training_loop import Replica
from sparsync.runtime.findings import check_optimizer, innermost, steps_in_backward, warn_of

_CURE = (
    "load the same weights on all ranks before the same step; if the loop itself changes them after each step, as by clamp_, do so in a "
    "hook that you register by optimizer.register_step_post_hook before sparsync.attach: the change counts as learnt; compute what "
    "follows from the weights, such as their average (EMA), inside `with handle.averaged():`"
)
_MOST_DROPPED = 5  # exchanges in a row of one fragment


class LocalTraining(LocalState):
    """Let each rank train `model` with its own `optimizer`, and exchange what it has learnt by `scheme` every `every` steps.

        D = start - W                   the change of a rank's own weights W since the last exchange, with the sign of a gradient
        mean = scheme.reduce(D)         what is not sent stays in the scheme's residual
        A = A - mean                    the common weights, the same bits on all ranks; or a step of `outer`
        W = start = A - keep * unsent   unsent: what this rank's residual holds

    `sparsync.attach` makes it, for wrapped models too, and returns it as the handle: `optimizer.step()` then counts the steps. Make it
    yourself to pass `comm`, and call `step` after the optimizers'. It copies rank 0's parameters and buffers to all ranks. `close` leaves
    the common weights in the model; call `flush` first, or the changes since the last exchange are lost. Common weights are float32, or
    float64 for float64 parameters; own weights of 16-bit parameters are rounded to 16 bits.
    Collective over the ranks of `group`: make it on all of them, with the same settings.
    Memory, in vectors of all trained parameters: the common weights; one more if own weights differ from them after an exchange; the
    state of `outer` and of the scheme; and during an exchange the change, the own weights and the unsent part.

    Args:
        model: bare, neither wrapped by DistributedDataParallel nor by FSDP.
        optimizer: one or several. Ranks compare their settings in each exchange, so a rank that has run out of data still steps its
            schedule.
        scheme: reduces the changes.
        options: the fields of LocalSteps: `every`, `keep`, `outer`, `fragments`, `delay` and more.
        group, comm: the ranks; or a communicator in place of a group, such as one of a `LocalWorld`.
        timeout_s: seconds; a rank that waits longer for the others gives up.
        scaler: the GradScaler that scales the loss, if there is one: a step that it skips on this rank alone then counts.
        replica: for a wrapped model; `sparsync.attach` passes it. None: `model` itself.

    Raises:
        TypeError: if DistributedDataParallel or FSDP wraps the model, or `scheme` is not a Scheme.
        ValueError: if a setting is out of range, or another integration that is not closed yet trains the model.
        RuntimeError: if a rank is missing, or has other settings or other parameters.
    """

    origin = "LocalTraining"
    integration = "local_steps"

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
        **options: Any,  # Any: the fields of LocalSteps
    ) -> None:
        check_optimizer(optimizer)
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.options = self.exchange = given = LocalSteps(**options)
        replica = Replica(model) if replica is None else replica
        super().__init__(replica, self.optimizers, scheme, given, group, comm, timeout_s, given.fragments)
        self._optimized = False  # an optimizer has stepped since the last `step`, so changed weights count as learnt
        self._counts = False  # the optimizers' own `step` counts
        self._exchanger = Exchanger(self._connection, self.state, self._comm, given, self._weights, model)
        self._comparison.compare(self._weights.common, _CURE)
        self._drops = [0] * given.fragments  # since the last exchange of a fragment that was not dropped
        self._totals = {"exchanges": 0, "dropped": 0, **self._totals}
        self._watched = OwnOptimizers(
            self.optimizers, self._before_optimizer, self._after_optimizers, scaled=scaler is not None
        )
        self._shown = self._in_model = ShownWeights(
            replica, self._weights, self._set_outside, self._adopt, self._go_back_before_pass
        )

    def step(self) -> list[Report]:
        """Count a step, and exchange what is due; return a report for each exchanged bucket, none between exchanges.

        Call it on every rank once per step, after the optimizer's step, also if a loss scaler skipped that one or a rank has run out of
        data. With gradient accumulation, call it after the last backward pass only.
        Weights set from outside before the optimizer's step, the same on all ranks, become the common ones. If a whole model was set, so do
        its buffers. Changes between the optimizer's step and this call count as learnt.
        With `delay`, the exchange sent at step t is applied at step t + delay. Let S be A - keep * unsent, and u = W(t) - W(t + delay) the
        steps made since. The own weights become S - u; with `mixing` m, m W(t + delay) + (1 - m) S, as in Streaming DiLoCo (2501.18512).
        Differs from the paper: the next exchange sends all of u, and nothing is sent twice, for any `mixing`.
        A parameter that is frozen, or that no rank has changed, is not exchanged: it stays, and its unsent part waits.
        NaN or Inf in any rank's weights drops the exchange, with a warning: all ranks return to the weights after the last one, and
        that rank resets its buffers and non-finite optimizer state. 5 drops in a row raise RuntimeError.
        A failed exchange raises on all ranks; with `delay`, when it is due. The weights stay, and the next exchange sends the changes.
        After an error while a rank applies it, all ranks raise from the next exchange on, until a checkpoint is loaded on all of them.
        Raises RuntimeError, on all ranks, if ranks have made different numbers of steps; and if `optimizer.step()` counts the steps.
        """
        if self._counts:
            raise RuntimeError(
                "optimizer.step() counts the steps of this handle, and step() would count another one; leave it out"
            )
        return self._take_step()

    def count_with_optimizers(self) -> list[str]:
        """Do what `step` does once every optimizer has stepped; return the types of optimizers that do not run step hooks.

        If there is one of these, call `step` as before.
        """
        self._counts = not self._watched.unseen
        return self._watched.unseen

    def _take_step(self) -> list[Report]:
        self._check_own()
        self._go_back_once()
        self._step += 1
        done = self._step + 1
        reports = []
        every, fragments = self.options.every, self.options.fragments
        try:
            for number in [each for each, exchange in self._exchanger.pending.items() if exchange.due <= done]:
                reports += self._finish(number)
            for number in range(fragments):
                if done % every == (number + 1) * every // fragments % every:
                    reports += self._start(number, self.options.delay)
        finally:
            self._note_written()
        return reports

    def flush(self) -> list[Report]:
        """Exchange and apply all fragments now, at the end of training. Call it on every rank; it counts no step."""
        self._check_own()
        try:
            reports = [report for number in list(self._exchanger.pending) for report in self._finish(number)]
            for number in range(self.options.fragments):
                reports += self._start(number, 0)
        finally:
            self._note_written()
        return reports

    def close(self) -> None:
        if self._exchanger.worker is not None:
            self._exchanger.worker.stop()  # after the pending exchanges, without waiting for them
        self._watched.release()
        super().close()
        # A state saved from here on holds no changes since the last exchange.
        self._optimized = False
        for bucket in self._weights.buckets:
            bucket.start = bucket.common
        for exchange in self._exchanger.pending.values():
            exchange.own = [each.own() for each in exchange.buckets]

    def detach(self) -> None:
        """Undo `attach`: the model trains on from the common weights. Call it on all ranks, between two steps.

        The optimizers begin with new moments, because the moments differ between ranks.
        """
        for each in self.optimizers:
            innermost(each).state.clear()
        super().detach()

    def clip_grad_norm_(self, max_norm: float, **options: Any) -> Tensor:  # Any: as torch.nn.utils.clip_grad_norm_
        """Clip this rank's gradient at `clip_factor * max_norm`, and return its norm before.

        `max_norm` is the value for the mean gradient.
        """
        return nn.utils.clip_grad_norm_(list(self._replica.owned.values()), self.clip_factor * max_norm, **options)

    @property
    def clip_factor(self) -> float:
        """The norm of one rank's gradient over the norm of the mean gradient, in [1, sqrt(P)]; sqrt(P) if not given."""
        return self._comm.size**0.5 if self.options.clip_factor is None else self.options.clip_factor

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Evaluate or save the model with the common weights and buffers of the last exchange, the same bits on all ranks.

        This rank's values are back afterwards. Nothing is sent, so one rank may do it alone.
        """
        with super().averaged(), self._exchanger.buffers.in_model():
            yield

    def _start(self, fragment: int, delay: int) -> list[Report]:
        """Send a fragment, and apply it unless it is delayed."""
        exchange = PendingExchange(self._weights.fragments[fragment], self._step + 1 + delay, background=delay > 0)
        try:
            self._take(exchange, fragment)
            self._exchanger.start(exchange, self._step)
        except BaseException as error:
            self._failed |= delay == 0  # a delayed exchange fails when it is due, on all ranks at the same step
            exchange = PendingExchange([], exchange.due, exchange.background)
            self._exchanger.fail(exchange, self._step, error)
        self._exchanger.pending[fragment] = exchange
        return [] if delay else self._finish(fragment)

    def _take(self, exchange: PendingExchange, fragment: int) -> None:
        """Fill an exchange with this rank's changes."""
        self._check_trained()
        applied, first = self._exchanger.applied[fragment], fragment == 0
        finite, parameters = exchange.take(applied)
        buffers = list(self.model.buffers()) if first else []  # once per round
        exchange.agreement = Agreement(self._step, applied, finite, parameters, buffers)
        done = self._step + 1
        # Read on this thread: schedules change the settings during the exchange.
        steps = done + 1 if self._failed else self.options.every if first else 0
        exchange.compared = self._comparison.at(done, steps)
        self._adopted.clear()
        self._comparison.loaded = ()
        self._failed = False

    def _finish(self, fragment: int) -> list[Report]:
        """Wait for the exchange of a fragment, and apply it to the common and the own weights."""
        exchange = self._exchanger.pending[fragment]
        try:
            failure = exchange.wait()
        except BaseException as error:
            # Ctrl-C raises here. A failure of this exchange is not raised again; if it succeeds, the next step applies it.
            exchange.raised = True
            self._connection.close(error)
            raise
        del self._exchanger.pending[fragment]
        if failure:
            self._failed = True
            if exchange.raised:
                return []
            raise RuntimeError(failure)
        with self._applying(), torch.no_grad():
            if not exchange.dropped:
                means = [each.grad for each in exchange.changes]
                self._note_move(means, fragment=fragment, idle=sorted(exchange.idle))
            self._exchanger.apply(exchange, fragment)
            if self._place["rank"] in exchange.not_finite:
                self._exchanger.recover()
                _restart(self.optimizers)
        self._totals["dropped" if exchange.dropped else "exchanges"] += 1
        self._count(exchange.reports)
        self._drops[fragment] = self._drops[fragment] + 1 if exchange.dropped else 0
        if exchange.dropped:
            _tell_drop(exchange, self._drops[fragment])
        return exchange.reports

    def _before_optimizer(self) -> None:
        """Show own weights, and adopt weights that were set from outside, before an optimizer changes them."""
        self._check_own()
        self._go_back_once()
        self._optimized = True

    def _go_back_before_pass(self) -> None:
        if self._loads.take_new():
            self._check_own()
            self._go_back_once()

    def _go_back_once(self) -> None:
        """Drop waiting changes if another state was loaded; a later load counts for the next step."""
        told = self._comparison.loaded
        self._go_back(self._step)
        self._loads.forget()
        self._comparison.loaded = self._comparison.loaded or told  # until the next exchange

    def _waits(self) -> bool:
        return super()._waits() or bool(self._exchanger.pending) or self._exchanger.outer is not None

    def _drop_held(self, moments: bool) -> None:
        self._exchanger.drop_pending()  # first: a thread may be running it
        super()._drop_held(moments)
        if moments and self._exchanger.outer is not None:
            self._exchanger.outer.optimizer.state.clear()
        self._note_other_move()
        with torch.no_grad():
            for bucket in self._weights.buckets:
                bucket.start = bucket.write(bucket.common)  # nothing was learnt since
        self._note_written()

    def _after_optimizers(self) -> None:
        if self._counts:
            self._take_step()

    def _set_outside(self) -> list[str]:
        own_shown = not self._in_model.common
        learning = self._optimized or self._watched.unseen or steps_in_backward(self.model)
        return [] if own_shown and learning else super()._set_outside()

    def _adopt(self) -> list[str]:
        """Adopt weights that were set from outside, and return their names. If they are the common ones, put own ones back.

        These are the own weights after the last exchange, unless others were put aside: the changes since were overwritten.
        """
        own_shown, changed = not self._in_model.common, self._set_outside()
        others = [name for name in changed if not self._weights.shows_common(name)]
        self._take_from_model(others)
        if others:
            self._in_model.take(others)
        with torch.no_grad():
            if own_shown and len(others) < len(changed):
                for bucket in self._weights.buckets:
                    bucket.write(bucket.start, frozenset(bucket.parameters).difference(changed))
                self._weights.note_written()
            for exchange in self._exchanger.pending.values() if own_shown or others else ():
                for bucket, own in zip(exchange.buckets, exchange.own, strict=True):
                    bucket.copy_own_(own, changed if own_shown else others)
        if others and len(changed) == len(self._weights.trained):  # a whole model, with its buffers
            self._exchanger.buffers.take(self.model.buffers())
        return others

    def _note_written(self) -> None:
        self._weights.note_written()
        self._optimized = False


def _restart(optimizers: Sequence[Optimizer]) -> None:
    """Delete the state of each parameter whose state is not finite."""
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            tensors = [each for each in state.values() if isinstance(each, Tensor) and each.is_floating_point()]
            if not all(bool(each.isfinite().all()) for each in tensors):
                del optimizer.state[parameter]


def _tell_drop(exchange: PendingExchange, times: int) -> None:
    """Warn of a dropped exchange, the last of `times` in a row, or raise if that is too many. The same on all ranks."""
    ranks = exchange.not_finite
    problem = f"the weights of ranks {ranks} hold NaN or Inf" if ranks else "the mean over ranks holds NaN or Inf"
    if times == _MOST_DROPPED:
        raise RuntimeError(
            f"the last {times} exchanges were dropped, and all ranks are back at the weights before them: {problem}; lower the learning "
            "rate, clip gradients, or find out where the loss is not finite"
        )
    warn_of(
        f"the exchange before step {exchange.due} was dropped, {problem}; all ranks returned to the weights after the last one. "
        "If this happens again, lower the learning rate or clip gradients"
    )

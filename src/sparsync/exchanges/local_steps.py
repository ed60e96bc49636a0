"""Local steps: each rank trains with its own optimizer and weights, and every few steps the ranks exchange what they have learnt.

Local SGD (arXiv 1805.09767); DiLoCo's outer optimizer (2311.08105); Streaming DiLoCo's fragments and delay (2501.18512); SparseLoCo's
sparse exchange with error feedback (2508.15706). The bytes of an exchange are those of the scheme, divided by the steps between two.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.core import Comm, Report
from sparsync.exchanges.agreement import BUFFERS, Agreement
from sparsync.exchanges.local_exchange import Exchanger, PendingExchange, merged
from sparsync.exchanges.local_options import LocalSteps
from sparsync.exchanges.own_optimizers import OwnOptimizers
from sparsync.exchanges.own_weights import ShownWeights
from sparsync.exchanges.step_method import StepMethod
from sparsync.exchanges.training_loop import Replica
from sparsync.runtime.findings import check_optimizer, innermost, steps_in_backward, warn_of
from sparsync.runtime.restorable import Part, SavedState, Snapshot

_CURE = (
    "load the same weights on all ranks before the same step; or, where the loop itself changes them after each step, as by clamp_, let a "
    "hook do that which you give to optimizer.register_step_post_hook before sparsync.attach: it counts as learnt; compute what follows "
    "from the weights, such as their average (EMA), inside `with handle.averaged():`"
)
_MOST_DROPPED = 5  # exchanges of a fragment in a row


class LocalTraining(StepMethod):
    """Let each rank train `model` with its own `optimizer`, and exchange what was learnt with `scheme` every `every` steps.

        D = start - W                   the change of a rank's own weights W since the last exchange, with the sign of a gradient
        mean = scheme.reduce(D)         what is not sent stays in the scheme's residual
        A = A - mean                    the common weights, the same bits on all ranks; or a step of `outer`
        W = start = A - keep * unsent   unsent: what this rank's residual holds

    `sparsync.attach` makes it, for wrapped models too, and returns it as the handle: the optimizers' own `step` then counts. Make it
    yourself to pass `comm`, and call `step` after the optimizers'. Rank 0's parameters and buffers are copied to all ranks here. `close`
    leaves the common weights in the model; call `flush` before, or what was learnt since the last exchange is lost. Common weights are
    float32, or float64 for float64 parameters; own weights of 16-bit parameters are rounded to 16 bits.
    Collective over the ranks of `group`: make it on all of them, with the same settings.
    Memory, in vectors of all trained parameters: the common weights; one more where own weights differ from them after an exchange; the
    state of `outer` and of the scheme; and during an exchange the change, the own weights and what is held back.

    Args:
        model: bare, neither wrapped by DistributedDataParallel nor by FSDP.
        optimizer: one or several. Ranks compare their settings in each exchange, so a rank that has run out of data still steps its
            schedule.
        scheme: how what is exchanged is reduced.
        options: those of LocalSteps: `every`, `keep`, `outer`, `fragments`, `delay` and more.
        group, comm: the ranks; or a communicator in place of a group, such as that of a `LocalWorld`.
        timeout_s: seconds; a rank that waits longer for the others gives up.
        scaler: the GradScaler that scales the loss, if there is one, so that a step counts which it skips on this rank alone.
        replica: of a model that is wrapped; `sparsync.attach` passes it. None: `model` itself.

    Raises:
        TypeError: for a model that DistributedDataParallel or FSDP wraps, and for anything but a Scheme.
        ValueError: for settings out of range, and for a model that another integration trains until that one is closed.
        RuntimeError: when a rank is missing, or has other settings or other parameters.
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
        self._optimized = False  # an optimizer has stepped since the last `step`: other weights are what was learnt
        self._counts = False  # the optimizers' own `step` counts
        self._exchanger = Exchanger(self._connection, self.state, self._comm, given, self._weights, model)
        self._comparison.compare(self._weights.common, _CURE)
        self._drops = [0] * given.fragments  # of each, since its last exchange that was not dropped
        self._failed = False  # an exchange, of which the next one is to compare the weights
        self._totals = {"exchanges": 0, "dropped": 0, **self._totals}
        self._watched = OwnOptimizers(
            self.optimizers, self._before_optimizer, self._after_optimizers, scaled=scaler is not None
        )
        self._shown = self._in_model = ShownWeights(
            replica, self._weights, self._set_outside, self._adopt, self._go_back_before_pass
        )

    def step(self) -> list[Report]:
        """Count a step, and exchange what is due; return a report for each exchanged bucket, none between exchanges.

        Call it on every rank once per step, after the optimizer's: also where a loss scaler skipped that one, and where a rank has run out
        of data. When gradients are accumulated, after the last backward pass only.
        Weights set from outside before the optimizer's step, the same on all ranks, become the common ones; with a whole model, so do its
        buffers. Changes between the optimizer's step and this call count as learnt.
        With `delay`, what was sent at step t is applied at step t + delay. Let S be A - keep * unsent, and u = W(t) - W(t + delay) the
        steps made since. The own weights become S - u; with `mixing` m, m W(t + delay) + (1 - m) S, as in Streaming DiLoCo (2501.18512).
        Differs from the paper: all of u is in what is sent next, and nothing is sent twice, whatever `mixing` is.
        A parameter that is frozen, or has changed on no rank, is not exchanged: it stays, and what is unsent of it waits.
        NaN or Inf in any rank's weights, or in buffers that were finite at the start, drops the exchange, with a warning: all ranks return
        to the weights after the last one, and that rank resets non-finite optimizer state. 5 drops in a row raise RuntimeError.
        A failed exchange raises on all ranks, with `delay` when it is due. Weights stay, and the next one sends what it did not. After an
        error while a rank applies it, all ranks raise from the next exchange on, until a checkpoint is loaded on all of them.
        Raises RuntimeError, on all ranks, where ranks have made different numbers of steps; and where the optimizers' own `step` counts.
        """
        if self._counts:
            raise RuntimeError(
                "optimizer.step() counts the steps of this handle, and step() would count another one; leave it out"
            )
        return self._take_step()

    def count_with_optimizers(self) -> list[str]:
        """Have the optimizers' own `step` do what `step` does, when each has stepped; return the kinds of those that do not tell.

        Where there is one of these, `step` is to be called as before.
        """
        self._counts = not self._watched.unseen
        return self._watched.unseen

    def _take_step(self) -> list[Report]:
        self._check_own()
        self._go_back_once()
        self._step += 1
        done = self._step + 1
        reports = []
        try:
            for fragment in [each for each, exchange in self._exchanger.pending.items() if exchange.due <= done]:
                reports += self._finish(fragment)
            for fragment in range(self.options.fragments):
                if self._is_time_of(fragment, done):
                    reports += self._start(fragment, self.options.delay)
        finally:
            self._note_written()
        return reports

    def flush(self) -> list[Report]:
        """Exchange and apply all fragments now: at the end of training. Call it on every rank; it counts no step."""
        self._check_own()
        try:
            reports = [report for fragment in list(self._exchanger.pending) for report in self._finish(fragment)]
            for fragment in range(self.options.fragments):
                reports += self._start(fragment, 0)
        finally:
            self._note_written()
        return reports

    def close(self) -> None:
        self._exchanger.stop()
        self._watched.release()
        super().close()
        # What a state is to have from here on: nothing that was learnt since the last exchange.
        self._optimized = False
        for bucket in self._weights.buckets:
            bucket.start = bucket.common
        for exchange in self._exchanger.pending.values():
            exchange.own = [each.own() for each in exchange.buckets]

    def detach(self) -> None:
        """Have the model train as before `attach`, from the common weights. Call it on all ranks, between two steps.

        The optimizers begin with new moments, because those of each rank are its own.
        """
        for each in self.optimizers:
            innermost(each).state.clear()
        super().detach()

    def clip_grad_norm_(self, max_norm: float, **options: Any) -> Tensor:  # Any: those of torch's function of this name
        """Clip this rank's own gradient at `clip_factor * max_norm`, and return its norm before.

        `max_norm` is the value for the mean gradient.
        """
        return nn.utils.clip_grad_norm_(list(self._replica.owned.values()), self.clip_factor * max_norm, **options)

    @property
    def clip_factor(self) -> float:
        """The length of a rank's own gradient over that of the mean gradient, in [1, sqrt(P)]; sqrt(P) where not given."""
        return self._comm.size**0.5 if self.options.clip_factor is None else self.options.clip_factor

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the common weights and buffers of the last exchange, the same bits on all ranks, into the model, to evaluate or save it.

        Own ones are back afterwards. Nothing is sent, so one rank may do it alone.
        """
        with super().averaged(), self._exchanger.buffers.in_model():
            yield

    def _method_state(self) -> dict[str, Any]:  # Any: as Handle.state_dict
        return {**self._exchanger.state_dict(), "optimizers": [each.state_dict() for each in self.optimizers]}

    def resized(self, states: Sequence[SavedState]) -> dict[str, Any]:  # Any: as Handle
        """Return a state for this rank, made from those of all ranks of another number, in rank order.

        The mean of what the ranks have learnt since the last exchange moves the common weights; optimizers are those of old ranks, in turn.
        """
        saved = [each[self.integration] for each in states]
        more = {"optimizers": saved[self.place[0] % len(saved)]["optimizers"]}
        return {**super().resized(states), self.integration: {**merged(saved), **more}}

    @property
    def done(self) -> int:
        """The number of steps that this rank has taken."""
        return self._step + 1

    @property
    def exchanged(self) -> int:
        """The number of exchanges that were applied, of all fragments."""
        return sum(self._exchanger.applied)

    def _regrouped(self, comm: Comm) -> None:
        super()._regrouped(comm)
        self._failed = True  # the next exchange compares the weights
        self._exchanger.regrouped(comm)

    def snapshot(self, *, shared: bool = True) -> Snapshot:
        self._check_own()
        return super().snapshot(shared=shared)

    def _own(self, scheme: Part) -> dict[str, Any]:  # Any: as Snapshot.own
        learnt = self._weights.saved(each.start - each.own() for each in self._weights.buckets)
        return {**super()._own(scheme), "learnt": learnt}

    def _parts(self, state: SavedState) -> tuple[dict[str, Any], dict[str, Any]]:
        # Copied, because optimizers change these in place.
        moved = {
            "common": state["common"],
            "outer": deepcopy(state["outer"]),
            "optimizers": deepcopy(state["optimizers"]),
        }
        settings = [{**each, "state": {}} for each in moved["optimizers"]]
        rest = {key: value for key, value in state.items() if key not in moved}
        return moved, {**rest, "start": {}, "own": {}, "optimizers": settings}

    def restore(self, snapshot: Snapshot) -> None:
        self._check_own()
        follows, own, buckets = snapshot.shared is not None, snapshot.own or {}, self._weights.buckets
        saved = own.get("learnt", self._own({})["learnt"] if follows else {})
        learnt = self._weights.from_saved(saved) if saved else []
        super().restore(snapshot)
        self._failed |= follows  # the next exchange compares the weights
        for bucket, change in zip(buckets, learnt, strict=bool(learnt)):
            now = bucket.own()
            if not change.isfinite().all() or torch.equal(change, bucket.start - now):
                continue
            if follows:
                bucket.write(bucket.start - change)
            else:
                bucket.start = now + change
        if follows:
            self._note_written()

    def _joined(self, snapshot: Snapshot, mine: SavedState) -> dict[str, Any]:  # Any: as Handle.state_dict
        joined, own = super()._joined(snapshot, mine), mine[self.integration]
        rest = joined[self.integration]
        theirs = {**rest, **(snapshot.moved or {key: own[key] for key in ("common", "outer")})}
        if (
            mine["step"] >= 0 or snapshot.moved is None
        ):  # moments are a rank's own, but rates and other settings are the same on all
            pairs = zip(own["optimizers"], rest["optimizers"], strict=True)
            theirs["optimizers"] = [{**one, "param_groups": other["param_groups"]} for one, other in pairs]
        return {**joined, self.integration: theirs}

    def _start_from(self, moved: SavedState) -> None:
        self._check_own()
        for bucket in self._weights.buckets:
            # What was learnt since the last exchange is the difference to these.
            bucket.start = bucket.start.clone() if bucket.start is bucket.common else bucket.start
        self._take_common(self._weights.from_saved(moved["common"]))
        if self._exchanger.outer is not None:
            self._exchanger.outer.optimizer.load_state_dict(moved["outer"])
        for optimizer, one in zip(self.optimizers, moved["optimizers"], strict=True) if self._step < 0 else ():
            optimizer.load_state_dict(one)

    def _replay(self, move: Part) -> None:
        self._take_settings(move["groups"])
        buckets = self._weights.fragments[move["fragment"]]
        exchange = PendingExchange(buckets, 0, background=False, idle=frozenset(move["idle"]))
        pairs = zip(buckets, move["means"], strict=True)
        exchange.changes = [bucket.bucket(mean.to(bucket.common.device), 0) for bucket, mean in pairs]
        self._exchanger.apply_to_common(exchange)

    def _movers(self) -> Sequence[Optimizer]:
        return [] if self._exchanger.outer is None else [self._exchanger.outer.optimizer]

    def _check(self, state: SavedState) -> None:
        super()._check(state)
        saved = state[self.integration]
        groups = [each["param_groups"] for each in saved["optimizers"]], [each.param_groups for each in self.optimizers]
        then, now = ([[len(one["params"]) for one in each] for each in optimizers] for optimizers in groups)
        if then != now:
            raise ValueError(
                f"this state was saved with optimizers whose groups have {then} parameters, and now they have {now}; pass as many "
                "optimizers, with the same groups"
            )
        self._exchanger.check(saved)

    def _load(self, state: SavedState) -> None:
        for exchange in self._exchanger.pending.values():
            exchange.wait()  # its outcome does not matter any more
        super()._load(state)
        self._failed = False
        for optimizer, one in zip(self.optimizers, state[self.integration]["optimizers"], strict=True):
            # A copy: an optimizer keeps the tensors that it loads, which may be mapped from a file.
            optimizer.load_state_dict(deepcopy(one))
        self._exchanger.load_state_dict(state[self.integration])
        self._note_written()

    def _is_time_of(self, fragment: int, done: int) -> bool:
        """Return whether a fragment is sent after `done` steps."""
        every = self.options.every
        return done % every == (fragment + 1) * every // self.options.fragments % every

    def _start(self, fragment: int, delay: int) -> list[Report]:
        """Send a fragment, and apply it unless it is delayed."""
        exchange = PendingExchange(self._weights.fragments[fragment], self._step + 1 + delay, background=delay > 0)
        try:
            self._take(exchange, fragment)
            self._exchanger.start(exchange, self._step)
        except BaseException as error:
            self._failed |= delay == 0  # a delayed one fails when it is due, on all ranks at the same step
            exchange = PendingExchange([], exchange.due, exchange.background)
            self._exchanger.fail(exchange, self._step, error)
        self._exchanger.pending[fragment] = exchange
        return [] if delay else self._finish(fragment)

    def _take(self, exchange: PendingExchange, fragment: int) -> None:
        """Fill an exchange with what this rank sends."""
        self._check_trained()
        applied, first = self._exchanger.applied[fragment], fragment == 0
        finite, parameters = exchange.take(applied)
        buffers = list(self.model.buffers()) if first else []  # once per round
        if buffers and any(self._exchanger.buffers.bad()):
            finite = min(finite, BUFFERS)
        exchange.agreement = Agreement(self._step, applied, finite, parameters, buffers)
        done = self._step + 1
        # Read now, on this thread: schedules go on during the exchange.
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
            # Ctrl-C raises here: a failure of this exchange is not raised again. If it succeeds, the next step applies it.
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
        """Have own weights in the model, and look for others that were set from outside, before an optimizer changes them."""
        self._check_own()
        self._go_back_once()
        self._optimized = True

    def _go_back_before_pass(self) -> None:
        if self._loads.take_new():
            self._check_own()
            self._go_back_once()

    def _go_back_once(self) -> None:
        """Drop what waits where another state was loaded; what is loaded from here on counts for the next step."""
        told = self._comparison.loaded
        self._go_back(self._step)
        self._loads.forget()
        self._comparison.loaded = self._comparison.loaded or told  # until the next exchange

    def _waits(self) -> bool:
        return super()._waits() or bool(self._exchanger.pending) or self._exchanger.outer is not None

    def _drop_held(self, moments: bool) -> None:
        self._exchanger.drop_pending()  # first: it may be on a thread
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
        """Adopt weights that were set from outside, and return their names. Where they are the common ones, own ones are put back.

        These are the ones after the last exchange, unless they were put aside: what was learnt since was overwritten.
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
    """Forget the state of each parameter for which it is not finite."""
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            tensors = [each for each in state.values() if isinstance(each, Tensor) and each.is_floating_point()]
            if not all(bool(each.isfinite().all()) for each in tensors):
                del optimizer.state[parameter]


def _tell_drop(exchange: PendingExchange, times: int) -> None:
    """Warn of a dropped exchange, the last of `times` in a row, or raise where these are too many. The same on all ranks."""
    found = exchange.described_drop()
    if times == _MOST_DROPPED:
        raise RuntimeError(
            f"the last {times} exchanges were dropped, and all ranks are back at the weights before them: {found}; lower the learning "
            "rate, clip gradients, or find out where the loss is not finite"
        )
    warn_of(
        f"the exchange before step {exchange.due} was dropped, {found}; all ranks returned to the weights after the last one. "
        "If this happens again, lower the learning rate or clip gradients"
    )

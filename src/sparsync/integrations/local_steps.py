"""Local steps: each rank runs its own optimizer on its own weights, and every few steps the ranks exchange what they have learnt.

Local SGD (arXiv 1805.09767); DiLoCo's outer optimizer (2311.08105); Streaming DiLoCo's fragments and delay (2501.18512); SparseLoCo's
sparse exchange with error feedback (2508.15706). The bytes of an exchange are those of the scheme, divided by the steps between two.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsync import kernels
from sparsync.base.scheme import Scheme
from sparsync.comm.group import GroupComm
from sparsync.core import Comm, Report
from sparsync.feedback import state_from
from sparsync.integrations.findings import given_or_default
from sparsync.integrations.handle import Handle
from sparsync.integrations.local_steps_agreement import Agreement, Buffers
from sparsync.integrations.local_steps_checks import (
    MEASURED,
    MakeOptimizer,
    check_model,
    check_own_steps,
    check_settings,
    check_trained,
    compare,
    described,
    fingerprint_of,
)
from sparsync.integrations.local_steps_clip import LENGTH, ClipFactor, sketch
from sparsync.integrations.local_steps_exchange import Exchange, Exchanger
from sparsync.integrations.local_steps_weights import (
    WeightBucket,
    buckets_of,
    common_in_model,
    copy_from_first,
    fragments_of,
    sent_and_drift,
)
from sparsync.integrations.parameter_names import named_parameters
from sparsync.integrations.residual_units import ResidualRescaler

_SAVED = (
    "common",
    "start",
    "own",
    "applied",
    "pending",
    "buffers",
    "common_buffers",
    "outer",
    "optimizers",
    "clip_factor",
    "totals",
)


@dataclass(frozen=True)
class OuterSGD:
    """Make the outer optimizer of DiLoCo: SGD with momentum on the common weights, with the mean change as its gradient."""

    rate: float = 0.7  # DiLoCo's; 1 without momentum is no outer optimizer
    momentum: float = 0.9  # DiLoCo's
    nesterov: bool = True  # DiLoCo's

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return the optimizer of these parameters."""
        return torch.optim.SGD(
            parameters, lr=self.rate, momentum=self.momentum, nesterov=self.nesterov and self.momentum > 0
        )


class LocalSteps(Handle):
    """Let each rank train `model` by itself, with `optimizer`, and exchange what was learnt with `scheme` every `every` steps.

        D = start - W                   the change of a rank's own weights W since the last exchange, with the sign of a gradient
        mean = scheme.reduce(D)         what is not sent stays in the scheme's residual
        A = A - mean                    the common weights, the same bits on all ranks; or a step of `outer`
        W = start = A - keep * unsent   unsent: what this rank's residual holds

    `every`: the steps between two exchanges, H. `keep`, in [0, 1]: the part of what a rank has not sent that stays in its own weights.
    `outer`: None, `OuterSGD(...)`, or a function that makes a torch optimizer of a list of parameters, here the common weights.
    `fragments`: the parameters are exchanged in so many parts, in turn, at steps spread evenly over `every`. `delay`, in [0, every]:
    what was sent is applied so many steps later, and computing goes on meanwhile. `mixing`: see `step`.
    `buffers`: at each exchange they become those of rank 0 ("broadcast", as under DistributedDataParallel), or the floating ones their
    mean and the others those of rank 0 ("mean"), or they stay as they are ("own").
    `clip_factor`: see there. `bucket_mb`: megabytes of a bucket. A rank that waits longer than `timeout_s` seconds for the
    others gives up. `comm`: a communicator to be used in place of `group`, such as that of a `LocalWorld`.

    Without `scheme` it is that of the environment variable SPARSYNC_SCHEME, or `Dense()`, as for `sparsync.attach`.

    The model is not wrapped: `loss.backward(); optimizer.step(); steps.step()`. Parameters and buffers of rank 0 are copied to all ranks
    here. Common weights are float32, or float64 for float64 parameters: what rounding the own ones to 16 bits drops is not dropped from
    them. Frozen parameters are not exchanged.
    Collective over the ranks of `group`: make it on all of them, with the same settings, each with an instance of the scheme.
    Memory, in vectors of all trained parameters: the common weights; one more where own weights differ from them after an exchange; the
    state of `outer` and of the scheme; and while something is exchanged the change of it, its own weights and what it holds back.
    Raises TypeError for a model that DistributedDataParallel or FSDP wraps and for anything but a Scheme, ValueError for settings out of
    range, and RuntimeError when a rank is missing, or has other settings or other parameters.
    """

    replaces_optimizer = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        scheme: Scheme | None = None,
        *,
        every: int,
        keep: float = 0.5,
        outer: MakeOptimizer | None = None,
        fragments: int = 1,
        delay: int = 0,
        mixing: float | None = None,
        buffers: Buffers = "broadcast",
        clip_factor: float | Literal["measured"] | None = None,
        bucket_mb: float = 25.0,
        group: dist.ProcessGroup | None = None,
        comm: Comm | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        scheme = given_or_default(scheme)
        check_own_steps(scheme)
        check_model(model)
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        if not self.optimizers or not all(isinstance(each, Optimizer) for each in self.optimizers):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or several, got {optimizer!r}")
        check_settings(every, keep, fragments, delay, mixing, buffers, clip_factor, bucket_mb)
        self.model, self.every, self.keep, self.delay, self.mixing = model, every, keep, delay, mixing
        self.buffers: Buffers = buffers
        trained = {name: each for name, each in named_parameters(model) if each.requires_grad}
        dealt = fragments_of(trained, fragments)
        settings = {"every": every, "keep": keep, "outer": described(outer), "fragments": fragments, "delay": delay}
        settings |= {"mixing": mixing, "buffers": buffers, "clip_factor": clip_factor, "bucket_mb": bucket_mb}
        fingerprint = fingerprint_of("LocalSteps", model, scheme, settings)
        if comm is None:
            comm = GroupComm.private(group, timeout_s, fingerprint)
        else:
            compare(fingerprint, comm, next(iter(trained.values())).device)
        super().__init__(scheme, comm, ResidualRescaler(scheme, {}))
        copy_from_first(model, comm)
        prefix = "{}." if fragments > 1 else ""
        self._fragments = [buckets_of(part, bucket_mb, prefix.format(i)) for i, part in enumerate(dealt)]
        self._trained = list(trained.values())
        self._common_buffers = [each.detach().clone() for each in model.buffers()]
        self._outer_parameters = {} if outer is None else _outer_parameters(self._fragments)
        self._outer = None if outer is None else outer(list(self._outer_parameters.values()))
        self._applied = [0] * fragments  # exchanges of each fragment, dropped ones too; what schemes draw depends on it
        self._pending: dict[int, Exchange] = {}  # by fragment, in the order in which they were sent
        # A communicator inside this process knows one thread for each rank.
        threaded = delay > 0 and isinstance(comm, GroupComm)
        self._exchanger = Exchanger(self._connection, scheme, comm, keep, threaded)
        self._averaging = False  # `averaged` has the common weights in the model
        self._totals = {"exchanges": 0, "dropped": 0, "bytes_sent": 0}
        self._given_factor = clip_factor
        self._measured = ClipFactor(comm.size)
        self._sketch: Tensor | None = None  # of the own gradient, for the next exchange of the first fragment

    def step(self) -> list[Report]:
        """Count a step, and exchange what is due; return a report for each bucket that was exchanged, none between exchanges.

        Call it on every rank once for each step, after the optimizer's: also where a loss scaler skipped that one, and where a rank has run
        out of data and has not trained at all. When gradients are accumulated, after the last backward pass only.
        With `delay`, what was sent at step t is applied at step t + delay. Let S be A - keep * unsent, and u = W(t) - W(t + delay) the
        steps made since. The own weights become S - u; with `mixing` m, m W(t + delay) + (1 - m) S, as in Streaming DiLoCo (2501.18512).
        Differs from the paper: all of u is in what is sent next, and nothing that was sent is sent again, whatever `mixing` is.
        NaN or Inf in the weights of any rank: the exchange is dropped, of which all ranks warn. They return to the weights after the one
        before; on that rank all weights do, and those parts of the optimizer's state that are not finite start again.
        When an exchange fails on a rank it raises on all ranks, with `delay` at the step that would have applied it. The weights stay as
        they are, and what was not sent is in the next one. An error while it is applied leaves a part of it on this rank: from the next
        exchange on all ranks raise, until a checkpoint was loaded on all of them.
        Raises RuntimeError, on all ranks, where ranks have made different numbers of steps.
        """
        self._check_own()
        self._step += 1
        done = self._step + 1
        reports = []
        for fragment in [each for each, exchange in self._pending.items() if exchange.due <= done]:
            reports += self._finish(fragment)
        for fragment in range(len(self._fragments)):
            if self._is_time_of(fragment, done):
                reports += self._start(fragment, self.delay)
        return reports

    def exchange(self) -> list[Report]:
        """Exchange all fragments now, and apply them without delay: at the end of training. Call it on every rank; it counts no step."""
        self._check_own()
        reports = [report for fragment in list(self._pending) for report in self._finish(fragment)]
        for fragment in range(len(self._fragments)):
            reports += self._start(fragment, 0)
        return reports

    def close(self) -> None:
        self._exchanger.stop()
        super().close()

    def clip_grad_norm_(self, max_norm: float, **options: Any) -> Tensor:  # Any: those of torch's function of this name
        """Clip this rank's own gradient at `clip_factor * max_norm`, and return its norm before.

        `max_norm` is what one would clip the mean gradient at. Call it on all ranks or on none.
        """
        if self._given_factor == MEASURED and self._is_time_of(0, self._step + 2):
            named = ((name, each) for bucket in self._buckets for name, each in bucket.parameters.items())
            self._sketch = sketch(named, self._applied[0])
        return nn.utils.clip_grad_norm_(self._trained, self.clip_factor * max_norm, **options)

    @property
    def clip_factor(self) -> float:
        """How much longer a rank's own gradient is taken to be than the mean gradient, on all ranks alike.

        Where noise dominates it is sqrt(P), which is taken where none was given; where the ranks' gradients are alike it is 1. "measured":
        each exchange of the first fragment carries 64 numbers more, sums of the last gradient that `clip_grad_norm_` has seen, from which
        all ranks estimate the factor; older estimates count less and less.
        """
        if isinstance(self._given_factor, (int, float)):
            return float(self._given_factor)
        return self._measured.value

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the common weights and buffers in the model: to evaluate it, or to save it. Own ones are back afterwards.

        They are those of the last exchange, the same bits on all ranks. Nothing is sent, so one rank may do it alone.
        """
        self._check_own()
        buffers = list(self.model.buffers())
        own_buffers = [each.detach().clone() for each in buffers]
        self._averaging = True
        try:
            with common_in_model(self._buckets):
                if self.buffers != "own":
                    _copy_all_(buffers, self._common_buffers)
                yield
        finally:
            _copy_all_(buffers, own_buffers)
            self._averaging = False

    def stats(self) -> dict[str, int | float]:
        """Return how many `steps` were made, `exchanges` of fragments applied and `dropped`, `bytes_sent` by this rank, and `bits`.

        `bits` are those sent for each trained parameter and step; `drift` is the distance of this rank's own weights from the common
        ones; `clip_factor` see there.
        """
        steps = self._step + 1
        more = sent_and_drift(self._buckets, self._totals["bytes_sent"], steps)
        return {"steps": steps, **self._totals, **more, "clip_factor": self.clip_factor}

    def state_dict(self) -> dict[str, Any]:  # Any: as Handle
        """Return this rank's state: own and common weights, that of the scheme and of both optimizers. Save each rank's; see Handle.

        Waits for exchanges that are on their way; one that failed is not in the state, and `step` raises its error. The model's own state
        needs no saving, but for a file of the common weights, made inside `averaged`.
        """
        self._check_own()
        pending = {fragment: exchange for fragment, exchange in self._pending.items() if not exchange.wait()}
        buckets = self._buckets
        return {
            **super().state_dict(),
            "local_steps": {
                "common": _merged(each.by_name(each.common) for each in buckets),
                "start": _merged(each.by_name(each.start) for each in buckets if each.start is not each.common),
                "own": _merged(each.by_name(each.own()) for each in buckets),
                "applied": list(self._applied),
                "pending": [_pending_state(fragment, exchange) for fragment, exchange in pending.items()],
                "buffers": {name: each.detach().clone() for name, each in self.model.named_buffers()},
                "common_buffers": [each.clone() for each in self._common_buffers],
                "outer": None if self._outer is None else self._outer.state_dict(),
                "optimizers": [each.state_dict() for each in self.optimizers],
                "clip_factor": self._measured.state_dict(),
                "totals": dict(self._totals),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, with the weights of model and optimizers as they were; see Handle.

        `every`, `keep`, `delay`, `mixing` and the size of buckets may have changed, and `fragments` where nothing was on its way.
        """
        self._check_own()
        super().load_state_dict(state)

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError where a state is of another model or of other settings."""
        own = state_from(state, "local_steps", "LocalSteps")
        saved = {key: state_from(own, key, "LocalSteps") for key in _SAVED}
        fragments, pending = len(self._fragments), [each["fragment"] for each in saved["pending"]]
        if pending and len(saved["applied"]) != fragments:
            raise ValueError(
                f"this state has {len(saved['applied'])} fragments, of which {pending} are on their way, and there are {fragments} here; "
                "continue with as many, or call exchange() before saving"
            )
        if (saved["outer"] is None) != (self._outer is None):
            raise ValueError("of this state and LocalSteps only one has an outer optimizer; use the same `outer`")
        if len(saved["optimizers"]) != len(self.optimizers):
            raise ValueError(
                f"this state is of {len(saved['optimizers'])} optimizers, and there are {len(self.optimizers)} here; pass as many"
            )
        for bucket in self._buckets:
            if not kernels.all_finite(bucket.from_names(saved["common"])):
                raise ValueError("the common weights of this state hold NaN or Inf; load an older one")

    def _load(self, state: Mapping[str, Any]) -> None:
        saved = state["local_steps"]
        common = [each.from_names(saved["common"]) for each in self._buckets]
        for exchange in self._pending.values():
            exchange.wait()  # its outcome does not matter any more
        super()._load(state)
        for bucket, weights in zip(self._buckets, common, strict=True):
            bucket.common.copy_(weights)
        applied = saved["applied"]
        self._applied = list(applied) if len(applied) == len(self._fragments) else [max(applied)] * len(self._fragments)
        self._measured.load_state_dict(saved["clip_factor"])
        self._totals = dict(saved["totals"])
        # Copies: an optimizer keeps the tensors that it loads, which may be mapped from a file.
        if self._outer is not None:
            self._outer.load_state_dict(deepcopy(saved["outer"]))
        for optimizer, one in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(deepcopy(one))
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in saved["buffers"]:
                    buffer.copy_(saved["buffers"][name])
            _copy_all_(self._common_buffers, saved["common_buffers"])
            for bucket in self._buckets:
                self._restore(bucket, saved)
        self._pending = {each["fragment"]: self._pending_from(each) for each in saved["pending"]}

    def _restore(self, bucket: WeightBucket, saved: Mapping[str, Any]) -> None:
        """Take own weights and `start` from a state; where it has none, after a change of the number of ranks, from the common weights."""
        name = bucket.layout[0].name
        if name in saved["own"]:
            bucket.start = bucket.from_names(saved["start"]) if name in saved["start"] else bucket.common
            bucket.write(bucket.from_names(saved["own"]))
        else:
            bucket.start = bucket.write(self._kept(bucket, self._exchanger.held(bucket)))

    def _pending_from(self, state: Mapping[str, Any]) -> Exchange:
        buckets, applied = self._fragments[state["fragment"]], self._applied[state["fragment"]]
        agreement = Agreement(self._step, applied, True, state["buffers"], "broadcast")
        agreement.not_finite, agreement.sketches = (
            list(state["not_finite"]),
            [each.clone() for each in state["sketches"]],
        )
        means = [each.bucket(each.from_names(state["mean"]), applied) for each in buckets]
        own = [each.from_names(state["own"]) if state["own"] else each.own() for each in buckets]
        held = [self._exchanger.held(each) for each in buckets]
        return Exchange(
            buckets, own, means, agreement, state["due"], background=True, held=held, dropped=state["dropped"]
        )

    @property
    def _buckets(self) -> list[WeightBucket]:
        return [bucket for fragment in self._fragments for bucket in fragment]

    def _is_time_of(self, fragment: int, done: int) -> bool:
        """Return whether a fragment is sent when `done` steps were made."""
        return done % self.every == (fragment + 1) * self.every // len(self._fragments) % self.every

    def _start(self, fragment: int, delay: int) -> list[Report]:
        """Send a fragment, and apply it if nothing is to come in between."""
        try:
            exchange = self._taken(fragment, delay)
            self._exchanger.start(exchange, self._step)
        except BaseException as error:
            exchange = Exchange(
                self._fragments[fragment], [], [], Agreement(self._step, 0, False), self._step + 1 + delay, delay > 0
            )
            self._exchanger.fail(exchange, self._step, error)
        self._pending[fragment] = exchange
        return [] if delay else self._finish(fragment)

    def _taken(self, fragment: int, delay: int) -> Exchange:
        """Return what this rank is to send of a fragment."""
        check_trained(self.model, self._trained, "LocalSteps")
        buckets, applied = self._fragments[fragment], self._applied[fragment]
        with torch.no_grad():
            own = [each.own() for each in buckets]
            changes = [each.bucket(each.start - now, applied) for each, now in zip(buckets, own, strict=True)]
        finite = all(kernels.all_finite(each.grad) for each in changes)
        # Once in each round.
        shared = list(self.model.buffers()) if fragment == 0 else []
        if self.buffers != "own":
            finite &= all(bool(each.isfinite().all()) for each in shared)
        sent = None
        if fragment == 0 and self._given_factor == MEASURED:
            sent = torch.zeros(LENGTH, dtype=torch.float64) if self._sketch is None else self._sketch
            self._sketch = None
        agreement = Agreement(self._step, applied, finite, shared, self.buffers, sent)
        return Exchange(buckets, own, changes, agreement, self._step + 1 + delay, background=delay > 0)

    def _finish(self, fragment: int) -> list[Report]:
        """Apply what was sent of a fragment: to the common weights, and to the own ones."""
        exchange = self._pending[fragment]
        try:
            failure = exchange.wait()
        except BaseException as error:
            # Ctrl-C: this raises, so a failure of what is still on its way is not raised again. If it ends well, the next step applies it.
            exchange.raised = True
            self._connection.close(error)
            raise
        del self._pending[fragment]
        if failure and exchange.raised:
            return []
        if failure:
            raise RuntimeError(failure)
        try:
            with torch.no_grad():
                self._drop(exchange) if exchange.dropped else self._apply(exchange)
            self._measured.observe(exchange.agreement.sketches)
            self._applied[fragment] += 1
        except BaseException as error:
            self._connection.close_partly_applied(error)
            raise
        if exchange.dropped:
            _warn_of_drop(exchange)
        self._totals["dropped" if exchange.dropped else "exchanges"] += 1
        self._totals["bytes_sent"] += sum((report.sent or report.cost).nbytes for report in exchange.reports)
        self._reports += exchange.reports
        return exchange.reports

    def _apply(self, exchange: Exchange) -> None:
        self._apply_to_common(exchange)
        for bucket, held, before in zip(exchange.buckets, exchange.held, exchange.own, strict=True):
            weights = self._kept(bucket, held)
            if not exchange.background and self.mixing is None:
                bucket.start = bucket.write(weights)
                continue
            now = bucket.own()
            since = before - now
            weights = weights - since if self.mixing is None else weights.lerp(now, self.mixing)
            bucket.start = bucket.write(weights) + since
        if exchange.agreement.buffers:
            _copy_all_(self._common_buffers, exchange.agreement.buffers)
            _copy_all_(list(self.model.buffers()), self._common_buffers)

    def _apply_to_common(self, exchange: Exchange) -> None:
        if self._outer is None:
            for bucket, mean in zip(exchange.buckets, exchange.changes, strict=True):
                bucket.common.sub_(mean.grad)
            return
        for mean in exchange.changes:
            for entry in mean.layout:
                parameter = self._outer_parameters[entry.name]
                parameter.grad = entry.span.of(mean.grad).view(parameter.shape)
        self._outer.step()  # leaves parameters without gradient alone: those of other fragments
        self._outer.zero_grad()

    def _drop(self, exchange: Exchange) -> None:
        """Return to the weights after the last exchange, for NaN or Inf were found in this one."""
        for bucket, held in zip(exchange.buckets, exchange.held, strict=True):
            bucket.start = bucket.write(self._kept(bucket, held))
        if self._place["rank"] in exchange.agreement.not_finite:
            self._recover()

    def _recover(self) -> None:
        """Forget what this rank has learnt since the last exchanges, and state of the optimizers that is not finite."""
        for bucket in self._buckets:
            bucket.start = bucket.write(bucket.start)
        for exchange in self._pending.values():
            exchange.own = [each.own() for each in exchange.buckets]
        for optimizer in self.optimizers:
            for parameter, state in list(optimizer.state.items()):
                tensors = [each for each in state.values() if isinstance(each, Tensor) and each.is_floating_point()]
                if not all(bool(each.isfinite().all()) for each in tensors):
                    del optimizer.state[parameter]
        for buffer, common in zip(self.model.buffers(), self._common_buffers, strict=True):
            if not bool(buffer.isfinite().all()):
                buffer.detach().copy_(common)

    def _kept(self, bucket: WeightBucket, held: Tensor | None) -> Tensor:
        """Return the common weights, with what stays in the own ones."""
        return bucket.common if held is None else bucket.common - held

    def _check_own(self) -> None:
        if self._averaging:
            raise RuntimeError("the common weights are in the model; leave `with steps.averaged()` first")


def merged(states: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:  # Any: as Handle.state_dict
    """Return what LocalSteps saves for `rank` of another number of ranks, made from what all ranks of the old one saved, in rank order.

    What each had learnt since the last exchange moves the common weights by its mean, in full. The own weights are not in it: they follow
    from the common ones and from the residual. Each rank's optimizers continue from those of rank `rank` modulo the old number of ranks.
    """
    first, P = states[0], len(states)
    at_send = [_merged(each["own"] for each in state["pending"]) for state in states]
    common = {}
    for name, weights in first["common"].items():
        total = torch.zeros_like(weights)
        for state, sent in zip(states, at_send, strict=True):
            total += sent.get(name, state["start"].get(name, state["common"][name])) - state["own"][name].to(
                weights.dtype
            )
        common[name] = weights - total / P
    pending = [{**each, "own": {}} for each in first["pending"]]
    optimizers = states[rank % P]["optimizers"]
    return {**first, "common": common, "start": {}, "own": {}, "pending": pending, "optimizers": optimizers}


def _pending_state(fragment: int, exchange: Exchange) -> dict[str, Any]:
    means = (bucket.by_name(mean.grad) for bucket, mean in zip(exchange.buckets, exchange.changes, strict=True))
    return {
        "fragment": fragment,
        "due": exchange.due,
        "dropped": exchange.dropped,
        "not_finite": list(exchange.agreement.not_finite),
        "mean": _merged(means),
        "own": _merged(map(WeightBucket.by_name, exchange.buckets, exchange.own)),
        "buffers": [each.clone() for each in exchange.agreement.buffers],
        "sketches": [each.clone() for each in exchange.agreement.sketches],
    }


def _warn_of_drop(exchange: Exchange) -> None:
    ranks = exchange.agreement.not_finite
    found = f"the weights of ranks {ranks} hold NaN or Inf" if ranks else "the mean over ranks holds NaN or Inf"
    warnings.warn(
        f"the exchange before step {exchange.due} was dropped, {found}; all ranks returned to the weights after the last one. "
        "If this happens again, lower the learning rate or clip gradients",
        stacklevel=4,
    )


def _merged(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: values for part in parts for name, values in part.items()}


def _copy_all_(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for each, value in zip(into, values, strict=True):
        each.detach().copy_(value)


def _outer_parameters(fragments: Sequence[Sequence[WeightBucket]]) -> dict[str, nn.Parameter]:
    """Return the common weights of each parameter as a parameter of an optimizer, in the model's order and in the same memory."""
    return {
        entry.name: nn.Parameter(entry.span.of(bucket.common).view(bucket.parameters[entry.name].shape))
        for buckets in fragments
        for bucket in buckets
        for entry in bucket.layout
    }

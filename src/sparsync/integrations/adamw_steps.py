"""AdamW whose exchange is compressed: each rank divides its own gradient by its own second moments, and momentum comes after the exchange.

Compressing gradients for AdamW costs quality, because the second moments of sparse means are wrong, and dividing after the exchange
enlarges what was dropped. Here each rank sends steps instead, learning rate included:

    v      = beta2 v + (1 - beta2) g^2                     own second moments of the own gradient g
    x      = rate g / (sqrt(ratio v / (1 - beta2^t)) + eps)
    mean   = scheme.reduce(x)                              what is not sent stays in the residual
    m      = beta1 m + (1 - beta1) mean                    momentum, the same on all ranks
    A      = (1 - rate * weight_decay) A - m / (1 - beta1^t)
    W      = A - keep * unsent                             own weights, at which the next gradient is taken

ratio: of the squares of the mean gradient to those of the own one, for a rank's own gradient holds P times the variance of the mean one,
and without the ratio steps are too short. With one rank it is 1. Else it is estimated for each block of adjacent elements, from sums of
the gradient with random signs: linear, so the mean of the ranks' sums is the sum of the mean gradient, and its expected square is the
square norm of the block (AMS sketches, Alon, Matias and Szegedy 1996).

Differs from AdamW, also with one rank or where all ranks send all: each gradient is divided by the second moments, and multiplied by the
rate, of its own step, where AdamW divides and multiplies the momentum by those of the last one. With beta1 = 0 there is no difference.
Frozen second moments with a compressed momentum are 1-bit Adam's (arXiv 2102.02888); the estimated ratio and own weights are ours.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam

from sparsync import kernels
from sparsync.base.scheme import Scheme, overflowed
from sparsync.comm.group import ConnectionLostError, GroupComm
from sparsync.core import Bucket, Comm, Report, Span, generator
from sparsync.feedback import state_from
from sparsync.integrations.findings import given_or_default
from sparsync.integrations.handle import Handle
from sparsync.integrations.local_steps_checks import (
    check_model,
    check_own_steps,
    check_trained,
    compare,
    fingerprint_of,
)
from sparsync.integrations.local_steps_weights import (
    WeightBucket,
    buckets_of,
    common_in_model,
    copy_from_first,
    sent_and_drift,
)
from sparsync.integrations.parameter_names import named_parameters
from sparsync.integrations.residual_units import ResidualRescaler
from sparsync.schemes.dense import Dense

_FIRST = 8  # steps that all measure the ratio
_COUNTS = ("applied", "seen", "measured", "measure_until")  # of _Progress, in its order
_MEMORY = 0.98  # of older measurements, from one to the next
_SIGNS = 256  # blocks with signs of their own; then the same ones again
_SAME = ("betas", "eps")  # of all parameter groups


@dataclass
class Moments:
    """The state of one bucket. Elements are filled up to whole blocks."""

    n: int
    momentum: Tensor  # [n] the same on all ranks
    square: Tensor  # [blocks, block] own second moments
    of_mean: Tensor  # [blocks] square norms of the mean gradient's blocks, older ones with less weight
    of_own: Tensor  # [blocks] the same of the own gradient

    @classmethod
    def zeros(cls, common: Tensor, block: int) -> "Moments":
        blocks = -(-common.numel() // block)
        square = common.new_zeros(blocks, block)
        return cls(common.numel(), torch.zeros_like(common), square, square.new_zeros(blocks), square.new_zeros(blocks))

    def flat(self, blocks: Tensor) -> Tensor:
        """Return the elements of [blocks, block] without those filled up, [n], a view."""
        return blocks.view(-1)[: self.n]

    def ratio(self, P: int) -> Tensor:
        """Return the share of the own squares that the mean gradient has, [blocks]; 1 for blocks that were zero whenever measured.

        For gradients without a mean it is 1/P; half of that is the least, for the measurement is noisy.
        """
        return (self.of_mean / self.of_own).nan_to_num_(1.0).clamp_(0.5 / P, 1.0)


@dataclass
class _Progress:
    applied: int = 0  # steps that moved the weights
    seen: int = 0  # own gradients in the second moments
    measured: int = 0  # times the ratio was measured
    measure_until: int = _FIRST  # steps below this number all measure
    totals: dict[str, int] = field(default_factory=lambda: {"skipped": 0, "bytes_sent": 0})


class AdamWSteps(Handle):
    """Take the steps of `optimizer`, an AdamW, for `model` on all ranks, and exchange them with `scheme`.

    `optimizer`: a torch.optim.AdamW of all trained parameters, or an Adam without weight decay. Rates, betas, eps and weight decay are
    read from it in each step, so schedules work as ever. Its own `step` raises from here on, and its state is not used. Betas and eps
    are those of all its groups.
    `keep`, in [0, 1]: the part of what a rank has not sent that stays in its own weights.
    `block`: adjacent elements with one ratio. `measure_every`: steps between two measurements of it, which send 2 bytes a block, like an
    all-reduce; the first 8 steps all measure.
    `bucket_mb`: megabytes of a bucket. A rank that waits longer than `timeout_s` seconds for the others gives up. `comm`: a communicator
    to be used in place of `group`, such as that of a `LocalWorld`.

    Without `scheme` it is that of the environment variable SPARSYNC_SCHEME, or `Dense()`, as for `sparsync.attach`.

    The model is not wrapped: `loss.backward(); steps.clip_grad_norm_(1.0); steps.step(); schedule.step()`. Parameters and buffers of rank
    0 are copied to all ranks here; later each rank has buffers of its own. Weights are float32, or float64 for float64 parameters; own
    ones are rounded to 16 bits where the parameters have so many.
    Collective over the ranks of `group`: make it on all of them, with the same settings, each with an instance of the scheme.
    Memory, in vectors of all trained parameters: common weights, momentum, second moments, and the state of the scheme; during a step the
    gradient once more, and its largest bucket twice.
    Raises TypeError for a wrapped model, another optimizer and anything but a Scheme, ValueError for settings out of range and where model
    and optimizer have other trained parameters, RuntimeError when a rank is missing, or has other settings or other parameters.
    """

    replaces_optimizer = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Adam,
        scheme: Scheme | None = None,
        *,
        keep: float = 0.35,
        block: int = 64,
        measure_every: int = 8,
        bucket_mb: float = 25.0,
        group: dist.ProcessGroup | None = None,
        comm: Comm | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        scheme = given_or_default(scheme)
        check_own_steps(scheme)
        check_model(model)
        _check_optimizer(optimizer)
        _check_settings(keep, block, measure_every, bucket_mb)
        trained = {name: each for name, each in named_parameters(model) if each.requires_grad}
        group_of = _group_of(optimizer, trained)
        settings = {"keep": keep, "block": block, "measure_every": measure_every, "bucket_mb": bucket_mb}
        settings |= {key: _values(optimizer, key) for key in (*_SAME, "lr", "weight_decay")}
        fingerprint = fingerprint_of("AdamWSteps", model, scheme, settings)
        if comm is None:
            comm = GroupComm.private(group, timeout_s, fingerprint)
        else:
            compare(fingerprint, comm, next(iter(trained.values())).device)
        super().__init__(scheme, comm, ResidualRescaler(scheme, {}))
        copy_from_first(model, comm)
        self.model, self.optimizer = model, optimizer
        self.keep, self.block, self.measure_every = keep, block, measure_every
        self._comm, self._measure = comm, Dense.bf16()
        self._trained = list(trained.values())
        self._buckets = buckets_of(trained, bucket_mb)
        self._groups = [_groups_in(each, group_of) for each in self._buckets]
        self._moments = [Moments.zeros(each.common, block) for each in self._buckets]
        self._progress = _Progress()
        self._averaging = False  # `averaged` has the common weights in the model
        _forbid_step(optimizer, self)

    @torch.no_grad()
    def step(self) -> list[Report]:
        """Take one step with the gradients of all ranks, and return the reports: of the ratio, if it is due, and of each bucket.

        Call it on every rank. A parameter without a gradient counts as zero.
        Where a rank's gradient holds NaN or Inf, or is too long for its square norm to be finite, all ranks skip the step: common weights,
        momentum and the ratio stay as they are, and what was sent returns to the residuals. Second moments of ranks whose own gradient
        is finite may have taken it in.
        Where it raises, the other ranks' calls raise too, what was sent returns to the residuals, and the next step starts on fresh
        connections. Where ranks cannot agree any more on what was applied, or an error came while the mean was applied, that one raises as
        well: continue from a checkpoint.
        """
        self._check_own()
        check_trained(self.model, self._trained, "AdamWSteps")
        # A failed step counts, for it may have failed on some ranks only.
        self._step += 1
        # torch's schedules warn where the optimizer they belong to has not stepped.
        self.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        try:
            reports, means = self._exchanged()
        except BaseException as error:
            others = self._connection.close(error)
            if isinstance(error, ConnectionLostError):
                error.args = (f"{error}{others}",)
            raise
        finally:
            self._connection.end_step()
        self._reports += reports
        totals = self._progress.totals
        totals["bytes_sent"] += sum((report.sent or report.cost).nbytes for report in reports)
        totals["skipped"] += means is None
        try:
            if means is not None:
                self._apply(means)
            for bucket in self._buckets:
                self._write_own(bucket)  # after a skipped step too, for its residual may have changed
        except BaseException as error:
            self._connection.close_partly_applied(error)
            raise
        return reports

    def clip_grad_norm_(self, max_norm: float, **options: Any) -> Tensor:  # Any: those of torch's function of this name
        """Clip this rank's own gradient at `clip_factor * max_norm`, and return its norm before.

        `max_norm` is what one would clip the mean gradient at.
        """
        return nn.utils.clip_grad_norm_(self._trained, self.clip_factor * max_norm, **options)

    @property
    def clip_factor(self) -> float:
        """How much longer this rank's gradient is than the mean one, as last measured: in [1, sqrt(P)], and 1 before."""
        own = sum(float(each.of_own.sum()) for each in self._moments)
        mean = sum(float(each.of_mean.sum()) for each in self._moments)
        P = self._comm.size
        return min(P, max(1.0, own / mean)) ** 0.5 if mean > 0 else 1.0

    def exchange(self) -> list[Report]:
        """Return no report: every step is exchanged when it is taken."""
        return []

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the common weights in the model, the same bits on all ranks: to evaluate it, or to save it. Own ones are back afterwards.

        Buffers are this rank's own before, inside and after. Nothing is sent, so one rank may do it alone.
        """
        self._check_own()
        self._averaging = True
        try:
            with common_in_model(self._buckets):
                yield
        finally:
            self._averaging = False

    def stats(self) -> dict[str, int | float]:
        """Return how many `steps` were taken and `skipped`, `bytes_sent` by this rank, `bits`, `drift` and `clip_factor`.

        `bits` are those sent for each trained parameter and step; `drift` is the distance of this rank's own weights from the common ones.
        """
        steps, totals = self._step + 1, self._progress.totals
        more = sent_and_drift(self._buckets, totals["bytes_sent"], steps)
        return {"steps": steps, **totals, **more, "clip_factor": self.clip_factor}

    def state_dict(self) -> dict[str, Any]:  # Any: as Handle
        """Return this rank's state: common weights, momentum, own second moments, buffers, the ratio and the scheme's. Save each rank's."""
        self._check_own()
        common, momentum, square = {}, {}, {}
        for bucket, moments in zip(self._buckets, self._moments, strict=True):
            common |= bucket.by_name(bucket.common)
            momentum |= bucket.by_name(moments.momentum)
            square |= bucket.by_name(moments.flat(moments.square))
        progress = self._progress
        return {
            **super().state_dict(),
            "adamw_steps": {
                "common": common,
                "momentum": momentum,
                "square": square,
                "ratio": {
                    bucket.key: {"block": self.block, "mean": moments.of_mean.clone(), "own": moments.of_own.clone()}
                    for bucket, moments in zip(self._buckets, self._moments, strict=True)
                },
                "buffers": {name: each.detach().clone() for name, each in self.model.named_buffers()},
                "applied": progress.applied,
                "seen": progress.seen,
                "measured": progress.measured,
                "measure_until": progress.measure_until,
                "totals": dict(progress.totals),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; the optimizer, for its rates, is restored by its own. See Handle.

        The ratio is measured anew, in each of the next 8 steps, where buckets, blocks or the number of ranks have changed.
        """
        self._check_own()
        super().load_state_dict(state)

    def _check(self, state: Mapping[str, Any]) -> None:
        own = state_from(state, "adamw_steps", "AdamWSteps")
        for key in ("ratio", "buffers", "totals", *_COUNTS):
            state_from(own, key, "AdamWSteps")
        for key in ("common", "momentum", "square"):
            values = state_from(own, key, "AdamWSteps")
            if not all(kernels.all_finite(bucket.from_names(values)) for bucket in self._buckets):
                raise ValueError(f"the {key} of this state holds NaN or Inf; load an older one")

    def _load(self, state: Mapping[str, Any]) -> None:
        saved = state["adamw_steps"]
        vectors = [
            [bucket.from_names(saved[key]) for key in ("common", "momentum", "square")] for bucket in self._buckets
        ]
        super()._load(state)
        self._progress = _Progress(*(saved[key] for key in _COUNTS), totals=dict(saved["totals"]))
        for bucket, moments, (common, momentum, square) in zip(self._buckets, self._moments, vectors, strict=True):
            bucket.common.copy_(common)
            moments.momentum.copy_(momentum)
            moments.flat(moments.square).copy_(square)
        self._restore_ratio(saved["ratio"])
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in saved["buffers"]:
                    buffer.copy_(saved["buffers"][name])
            for bucket in self._buckets:
                self._write_own(bucket)

    def _restore_ratio(self, saved: Mapping[str, Any]) -> None:  # Any: numbers and tensors
        known = [saved.get(bucket.key, {"block": None}) for bucket in self._buckets]
        fits = all(
            ratio["block"] == self.block and ratio["mean"].shape == moments.of_mean.shape
            for ratio, moments in zip(known, self._moments, strict=True)
        )
        if not fits:
            self._progress.measured, self._progress.measure_until = 0, self._step + 1 + _FIRST
        for ratio, moments in zip(known, self._moments, strict=True):
            moments.of_mean.copy_(ratio["mean"]) if fits else moments.of_mean.zero_()
            moments.of_own.copy_(ratio["own"]) if fits else moments.of_own.zero_()

    def _gradient(self, bucket: WeightBucket, moments: Moments) -> Tensor:
        """Return this rank's gradient, [blocks, block]."""
        blocks = torch.empty_like(moments.square)
        blocks.view(-1)[moments.n :].zero_()
        for entry, parameter in zip(bucket.layout, bucket.parameters.values(), strict=True):
            part = entry.span.of(moments.flat(blocks)).view(parameter.shape)
            part.zero_() if parameter.grad is None else part.copy_(parameter.grad.to_dense())
        return blocks

    def _exchanged(self) -> tuple[list[Report], list[Tensor] | None]:
        """Return the reports and the mean step of each bucket; None where the step is to be skipped, on all ranks alike."""
        gradients = list(map(self._gradient, self._buckets, self._moments))
        # A host sync. False also where squares overflow, which would stay in the second moments for ever.
        finite = all(bool(each.view(-1).dot(each.view(-1)).isfinite()) for each in gradients)
        reports: list[Report] = []
        # By step numbers only, which agree after a failure too.
        due = self._step < self._progress.measure_until or self._step % self.measure_every == 0
        if due and self._comm.size > 1:
            reports.append(self._measured(gradients, finite))
            if reports[0].details["overflow"]:
                return reports, None
        self._make_steps_(gradients, finite)
        sent: list[Bucket] = []
        skipped = False
        try:
            for bucket, moments, blocks in zip(self._buckets, self._moments, gradients, strict=True):
                mean = bucket.bucket(moments.flat(blocks), self._step)
                reports.append(self._connection.reduce(mean, self.scheme))
                sent.append(mean)
                skipped |= overflowed(reports[-1], mean.grad)
        except BaseException:
            # After an overflow it has returned already, see Rollback.
            for each in sent if self.scheme.has_residual and not skipped else ():
                self.scheme.rollback(each)
            raise
        return reports, None if skipped else [each.grad for each in sent]

    def _make_steps_(self, gradients: Sequence[Tensor], finite: bool) -> None:
        """Write x for g, after the own second moments have taken in g; NaN where g is not finite."""
        _, beta2, eps = self._betas_and_eps()
        rates = _values(self.optimizer, "lr")
        self._progress.seen += finite
        for moments, groups, blocks in zip(self._moments, self._groups, gradients, strict=True):
            if not finite:
                blocks.fill_(torch.nan)
                continue
            moments.square.mul_(beta2).addcmul_(blocks, blocks, value=1 - beta2)
            corrected = moments.ratio(self._comm.size) / (1 - beta2**self._progress.seen)
            blocks.div_((moments.square * corrected[:, None]).sqrt_().add_(eps))
            _scale_(moments.flat(blocks), groups, rates)

    def _measured(self, gradients: Sequence[Tensor], finite: bool) -> Report:
        """Measure the ratio; the report says whether NaN or Inf were found on any rank, in which case nothing has changed."""
        progress, signed = self._progress, []
        for bucket, blocks in zip(self._buckets, gradients, strict=True):
            signs = torch.randint(0, 2, (_SIGNS, self.block), generator=generator(0, f"ratio/{bucket.key}", self._step))
            signs = (2 * signs - 1).to(blocks)
            # A last row of signs is cut, and so is what it is multiplied with.
            parts = [(part * signs[: len(part)]).sum(1) for part in blocks.split(_SIGNS)]
            signed.append(torch.cat(parts).to(gradients[0].device))
        sums = torch.cat(signed)
        if not finite:
            sums.fill_(torch.nan)
        report = self._connection.reduce(Bucket("ratio", sums, self._step), self._measure)
        of_mean = sums.square()
        overflow = not kernels.all_finite(of_mean)
        if not overflow:
            progress.measured += 1
            weight = max(1 - _MEMORY, 1 / progress.measured)
            parts = of_mean.split([len(each) for each in gradients])
            for moments, mean, blocks in zip(self._moments, parts, gradients, strict=True):
                moments.of_mean.lerp_(mean.to(moments.of_mean), weight)
                moments.of_own.lerp_(torch.linalg.vector_norm(blocks, dim=1).square_(), weight)
        return replace(report, details={**report.details, "overflow": overflow})

    def _apply(self, means: Sequence[Tensor]) -> None:
        """Take the mean steps into the momentum, and that into the common weights."""
        self._progress.applied += 1
        beta1, _, _ = self._betas_and_eps()
        rates, decays = _values(self.optimizer, "lr"), _values(self.optimizer, "weight_decay")
        shrinks = [1 - rate * decay for rate, decay in zip(rates, decays, strict=True)]
        for bucket, moments, groups, mean in zip(self._buckets, self._moments, self._groups, means, strict=True):
            moments.momentum.lerp_(mean, 1 - beta1)
            _scale_(bucket.common, groups, shrinks)
            bucket.common.sub_(moments.momentum, alpha=1 / (1 - beta1**self._progress.applied))

    def _write_own(self, bucket: WeightBucket) -> None:
        unsent = self.scheme.unsent(bucket.bucket(bucket.common, 0), self._comm) if self.keep else None
        weights = bucket.common if unsent is None else bucket.common.sub(unsent.to(bucket.dtype), alpha=self.keep)
        bucket.write(weights)

    def _betas_and_eps(self) -> tuple[float, float, float]:
        group = self.optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        return float(beta1), float(beta2), float(group["eps"])

    def _check_own(self) -> None:
        if self._averaging:
            raise RuntimeError("the common weights are in the model; leave `with steps.averaged()` first")


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Adam):
        raise TypeError(
            f"AdamWSteps takes the settings of a torch.optim.AdamW or Adam, got {type(optimizer).__name__}; for others there is LocalSteps"
        )
    first = optimizer.param_groups[0]
    for group in optimizer.param_groups:
        if group.get("amsgrad") or group.get("maximize"):
            raise ValueError("AdamWSteps has neither amsgrad nor maximize; make the optimizer without")
        if group["weight_decay"] and not group.get("decoupled_weight_decay"):
            raise ValueError(
                "AdamWSteps decays weights as AdamW does, and this Adam decays gradients; use torch.optim.AdamW"
            )
        if not group["eps"] > 0:
            raise ValueError(f"eps must be above 0, or elements without gradient become 0 / 0, got {group['eps']}")
        for key in _SAME:
            if group[key] != first[key]:
                raise ValueError(f"all parameter groups must have the same {key}, got {first[key]} and {group[key]}")


def _group_of(optimizer: Adam, trained: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Return the number of each trained parameter's group, by name. Raises ValueError where optimizer and model have other parameters."""
    by_id = {id(each): i for i, group in enumerate(optimizer.param_groups) for each in group["params"]}
    if missing := [name for name, each in trained.items() if id(each) not in by_id]:
        raise ValueError(f"the optimizer lacks {', '.join(missing)}; pass it all trained parameters, or freeze these")
    known = {id(each) for each in trained.values()}
    if more := [each for group in optimizer.param_groups for each in group["params"] if id(each) not in known]:
        shapes = [tuple(each.shape) for each in more if each.requires_grad]
        if shapes:
            raise ValueError(
                f"the optimizer has parameters that the model lacks, of shapes {shapes}; pass the whole model"
            )
    return {name: by_id[id(each)] for name, each in trained.items()}


def _groups_in(bucket: WeightBucket, group_of: Mapping[str, int]) -> list[tuple[Span, int]]:
    """Return the spans of a bucket's elements that are of one parameter group, and its number; adjacent ones of one group together."""
    found: list[tuple[Span, int]] = []
    for entry in bucket.layout:
        number, start = group_of[entry.name], entry.span.start
        if found and found[-1][1] == number:
            start = found.pop()[0].start
        found.append((Span(start, entry.span.stop), number))
    return found


def _scale_(flat: Tensor, groups: Sequence[tuple[Span, int]], factors: Sequence[float]) -> None:
    """Multiply each element of `flat` [n] by the factor of its parameter group."""
    for span, number in groups:
        if factors[number] != 1.0:
            span.of(flat).mul_(factors[number])


def _values(optimizer: Adam, key: str) -> list[Any]:  # Any: of a parameter group
    """Return a setting of each parameter group, as a number where it is a tensor with one."""
    found = [group[key] for group in optimizer.param_groups]
    return [float(each) if isinstance(each, Tensor) else each for each in found]


def _forbid_step(optimizer: Adam, steps: AdamWSteps) -> None:
    """Have `optimizer.step` raise RuntimeError as long as there is `steps`."""
    owner = weakref.ref(steps)

    def refuse(*_: object) -> None:
        if owner() is not None:
            raise RuntimeError(
                "AdamWSteps takes the steps of this optimizer; call steps.step() in place of optimizer.step(). With a GradScaler: "
                "scaler.unscale_(optimizer), steps.step(), scaler.update()"
            )

    optimizer.register_step_pre_hook(refuse)


def _check_settings(keep: float, block: int, measure_every: int, bucket_mb: float) -> None:
    if not 0 <= keep <= 1:
        raise ValueError(
            f"keep must be in [0, 1], the part of what is not sent that stays in a rank's weights, got {keep}"
        )
    if block < 1:
        raise ValueError(f"block must be at least 1 element, got {block}")
    if measure_every < 1:
        raise ValueError(f"measure_every must be at least 1 step, got {measure_every}")
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb must be above 0 megabytes, got {bucket_mb}")

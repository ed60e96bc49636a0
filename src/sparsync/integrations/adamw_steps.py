"""AdamW whose exchange is compressed: each rank divides its own gradient by its own second moments, and momentum comes after the exchange.

Compressing gradients for AdamW costs quality, because the second moments of sparse means are wrong, and dividing after the exchange
enlarges what was dropped. Here each rank sends steps instead, learning rate included:

    v      = beta2 v + (1 - beta2) g^2                     own second moments of the own gradient g
    x      = rate * g / (sqrt(v * ratio) + eps)            ratio: of the squares of the mean gradient to those of the own one
    mean   = scheme.reduce(x)                              what is not sent stays in the residual
    m      = beta1 m + (1 - beta1) mean                    momentum, the same on all ranks
    A      = (1 - rate * weight_decay) A - m / (1 - beta1^t)
    W      = A - keep * unsent                             own weights, at which the next gradient is taken

With all P ranks sending everything, and the ratio known, A moves as AdamW's weights do. Without the ratio steps are too short: a rank's
own gradient holds P times the variance of the mean one. The ratio is estimated for each block of adjacent elements, from sums of the
gradient with random signs, one for each block: linear, so the mean of the ranks' sums is the sum of the mean gradient, and its expected
square is the square norm of the block (AMS sketches, Alon, Matias and Szegedy 1996).

Frozen second moments with a compressed momentum are 1-bit Adam's (arXiv 2102.02888); the estimated ratio and own weights are ours.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Adam

from sparsync import kernels
from sparsync.base.scheme import Scheme
from sparsync.comm.group import ConnectionLostError, GroupComm
from sparsync.core import Bucket, Comm, Report, generator
from sparsync.feedback import state_from
from sparsync.integrations.findings import check_scheme
from sparsync.integrations.handle import Handle
from sparsync.integrations.local_steps_checks import check_model, compare, fingerprint_of
from sparsync.integrations.local_steps_weights import WeightBucket, buckets_of, copy_from_first
from sparsync.integrations.residual_units import ResidualRescaler
from sparsync.schemes.dense import Dense

_FIRST = 8  # steps that all measure the ratio
_MEMORY = 0.98  # of older measurements, from one to the next
_SIGNS = 256  # blocks with signs of their own; then the same ones again
_SAME = ("betas", "eps")  # of all parameter groups


@dataclass
class Moments:
    """The state of one bucket: what is common to all ranks, and what is a rank's own. Elements are filled up to whole blocks."""

    n: int
    momentum: Tensor  # [n] common
    square: Tensor  # [blocks, block] own second moments
    of_mean: Tensor  # [blocks] mean squares of the mean gradient's blocks, older ones with less weight; common
    of_own: Tensor  # [blocks] the same of the own gradient

    @classmethod
    def zeros(cls, common: Tensor, block: int) -> "Moments":
        blocks = -(-common.numel() // block)
        square = common.new_zeros(blocks, block)
        return cls(common.numel(), torch.zeros_like(common), square, square.new_zeros(blocks), square.new_zeros(blocks))

    def in_blocks(self, x: Tensor) -> Tensor:
        """Return `x` [n] as [blocks, block]; a view where no element is missing."""
        return pad(x, (0, self.square.numel() - self.n)).view_as(self.square)

    def flat(self, x: Tensor) -> Tensor:
        """Return the inverse of `in_blocks`, a view."""
        return x.view(-1)[: self.n]

    def ratio(self, P: int) -> Tensor:
        """Return the share of the own squares that the mean gradient has, [blocks]; it is at least 1/P for gradients without a mean."""
        return (self.of_mean / (self.of_own + torch.finfo(self.of_own.dtype).tiny)).clamp_(0.5 / P, 1.0)


@dataclass
class _Progress:
    applied: int = 0  # steps that moved the weights
    seen: int = 0  # own gradients in the second moments
    measured: int = 0  # times the ratio was measured
    totals: dict[str, int] = field(default_factory=lambda: {"skipped": 0, "bytes_sent": 0})


class AdamWSteps(Handle):
    """Take the steps of `optimizer`, an AdamW, for `model` on all ranks, and exchange them with `scheme`.

    `optimizer`: a torch.optim.AdamW of all trained parameters, or an Adam without weight decay. Rates, betas, eps and weight decay are
    read from it in each step, so schedules work as ever; its own `step` is not called. Betas and eps are those of all its groups.
    `keep`, in [0, 1]: the part of what a rank has not sent that stays in its own weights.
    `block`: adjacent elements with one ratio. `measure_every`: steps between two measurements of it, which send 2 bytes a block, like an
    all-reduce; the first 8 steps all measure.
    `bucket_mb`: megabytes of a bucket. A rank that waits longer than `timeout_s` seconds for the others gives up. `comm`: a communicator
    to be used in place of `group`, such as that of a `LocalWorld`.

    The model is not wrapped: `loss.backward(); steps.clip_grad_norm_(1.0); steps.step(); schedule.step()`. Parameters and buffers of rank
    0 are copied to all ranks here; later each rank has buffers of its own. Weights are float32, or float64 for float64 parameters.
    Collective over the ranks of `group`: make it on all of them, with the same settings, each with an instance of the scheme.
    Memory, in vectors of all trained parameters: common weights, momentum, second moments, and the state of the scheme.
    Raises TypeError for a wrapped model, another optimizer and anything but a Scheme, ValueError for settings out of range and for trained
    parameters that the optimizer lacks, RuntimeError when a rank is missing, or has other settings or other parameters.
    """

    scheme: Scheme
    replaces_optimizer = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Adam,
        scheme: Scheme,
        *,
        keep: float = 0.25,
        block: int = 64,
        measure_every: int = 8,
        bucket_mb: float = 25.0,
        group: dist.ProcessGroup | None = None,
        comm: Comm | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        check_scheme(scheme)
        check_model(model)
        _check_optimizer(optimizer)
        _check_settings(keep, block, measure_every, bucket_mb)
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._group_of = {id(each): i for i, group in enumerate(optimizer.param_groups) for each in group["params"]}
        if missing := [name for name, each in trained.items() if id(each) not in self._group_of]:
            raise ValueError(
                f"the optimizer lacks {', '.join(missing)}; pass it all trained parameters, or freeze these"
            )
        settings = {"keep": keep, "block": block, "measure_every": measure_every, "bucket_mb": bucket_mb}
        settings |= {key: optimizer.param_groups[0][key] for key in _SAME}
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
        self._moments = [Moments.zeros(each.common, block) for each in self._buckets]
        self._progress = _Progress()
        self._own_weights: list[Tensor] | None = None  # while `averaged` has the common ones in the model

    @torch.no_grad()
    def step(self) -> list[Report]:
        """Take one step with the gradients of all ranks, and return the reports: of the ratio, if it is due, and of each bucket.

        Call it on every rank. A parameter without a gradient counts as zero. Where any rank's gradient holds NaN or Inf, no rank's weights
        change and what was sent returns to the residuals.
        Where it raises, the other ranks' calls raise too, and the next ones start on fresh connections.
        """
        self._check_own()
        # A failed step counts, for it may have failed on some ranks only.
        self._step += 1
        # torch's schedules warn where the optimizer they belong to has not stepped.
        self.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        try:
            reports, means = self._exchanged([self._gradient(each) for each in self._buckets])
        except BaseException as error:
            others = self._connection.close(error)
            if isinstance(error, ConnectionLostError):
                error.args = (f"{error}{others}",)
            raise
        finally:
            self._connection.end_step()
        self._reports += reports
        self._progress.totals["bytes_sent"] += sum((report.sent or report.cost).nbytes for report in reports)
        if means is None:
            self._progress.totals["skipped"] += 1
        else:
            self._apply(means)
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
        """Have the common weights in the model, the same bits on all ranks: to evaluate it, or to save it. Own ones are back afterwards."""
        self._check_own()
        self._own_weights = [each.detach().clone() for each in self._trained]
        try:
            for bucket in self._buckets:
                bucket.write(bucket.common)
            yield
        finally:
            for each, own in zip(self._trained, self._own_weights, strict=True):
                each.detach().copy_(own)
            self._own_weights = None

    def stats(self) -> dict[str, int | float]:
        """Return how many `steps` were taken and `skipped`, `bytes_sent` by this rank, `bits`, `drift` and `clip_factor`.

        `bits` are those sent for each trained parameter and step; `drift` is the distance of this rank's own weights from the common ones.
        """
        elements, steps, totals = sum(each.numel() for each in self._trained), self._step + 1, self._progress.totals
        bits = 8 * totals["bytes_sent"] / (elements * steps) if steps else 0.0
        distances = [(each.own() - each.common).double().square().sum() for each in self._buckets]
        drift = float(torch.stack(distances).sum().sqrt())
        return {"steps": steps, **totals, "bits": bits, "drift": drift, "clip_factor": self.clip_factor}

    def state_dict(self) -> dict[str, Any]:  # Any: as Handle
        """Return this rank's state: common weights, momentum, own second moments, the ratio and the scheme's. Save each rank's."""
        self._check_own()
        common, momentum, square = {}, {}, {}
        for bucket, moments in zip(self._buckets, self._moments, strict=True):
            common |= bucket.by_name(bucket.common)
            momentum |= bucket.by_name(moments.momentum)
            square |= bucket.by_name(moments.flat(moments.square))
        progress = self._progress
        ratio = {
            bucket.key: {"block": self.block, "mean": moments.of_mean.clone(), "own": moments.of_own.clone()}
            for bucket, moments in zip(self._buckets, self._moments, strict=True)
        }
        counts = {"applied": progress.applied, "seen": progress.seen, "measured": progress.measured}
        own = {"common": common, "momentum": momentum, "square": square, "ratio": ratio, **counts}
        return {**super().state_dict(), "adamw_steps": {**own, "totals": dict(progress.totals)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; the optimizer, for its rates, is restored by its own. See Handle.

        The ratio is measured again where buckets or blocks have changed.
        """
        self._check_own()
        own = state_from(state, "adamw_steps", "AdamWSteps")
        keys = ("common", "momentum", "square", "ratio", "applied", "seen", "measured", "totals")
        saved = {key: state_from(own, key, "AdamWSteps") for key in keys}
        vectors = [
            [bucket.from_names(saved[key]) for key in ("common", "momentum", "square")] for bucket in self._buckets
        ]
        super().load_state_dict(state)
        self._progress = _Progress(saved["applied"], saved["seen"], saved["measured"], dict(saved["totals"]))
        for bucket, moments, (common, momentum, square) in zip(self._buckets, self._moments, vectors, strict=True):
            bucket.common.copy_(common)
            moments.momentum.copy_(momentum)
            moments.flat(moments.square).copy_(square)
            ratio = saved["ratio"].get(bucket.key)
            if ratio is None or ratio["block"] != self.block or ratio["mean"].shape != moments.of_mean.shape:
                self._progress.measured = 0
            else:
                moments.of_mean.copy_(ratio["mean"])
                moments.of_own.copy_(ratio["own"])
            with torch.no_grad():
                self._write_own(bucket)

    def _gradient(self, bucket: WeightBucket) -> Tensor:
        parts = [
            torch.zeros(each.numel(), dtype=bucket.dtype, device=bucket.common.device)
            if each.grad is None
            else each.grad.to_dense().flatten().to(bucket.dtype)
            for each in bucket.parameters.values()
        ]
        return torch.cat(parts)

    def _exchanged(self, gradients: list[Tensor]) -> tuple[list[Report], list[Tensor] | None]:
        """Return the reports and the mean step of each bucket; None where NaN or Inf were found anywhere."""
        progress, finite = self._progress, all(map(kernels.all_finite, gradients))
        reports: list[Report] = []
        if progress.measured < _FIRST or self._step % self.measure_every == 0:
            measured = self._measured(gradients)
            reports.append(measured)
            if measured.details["overflow"]:
                return reports, None
        progress.seen += finite
        rates = self._values("lr")
        means = []
        for bucket, moments, gradient in zip(self._buckets, self._moments, gradients, strict=True):
            change = self._change(moments, gradient, finite)
            change *= self._of(bucket, rates)
            report = self._connection.reduce(bucket.bucket(change, self._step), self.scheme)
            reports.append(report)
            means.append(change)
        skipped = any(report.details.get("overflow") for report in reports)
        return reports, None if skipped else means

    def _change(self, moments: Moments, gradient: Tensor, finite: bool) -> Tensor:
        """Return g / (sqrt(v * ratio) + eps), [n], after the own second moments have taken in g; NaN where g is not finite."""
        if not finite:
            return torch.full_like(gradient, torch.nan)
        (_, beta2), eps = self._values("betas")[0], self._values("eps")[0]
        blocks = moments.in_blocks(gradient)
        moments.square.mul_(beta2).addcmul_(blocks, blocks, value=1 - beta2)
        corrected = moments.ratio(self._comm.size) / (1 - beta2**self._progress.seen)
        divisor = (moments.square * corrected[:, None]).sqrt_().add_(eps)
        return moments.flat(torch.div(blocks, divisor, out=divisor)).clone()

    def _measured(self, gradients: list[Tensor]) -> Report:
        """Measure the ratio; the report says whether NaN or Inf were found, in which case nothing has changed."""
        own, signed = [], []
        for bucket, moments, gradient in zip(self._buckets, self._moments, gradients, strict=True):
            blocks = moments.in_blocks(gradient)
            own.append(blocks.square().sum(1))
            signs = torch.randint(0, 2, (_SIGNS, self.block), generator=generator(0, f"ratio/{bucket.key}", self._step))
            signs = (2 * signs - 1).to(blocks)
            # A last row of signs is cut, and so is what it is multiplied with.
            signed += [(part * signs[: len(part)]).sum(1) for part in blocks.split(_SIGNS)]
        sums = torch.cat(signed)
        report = self._connection.reduce(Bucket("ratio", sums, self._step), self._measure)
        overflow = not kernels.all_finite(sums)
        if not overflow:
            self._progress.measured += 1
            weight = max(1 - _MEMORY, 1 / (self._progress.measured + 1))
            for moments, mean, square in zip(self._moments, sums.split([len(each) for each in own]), own, strict=True):
                moments.of_mean.lerp_(mean.square(), weight)
                moments.of_own.lerp_(square, weight)
        return _with_overflow(report, overflow)

    def _apply(self, means: list[Tensor]) -> None:
        self._progress.applied += 1
        beta1 = self._values("betas")[0][0]
        rates, decays = self._values("lr"), self._values("weight_decay")
        shrinks = [1 - rate * decay for rate, decay in zip(rates, decays, strict=True)]
        for bucket, moments, mean in zip(self._buckets, self._moments, means, strict=True):
            moments.momentum.lerp_(mean, 1 - beta1)
            bucket.common.mul_(self._of(bucket, shrinks))
            bucket.common.sub_(moments.momentum, alpha=1 / (1 - beta1**self._progress.applied))
            self._write_own(bucket)

    def _write_own(self, bucket: WeightBucket) -> None:
        unsent = self.scheme.unsent(bucket.bucket(bucket.common, 0), self._comm) if self.keep else None
        bucket.write(bucket.common if unsent is None else bucket.common - self.keep * unsent.to(bucket.dtype))

    def _values(self, key: str) -> list[Any]:  # Any: of a parameter group
        """Return the setting of each parameter group, as a number where it is one."""
        found = [group[key] for group in self.optimizer.param_groups]
        return [float(each) if isinstance(each, Tensor) else each for each in found]

    def _of(self, bucket: WeightBucket, by_group: list[float]) -> float | Tensor:
        """Return the number of each element's group, [n]; one number where all are equal."""
        if len(set(by_group)) == 1:
            return by_group[0]
        flat = torch.empty_like(bucket.common)
        for entry, parameter in zip(bucket.layout, bucket.parameters.values(), strict=True):
            entry.span.of(flat).fill_(by_group[self._group_of[id(parameter)]])
        return flat

    def _check_own(self) -> None:
        if self._own_weights is not None:
            raise RuntimeError("the common weights are in the model; leave `with steps.averaged()` first")


def _with_overflow(report: Report, overflow: bool) -> Report:
    return replace(report, details={**report.details, "overflow": overflow})


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Adam):
        raise TypeError(
            f"AdamWSteps takes the settings of a torch.optim.AdamW or Adam, got {type(optimizer).__name__}; for others there is LocalSteps"
        )
    for group in optimizer.param_groups:
        if group.get("amsgrad") or group.get("maximize"):
            raise ValueError("AdamWSteps has neither amsgrad nor maximize; make the optimizer without")
        if group["weight_decay"] and not group.get("decoupled_weight_decay"):
            raise ValueError(
                "AdamWSteps decays weights as AdamW does, and this Adam decays gradients; use torch.optim.AdamW"
            )
        for key in _SAME:
            if group[key] != optimizer.param_groups[0][key]:
                raise ValueError(
                    f"all parameter groups must have the same {key}, got {optimizer.param_groups[0][key]} and {group[key]}"
                )


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

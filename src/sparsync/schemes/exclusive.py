"""What MiCRO and ExDyna have in common: how a union of exclusive selections is summed, written, and taken out of the residual."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.collectives.union_all_reduce import mean_at, padding
from sparsync.core import Bucket, Comm, Cost, Detail, Report
from sparsync.feedback import Accumulated
from sparsync.phases import phase
from sparsync.selection.topk import check_density
from sparsync.wire.values import ValueCodec, Values, check_values

Rule = Literal["quotas", "threshold"]
NORMS_AND_BIASES = ("*bias", "*norm*", "*bn*", "*.ln_*")  # a few elements each, and many an update depends on them


@dataclass(frozen=True)
class Choice:
    """What all ranks chose together; every rank holds the same but `threshold`, `partition` and `cost`."""

    cost: Cost  # of agreeing on it, from this rank
    known: Tensor  # [known] positions that all ranks knew beforehand, int64
    chosen: Tensor  # [k_1 + k_2 + ...] positions chosen by the ranks, in rank order, int64
    counts: Sequence[int]  # k of each rank
    threshold: float = 0.0  # this rank chose nothing smaller
    details: dict[str, Detail] = field(default_factory=dict)


@dataclass(frozen=True)
class Poisoned:
    """Some rank's gradient holds NaN or Inf; all ranks know, and nothing was chosen."""

    cost: Cost


def reduce_choice(
    name: str, bucket: Bucket, total: Accumulated, choice: Choice, comm: Comm, values: Values = "float32"
) -> Report:
    """Writes the mean over ranks at the chosen positions to `bucket.grad`, zero elsewhere; everything else stays in the residual.

    What values lose on the wire, sent as `values`, goes to the residual too.
    Where the sum overflows, all ranks see it in the gradient, and the residual stays as it was: "overflow" in the details tells.
    """
    acc, residual, n = total.acc, total.residual, total.acc.numel()
    rounding = None if values == "float32" else ValueCodec(values)
    union = mean_at(acc, torch.cat([choice.known, choice.chosen]), bucket.grad.dtype, comm, rounding)
    mean = union.mean.to(bucket.grad.dtype)
    overflow = not kernels.all_finite(mean)  # a host sync; what all ranks received, so all decide alike
    with phase("apply"):
        if overflow:
            bucket.grad.zero_()
        else:
            total.keep(bucket)
            kernels.put_(residual, union.index, union.error)
        kernels.put_(bucket.grad, union.index, mean)
    details = {"threshold": choice.threshold, "padding": padding(choice.counts), "overflow": overflow}
    own = choice.counts[comm.rank] + choice.known.numel()
    return Report(
        name,
        bucket.key,
        bucket.step,
        n,
        own,
        union.index.numel(),
        choice.cost + union.cost,
        details=details | choice.details,
    )


def pass_on_poison(name: str, bucket: Bucket, poisoned: Poisoned) -> Report:
    """Fills the gradient with NaN, on every rank, so that a loss scaler skips this step; residuals stay as they were."""
    bucket.grad.fill_(torch.nan)
    return Report(name, bucket.key, bucket.step, bucket.grad.numel(), 0, 0, poisoned.cost, details={"overflow": True})


def empty_report(name: str, bucket: Bucket) -> Report:
    """Nothing to send for a bucket without elements; all ranks know."""
    return Report(name, bucket.key, bucket.step, 0, 0, 0, Cost())


def check_settings(
    density: float, refresh: float, dense: Sequence[str], rule: str, bug_compatible: bool, values: str
) -> None:
    """Raises ValueError where settings of MiCRO or ExDyna are out of range or contradict each other."""
    check_density(density)
    check_values(values)
    if not 0 <= refresh <= 1:
        raise ValueError(
            f"refresh must be in [0, 1], the share of the budget that goes round the vector, got {refresh}"
        )
    if isinstance(dense, str):
        raise ValueError(f"dense takes a list of parameter names or patterns, got the string {dense!r}")
    if rule not in get_args(Rule):
        raise ValueError(f"rule must be one of {', '.join(get_args(Rule))}, got {rule!r}")
    if rule == "threshold" and (refresh or dense):
        raise ValueError(
            f'the published rule "threshold" knows no refresh and no dense parameters, got refresh={refresh}, dense={tuple(dense)}; '
            "pass refresh=0, dense=(), or use published()"
        )
    if bug_compatible and rule != "threshold":
        raise ValueError('bug_compatible=True goes with rule="threshold"; use published(bug_compatible=True)')

"""Ok-Topk: a sparse all-reduce whose traffic does not grow with P, on top-k selections (Li and Hoefler, arXiv 2201.07598).

Every rank owns a region of the vector. It sends its largest elements to the owners of their regions, who add them up; the k largest
sums of all regions survive and are gathered. A rank clears what it contributed to a survivor and keeps everything else.

`OkTopk.published()` is the paper's algorithm, the line numbers are those of its text in `_published`. Differs from the paper there:
- The learning rate stays outside: the residual is in units of the gradient, and `rescale_residual` with old rate / new rate keeps
  rate * residual as it was, and the thresholds with it. Weights then move as in the paper, whose accumulator is rate * ours.
- What is level with a threshold is selected (the authors' code leaves it out, and so selects k-1); zeros never are.
- When thresholds are re-evaluated every sum has reached every rank already, so the survivors are not gathered a second time.
- A zero threshold, of fewer than k non-zeros, is re-evaluated at the next step. A step with NaN or Inf leaves no trace (see OkTopk).

The plain constructor differs more, so that traffic has a bound and nothing drifts:
- Selections are exact in every step. What threshold is kept says where to look first, so neither scale nor its changes matter.
- A rank's own region costs it nothing, so all of it counts, and the k (P-1)/P elements it may send are the largest outside of it.
- Which survive is told by a few magnitudes of each region (`selection.regions`): exactly k, about the k largest sums.
- Regions follow the survivors, whose positions all ranks know, at every step and without traffic.
- Survivors are balanced such that the most any rank sends is least, where the bound or `imbalance` asks for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.collectives import sparse_allreduce
from sparsync.comm.metered import all_gather_cost, all_reduce_cost
from sparsync.core import Bucket, Cost, Detail, Report, Span, Sparse
from sparsync.feedback import ErrorFeedback, Residuals, check_residuals, state_from
from sparsync.kernels import sparse_reference
from sparsync.protocols import Comm
from sparsync.schemes.base import Keeping
from sparsync.selection import regions
from sparsync.selection.topk import WARM, check_density, count_for
from sparsync.stations import station
from sparsync.wire import raw
from sparsync.wire.elements import Elements
from sparsync.wire.values import Values, check_values

Rule = Literal["exact", "paper", "code"]
SIZE_NBYTES = 4  # an int32: how many survivors a rank has, or POISONED
WORDS = 2  # of an element on the wire, at most: its position and its value


@dataclass
class _Control:
    """What one rank knows about one bucket besides its residual; the local threshold is its own, the rest the same on all ranks."""

    elements: int
    ranks: int
    boundaries: list[int]
    names: list[str]
    t: int = 0
    local_threshold: float | None = None  # None: to be evaluated
    global_threshold: float | None = None


@dataclass
class _State:
    feedback: ErrorFeedback = field(default_factory=ErrorFeedback)
    control: dict[str, _Control] = field(default_factory=dict)  # by bucket key


@dataclass(frozen=True)
class _Outcome:
    """One step: the means that are written, the same on all ranks, and what this rank no longer keeps, and still keeps, of them."""

    mean: Sparse  # [G]
    cleared: Tensor  # positions
    errors: Sequence[Sparse]  # what others did not learn of the cleared, and readers not of this rank's sums
    selected: int
    control: _Control
    cost: Cost
    details: dict[str, Detail]


@dataclass(frozen=True)
class OkTopk(Keeping):
    """The k = density * n largest sums over what each rank selected, divided by P; the rest stays in the residuals.

    The result has exactly min(k, non-zero sums) elements. In words of 4 bytes (a float32 value or a position), counts included, no rank
    sends more than 6k (P-1)/P in any step, whatever the gradients, as long as k (4P - 6) >= 9P (P-1): from k = 9 for 2 ranks, 20 for 8,
    578 for 256. Below that at most 9 (P-1) words more. `published()` has no such bound.
    Where any rank meets NaN or Inf, all ranks fill the gradient with NaN, so that a loss scaler finds it, and keep residual and
    thresholds as they were before this step.
    """

    density: float = 0.01  # k/n, of what a rank selects and of the result; the authors use 0.01 to 0.02
    rule: Rule = (
        "exact"  # "paper", "code": thresholds kept between re-evaluations, as they are or scaled as the authors do
    )
    imbalance: float = 1.2  # a region's survivors over the mean, at most, before some move to other ranks; paper: 4
    dense_steps: int = 0  # first steps that reduce everything; the authors' code: 512 (VGG), 128 (LSTM), none (BERT)
    threshold_steps: int = 32  # tau', "paper" and "code" only: steps between two re-evaluations of the thresholds
    region_steps: int = 64  # tau, "paper" and "code" only: steps between two divisions into regions
    values: Values = "float32"  # how values travel, "exact" only; what rounding takes away stays in the residuals
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds away
    _state: _State = field(default_factory=_State, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_density(self.density)
        check_values(self.values)
        check_residuals(self.residuals)
        self._state.feedback.precision = self.residuals
        if self.rule != "exact" and self.values != "float32":
            raise ValueError(f'the published rules send float32 values, got values={self.values!r}; use rule="exact"')
        if self.rule not in get_args(Rule):
            raise ValueError(f"rule must be one of {', '.join(get_args(Rule))}, got {self.rule!r}")
        if not self.imbalance >= 1:
            raise ValueError(f"imbalance must be at least 1, the largest share over the mean, got {self.imbalance}")
        for name, value, least in (
            ("dense_steps", self.dense_steps, 0),
            ("threshold_steps", self.threshold_steps, 1),
            ("region_steps", self.region_steps, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    @classmethod
    def published(
        cls,
        density: float = 0.02,
        threshold_steps: int = 32,
        region_steps: int = 64,
        dense_steps: int = 0,
        authors_code: bool = False,
    ) -> Self:
        """The paper's algorithm with the settings of its VGG-16 runs.

        `authors_code` scales the thresholds between re-evaluations and never balances, as the authors' code for VGG does.
        """
        rule, imbalance = ("code", float("inf")) if authors_code else ("paper", 4.0)
        return cls(density, rule, imbalance, dense_steps, threshold_steps, region_steps)

    @property
    def name(self) -> str:
        return "oktopk"

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        n, P = bucket.grad.numel(), comm.size
        control = self._control(bucket, P)
        if n == 0 or control.t < self.dense_steps:
            return self._dense(bucket, control, comm)
        total = self._state.feedback.accumulate(bucket, comm.rank)
        step = self._exact if self.rule == "exact" else self._published
        outcome, spent = step(total.acc, control, comm, bucket.grad.dtype)
        if outcome is None:  # NaN or Inf on some rank; all ranks know
            bucket.grad.fill_(torch.nan)
            return Report(self.name, bucket.key, bucket.step, n, 0, n, spent, details={"overflow": True})
        mean = outcome.mean.value.to(bucket.grad.dtype)
        overflow = not kernels.all_finite(mean)  # a host sync; what all ranks received, so all decide alike
        with station("apply"):
            if overflow:  # all ranks see it in the gradient, and nothing else changes
                bucket.grad.zero_()
            else:
                total.keep(bucket)
                kernels.clear_(total.residual, outcome.cleared)
                for error in outcome.errors:
                    kernels.scatter_add_(total.residual, error)
                self._state.control[bucket.key] = replace(outcome.control, t=control.t + 1)
            kernels.put_(bucket.grad, outcome.mean.index, mean)
        union = outcome.mean.index.numel()
        return Report(
            self.name,
            bucket.key,
            bucket.step,
            n,
            outcome.selected,
            union,
            outcome.cost,
            details=outcome.details | {"overflow": overflow},
        )

    def begin_anew(self) -> None:
        self._state.control.clear()

    @property
    def _kept(self) -> ErrorFeedback:
        return self._state.feedback

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        self._state.feedback.rescale(factors)
        for control in self._state.control.values():
            among = {factors.get(name, 1.0) for name in control.names}
            factor = among.pop() if len(among) == 1 else None  # several rates in one bucket: evaluate anew
            control.local_threshold = _times(control.local_threshold, factor)
            control.global_threshold = _times(control.global_threshold, factor)

    def state_dict(self) -> dict[str, Any]:  # Any: as the protocol
        control = {key: asdict(each) for key, each in self._state.control.items()}
        return {"residual": self._state.feedback.state_dict(), "control": control}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        residual, control = (state_from(state, key, "OkTopk") for key in ("residual", "control"))
        self._state.feedback.load_state_dict(residual)
        self._state.control.clear()
        self._state.control.update({key: _Control(**each) for key, each in control.items()})

    def _exact(self, acc: Tensor, control: _Control, comm: Comm, written: torch.dtype) -> tuple[_Outcome | None, Cost]:
        """Our step; its four rounds are the counts and elements of split-and-reduce, the ladders, and the survivors."""
        n, P, rank = acc.numel(), comm.size, comm.rank
        k = count_for(self.density, n)
        cut = regions.between(control.boundaries, n)
        own = cut[rank]
        with station("select"):
            mine = kernels.top_k_nonzero(acc, most_sent(k, n, P), skip=own, bound=control.local_threshold)
        region = own.of(acc).clone()  # all of this rank's own region counts, at no cost
        codec = Elements(self.values)
        reduced = sparse_allreduce.split_and_reduce_(region, mine, cut, comm, codec)
        cost = sparse_allreduce.split_and_reduce_cost(reduced.outgoing, cut, acc.dtype, rank, codec)

        with station("select"):
            largest = kernels.top_k_nonzero(region, k)
            finite = kernels.all_finite(mine.value) and kernels.all_finite(region)
            rungs = regions.ladder(largest.value, k, P, poisoned=not finite)
        ladders = torch.stack(comm.all_gather(rungs, [regions.LADDER] * P))
        cost += all_gather_cost(rungs.nbytes, P)
        if bool((ladders[:, 0] == regions.POISONED).any()):
            return None, cost

        held = regions.shares(ladders, k)  # of the survivors, by region
        sums = _largest(largest, held[rank])
        sums = Sparse(sums.index + own.start, sums.value, n)
        wanted = sparse_allreduce.least_holdings(held) if self._unbalanced(held, k, n) else held
        sums, places, moved = _balanced(sums, held, wanted, cut, comm, Elements())
        mean, read = sparse_allreduce.gather(replace(sums, value=sums.value / P), wanted, places, comm, codec)
        cost += moved + sparse_allreduce.gather_cost(wanted, places, acc.dtype, rank, codec)

        within = (mean.index >= own.start) & (mean.index < own.stop)
        selected = mine.index.numel() + int(within.sum())
        cleared = mean.index[within | kernels.among(mean.index, mine.index)]
        gone = kernels.among(mine.index, mean.index)
        if sum(held) < k or k == n:  # sums that did not survive are zero, which is what is written
            cleared = torch.cat([mine.index, torch.arange(own.start, own.stop, device=acc.device)])
            gone.fill_(True)
        errors: list[Sparse] = []
        if reduced.error is not None:
            errors.append(Sparse(mine.index[gone], reduced.error[gone], n))
        if not codec.exact or written != acc.dtype:
            errors.append(_unwritten(sums, read, written, P))
        boundaries = control.boundaries
        if k < n:  # at full density regions of equal width are the balanced ones
            boundaries = regions.balanced_boundaries(mean.index, n, P)
        following = replace(control, boundaries=boundaries, local_threshold=WARM * _smallest(mine) or None)
        details = _details(mine, mean, held, wanted, reduced.incoming, rank)
        details["global_threshold"] = P * _smallest(mean)
        return _Outcome(mean, cleared, errors, selected, following, cost, details), cost

    def _published(
        self, acc: Tensor, control: _Control, comm: Comm, written: torch.dtype
    ) -> tuple[_Outcome | None, Cost]:
        n, P, rank, t = acc.numel(), comm.size, comm.rank, control.t
        k = count_for(self.density, n)
        threshold, boundaries, cost = control.local_threshold, control.boundaries, Cost()
        # 1: if t mod tau' == 0: th_loc = k-th largest of |acc|
        if t % self.threshold_steps == 0 or threshold is None:
            threshold = float(sparse_reference.magnitude(kernels.top_k(acc, k).value).min())
        elif self.rule == "code":
            threshold = _tightened(acc, threshold, k)
        mine = kernels.at_least(acc, threshold)
        # 2: if t mod tau == 0: boundaries = SPACE_REPARTITION(acc, th_loc)
        if t % self.region_steps == 0 and P > 1:
            boundaries = _agreed(regions.balanced_boundaries(mine.index, n, P), comm, acc.device)
            cost += all_reduce_cost(P - 1, 8, P, rank)
        # 3: reduced, I_loc = SPLIT_AND_REDUCE(acc, th_loc, boundaries)
        cut = regions.between(boundaries, n)
        region = acc.new_zeros(len(cut[rank]))
        reduced = sparse_allreduce.split_and_reduce_(region, mine, cut, comm, raw)
        cost += sparse_allreduce.split_and_reduce_cost(reduced.outgoing, cut, acc.dtype, rank, raw)
        # 4: if t mod tau' == 0: all = ALLGATHERV(reduced); th_glob = k-th largest of |all|
        global_threshold = control.global_threshold
        evaluate = t % self.threshold_steps == 0 or global_threshold is None
        kept = kernels.at_least(region, 0.0 if evaluate else float(global_threshold or 0.0))
        finite = kernels.all_finite(mine.value) and kernels.all_finite(region)
        size = torch.tensor([kept.index.numel() if finite else regions.POISONED], dtype=torch.int32, device=acc.device)
        held: list[int] = torch.cat(comm.all_gather(size, [1] * P)).tolist()  # a host sync: buffer sizes depend on it
        cost += all_gather_cost(SIZE_NBYTES, P)
        if regions.POISONED in held:
            return None, cost
        # 5: u, I_glob = BALANCE_AND_ALLGATHERV(reduced, th_glob)
        kept = Sparse(kept.index + cut[rank].start, kept.value, n)
        wanted = sparse_allreduce.equal_holdings(held) if not evaluate and self._unbalanced(held, k, n) else held
        kept, places, moved = _balanced(kept, held, wanted, cut, comm, raw)
        survivors, _ = sparse_allreduce.gather(kept, wanted, places, comm, raw)
        cost += moved + sparse_allreduce.gather_cost(wanted, places, acc.dtype, rank, raw)
        if evaluate:
            survivors = _largest(survivors, k)
            global_threshold = _smallest(survivors)
        # 6: return u, I_loc intersect I_glob
        cleared = survivors.index[kernels.among(survivors.index, mine.index)]
        if evaluate and (sum(held) < k or k == n):  # sums that did not survive are zero, which is what is written
            cleared = mine.index
        details = _details(mine, survivors, held, wanted, reduced.incoming, rank) | {"evaluated": evaluate}
        if self.rule == "code":
            threshold, global_threshold = _scaled(mine, survivors, threshold, global_threshold, k, evaluate)
        following = replace(
            control,
            boundaries=boundaries,
            local_threshold=threshold or None,
            global_threshold=global_threshold or None,
        )
        mean = replace(survivors, value=survivors.value / P)
        errors: list[Sparse] = []
        if written != acc.dtype:
            at = kernels.among(kept.index, survivors.index)
            written_here = Sparse(kept.index[at], kept.value[at], n)
            errors.append(_unwritten(written_here, written_here.value / P, written, P))
        return _Outcome(mean, cleared, errors, mine.index.numel(), following, cost, details), cost

    def _unbalanced(self, held: Sequence[int], k: int, n: int) -> bool:
        """Whether survivors should move before they are gathered; the same on all ranks."""
        P, most = len(held), max(held)
        if most * P > self.imbalance * sum(held) and most > -(-sum(held) // P):
            return True
        return self.rule == "exact" and WORDS * most * (P - 1) > _words_left(k, n, P) - WORDS * most_sent(k, n, P)

    def _dense(self, bucket: Bucket, control: _Control, comm: Comm) -> Report:
        """The mean of all elements; there is no residual yet."""
        n, P = bucket.grad.numel(), comm.size
        if n and P > 1:
            bucket.grad.copy_(comm.all_reduce(bucket.grad).div_(P))
        cost = all_reduce_cost(n, bucket.grad.element_size(), P, comm.rank) if n else Cost()
        self._state.control[bucket.key] = replace(control, t=control.t + 1)
        return Report(self.name, bucket.key, bucket.step, n, n, n, cost, details={"dense": True})

    def _control(self, bucket: Bucket, P: int) -> _Control:
        """What is known about this bucket; only its step count where it has another size now, or the world has."""
        n, names = bucket.grad.numel(), [slot.name for slot in bucket.layout]
        known = self._state.control.get(bucket.key)
        if known is None or known.elements != n or known.ranks != P or known.names != names:
            return _Control(n, P, regions.equal_boundaries(n, P), names, t=known.t if known else 0)
        return known


def most_sent(k: int, n: int, P: int) -> int:
    """How many elements a rank sends to other regions at most: k (P-1)/P, or what the bound leaves of it when k is small; at least 1."""
    most = k - k // P
    if k < n and P > 1:  # at full density everything is sent, so that the result is the dense mean
        most = min(most, (_words_left(k, n, P) - WORDS * (k + P - 2)) // WORDS)
    return max(1, most)


def _words_left(k: int, n: int, P: int) -> int:
    """What counts and ladders leave of the bound 6k (P-1)/P, in words."""
    return 6 * k * (P - 1) // P - (1 + regions.LADDER) * (P - 1)


def _balanced(
    sums: Sparse,
    held: Sequence[int],
    wanted: Sequence[int],
    cut: Sequence[Span],
    comm: Comm,
    codec: sparse_allreduce.Codec,
) -> tuple[Sparse, Sequence[Span], Cost]:
    """This rank's `wanted` survivors, the spans that those of each rank lie in, and what it took."""
    if list(wanted) == list(held):
        return sums, cut, Cost()
    moved = sparse_allreduce.balance(sums, held, wanted, cut, comm, codec)
    cost = sparse_allreduce.balance_cost(held, wanted, cut, sums.value.dtype, comm.rank, codec)
    return moved, [Span(0, sums.length)] * comm.size, cost


def _unwritten(sums: Sparse, read: Tensor, written: torch.dtype, P: int) -> Sparse:
    """What P times the mean lacks of these sums, where the mean is `read` in the type `written`."""
    return replace(sums, value=sums.value - P * read.to(written).to(sums.value.dtype))


def _agreed(boundaries: list[int], comm: Comm, device: torch.device) -> list[int]:
    """The mean over ranks of each boundary; int64, because n * P may exceed an int32."""
    total = comm.all_reduce(torch.tensor(boundaries, dtype=torch.int64, device=device))
    return (total // comm.size).tolist()


def _largest(part: Sparse, k: int) -> Sparse:
    """The k largest elements of `part`."""
    top = kernels.top_k(part.value, min(k, part.value.numel())).index
    return Sparse(part.index[top], part.value[top], part.length)


def _smallest(part: Sparse) -> float:
    """The smallest magnitude in `part`, 0 when it is empty."""
    return float(part.value.abs().min()) if part.value.numel() else 0.0


def _tightened(acc: Tensor, threshold: float, k: int) -> float:
    """The authors' code for VGG: up to five times 3 % more while more than 4k/3 elements are selected."""
    size = sparse_reference.magnitude(acc)
    for _ in range(5):
        if 3 * int((size >= threshold).sum()) <= 4 * k:
            break
        threshold *= 1.03
    return threshold


def _scaled(
    mine: Sparse, survivors: Sparse, threshold: float, global_threshold: float | None, k: int, evaluated: bool
) -> tuple[float, float | None]:
    """The thresholds of the next step, by the bands of the authors' code for VGG."""
    total, gathered = mine.index.numel(), survivors.index.numel()
    if 3 * total < 2 * k:
        threshold /= 1.012
    elif 4 * total > 5 * k:
        threshold *= 1.012
    if global_threshold is not None and not evaluated:
        if 3 * gathered < 2 * k:
            global_threshold /= 1.008
        elif 3 * gathered > 4 * k:
            global_threshold *= 1.008
    return threshold, global_threshold


def _times(threshold: float | None, factor: float | None) -> float | None:
    return None if threshold is None or factor is None else threshold * factor


def _details(
    mine: Sparse, survivors: Sparse, held: Sequence[int], wanted: Sequence[int], incoming: Sequence[int], rank: int
) -> dict[str, Detail]:
    """What the report tells besides the counts; thresholds are the smallest magnitudes that were selected, here and of the sums."""
    total = sum(held)
    return {
        "local_threshold": _smallest(mine),
        "global_threshold": _smallest(survivors),
        "local_count": mine.index.numel(),
        "global_count": survivors.index.numel(),
        "received_count": sum(incoming) - incoming[rank],
        "imbalance": max(held) * len(held) / total if total else 1.0,
        "balanced": list(wanted) != list(held),
    }

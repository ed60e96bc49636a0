"""Ok-Topk: a sparse all-reduce whose traffic does not grow with P, on top-k selections (Li and Hoefler, arXiv 2201.07598).

Every rank owns a region of the vector. Ranks send their largest elements to the owners of the regions, who add them up; the largest sums
of all regions survive and are gathered. A rank clears what it contributed to a survivor; everything else stays in its residual.
A threshold approximates the k-th largest magnitude; it is exact every `threshold_steps` steps, and kept in between.

Steps 1 to 6 of `step` are the lines of the paper's OK_SPARSE_ALLREDUCE, reconstructed from the authors' code and from descriptions of the
paper, whose text was not available. Differs from the paper:
- The learning rate stays outside: the residual is in units of the gradient. `State.rescale` with old rate / new rate preserves
  rate * residual, and the thresholds with it. Weights then move as in the paper, whose accumulator is rate * acc.
- Elements equal to a threshold are selected (the authors' code leaves them out, and so selects k-1); zeros never are.
- Of m selected elements, number j m // P is boundary j (the authors' code: j (m // P), so the last region has more).
- A step that evaluates thresholds gathers the sums once, computes th_glob from them, and cuts them to k.
- A threshold of zero, as with fewer than k non-zeros, is evaluated again in the next step. A step with NaN or Inf changes no state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor

from sparsync.base.error_feedback import DenseUpdate, ErrorFeedbackScheme, Update, everything
from sparsync.base.state import State
from sparsync.collectives import sparse_allreduce
from sparsync.core import (
    FOUND_INF,
    Bucket,
    Comm,
    Span,
    Sparse,
    check_density,
    check_one_of,
    count_for,
    exact_divisor,
    raise_if_found_inf,
    spans,
)
from sparsync.feedback import Accumulator, smallest_magnitude
from sparsync.kernels import operations as kernels
from sparsync.selection.scaling import CONSTANTS, Program, scaled
from sparsync.wire import Raw


@dataclass(frozen=True)
class OkTopk(ErrorFeedbackScheme):
    """Write the sums above a threshold, about k = density * n of them, divided by P; the rest stays in the residuals.

    The defaults are those of the authors' program for VGG, without its 512 dense steps and its scaling of the thresholds: see `published`.
    `bug_compatible` scales the thresholds between evaluations, and balances never or always, as their `program` does; the differences
    above remain. If any rank has NaN or Inf, all ranks fill the gradient with NaN, so that a loss scaler finds it; residual and
    thresholds do not change.
    """

    density: float = 0.02  # k/n, of a rank's selection and of the result; the authors use 0.01 to 0.02
    threshold_steps: int = 32  # tau', steps between two evaluations of the thresholds
    region_steps: int = 64  # tau, steps between two divisions into regions
    dense_steps: int = 0  # first steps that reduce everything
    imbalance: float = 4.0  # survivors are moved to other ranks if a region has more than this times the mean
    bug_compatible: bool = False
    program: Program = "vgg"  # of the authors, with the factors and bands of `bug_compatible`

    name = "oktopk"
    may_send_whole = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        for name, least in {"threshold_steps": 1, "region_steps": 1, "dense_steps": 0, "imbalance": 1}.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        check_one_of("program", self.program, Program)

    @classmethod
    def published(cls, program: Program = "vgg") -> "OkTopk":
        """Make the settings of the authors' programs and scripts for VGG-16, an LSTM or BERT: density, warm-up, scaling and balancing.

        | program | density | dense steps | tau' | tau | balances |
        | --- | --- | --- | --- | --- | --- |
        | vgg | 0.02 | 512 | 32 | 64 | never |
        | lstm | 0.02 | 128 | 32 | 64 | never |
        | bert | 0.01 | 0 | 128 | 64 | always |
        """
        made = cls(bug_compatible=True, program=program)
        if program == "bert":
            return replace(made, density=0.01, threshold_steps=128)
        return replace(made, dense_steps=128 if program == "lstm" else 512)

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update | DenseUpdate:
        n, P, rank = bucket.grad.numel(), comm.size, comm.rank
        k, control = count_for(self.density, n), state.shared_state("control", Control, bucket, P)
        if bucket.step < self.dense_steps:
            return replace(everything(acc, comm), commit=lambda: control.become(replace(control, t=control.t + 1)))
        local = state.own_state("own_control", OwnControl, bucket, P)
        # 1: if t mod tau' == 0: th_loc = k-th largest of |acc|
        threshold = self._local_threshold(acc, k, control.t, local)
        mine = acc.above(threshold, Span(0, n))
        # 2: if t mod tau == 0: boundaries = SPACE_REPARTITION(acc, th_loc)
        boundaries = self._boundaries(mine, control, comm)
        # 3: reduced, I_loc = SPLIT_AND_REDUCE(acc, th_loc, boundaries): the sums of this rank's region, and `mine.index`
        regions = sparse_allreduce.regions_of(boundaries, n)
        reduced = mine.value.new_zeros(len(regions[rank]))
        moved = sparse_allreduce.split_and_reduce_(reduced, mine, regions, comm, Raw(), counts_first=True)
        # 4: if t mod tau' == 0: th_glob = k-th largest of all ranks' |reduced|. In such a step all non-zero sums are kept; 5 gathers them,
        # cuts them to the k largest, and so finds th_glob
        evaluate = control.t % self.threshold_steps == 0 or control.threshold is None
        kept = kernels.select_ge(reduced, 0.0 if evaluate else float(control.threshold or 0.0))
        finite = acc.finite and kernels.all_finite(reduced)
        size = torch.tensor([kept.index.numel() if finite else FOUND_INF], dtype=torch.int32, device=reduced.device)
        # A host sync: buffer sizes depend on it.
        held: list[int] = torch.cat(comm.all_gather(size, [1] * P)).tolist()
        raise_if_found_inf(held)
        # 5: u, I_glob = BALANCE_AND_ALLGATHERV(reduced, th_glob): `survivors`, P times u
        kept = Sparse(kept.index + regions[rank].start, kept.value, n)
        imbalance = CONSTANTS[self.program].imbalance if self.bug_compatible else self.imbalance
        balances = not evaluate and sparse_allreduce.uneven(held, imbalance)
        wanted = [len(each) for each in spans(sum(held), len(held))] if balances else held
        kept, places = sparse_allreduce.balance(kept, held, wanted, regions, comm, Raw())
        survivors, _ = sparse_allreduce.all_gather_elements(kept, wanted, places, comm, Raw())
        if evaluate:
            top = kernels.top_k(survivors.value, min(k, survivors.value.numel())).index
            survivors = Sparse(survivors.index[top], survivors.value[top], n)
        global_threshold = smallest_magnitude(survivors.value) if evaluate else control.threshold
        # 6: return u, I_loc intersect I_glob: `mean`, and the positions that leave this rank's residual
        cleared = survivors.index[kernels.isin(survivors.index, mine.index)]
        if evaluate and (sum(held) < k or k == n):
            # Every non-zero sum survived. The others cancelled out, so each rank clears all it sent.
            cleared = mine.index
        details = sparse_allreduce.details(mine, held, wanted, moved.incoming, rank)
        if self.bug_compatible:
            constants = CONSTANTS[self.program]
            threshold = scaled(threshold, mine.index.numel(), k, constants.local)
            if global_threshold is not None and not evaluate:
                global_threshold = scaled(global_threshold, survivors.index.numel(), k, constants.overall)

        def commit() -> None:
            control.become(Control(control.t + 1, boundaries, global_threshold or None))
            local.threshold = threshold or None

        mean = replace(survivors, value=survivors.value / exact_divisor(survivors.value, P))
        return Update(mean, cleared, mine.index.numel(), details=details, commit=commit)

    def rescaled(self, state: State, factors: Mapping[str, float]) -> None:
        for names, control in [*state.all_of("control", Control), *state.all_of("own_control", OwnControl)]:
            distinct = {factors.get(name, 1.0) for name in names}
            # Several rates in one bucket: evaluate the thresholds again.
            factor = distinct.pop() if len(distinct) == 1 else None
            control.threshold = None if control.threshold is None or factor is None else control.threshold * factor

    def _local_threshold(self, acc: Accumulator, k: int, t: int, local: "OwnControl") -> float:
        if t % self.threshold_steps == 0 or local.threshold is None:
            return float(kernels.magnitude(acc.top_k(k).value).min())
        above = CONSTANTS[self.program].tightened_above if self.bug_compatible else None
        return local.threshold if above is None else _tightened(acc.values, local.threshold, above * k)

    def _boundaries(self, mine: Sparse, control: "Control", comm: Comm) -> list[int]:
        """Compute the boundaries of the regions at this step: every `region_steps` steps the mean of all ranks' boundaries."""
        n, P = mine.length, comm.size
        if control.t % self.region_steps or P == 1:
            return control.boundaries or sparse_allreduce.equal_boundaries(n, P)
        wanted = sparse_allreduce.balanced_boundaries(mine.index, n, P)
        # int64, because n * P may exceed an int32.
        total = comm.all_reduce(torch.tensor(wanted, dtype=torch.int64, device=mine.index.device))
        return (total // P).tolist()


@dataclass
class Control:
    """The state of one bucket that all ranks share."""

    t: int = 0  # steps taken
    boundaries: list[int] = field(default_factory=list)  # P-1; empty: regions of equal width
    threshold: float | None = None  # th_glob; None: the next step evaluates it

    def become(self, other: "Control") -> None:
        """Take over the fields of `other`: the State holds this object."""
        self.__dict__.update(other.__dict__)


@dataclass
class OwnControl:
    """The state of one bucket on one rank, besides its residual."""

    threshold: float | None = None  # th_loc; None: the next step evaluates it


def _tightened(acc: Tensor, threshold: float, most: Fraction) -> float:
    """Raise the threshold by 3 %, up to five times, while it selects more than `most` elements, as the authors' code does."""
    size = kernels.magnitude(acc)
    for _ in range(5):
        if int((size >= threshold).sum()) <= most:
            break
        threshold *= 1.03
    return threshold

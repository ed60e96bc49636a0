"""The reduce-scatter forms of SkipReduce, ExactOkTopk and TwoShot for a shard axis, where a rank keeps only its chunk.

They select as the schemes do, with the chunks as regions and without the second exchange. The schemes' files say more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsync.base.reduce_scatter import KeepingReduceScatter
from sparsync.base.scheme import parameter_of
from sparsync.base.state import State
from sparsync.collectives import sparse_allreduce
from sparsync.collectives.skipping import SkipPlan, first_offsets, reduce_scatter, rotating_offsets, skip_count, skips
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Comm, Detail, Report, Span, Sparse, count_for, or_found_inf, raise_if_found_inf
from sparsync.feedback import Accumulator
from sparsync.kernels import operations as kernels
from sparsync.kernels.rounding import rounded
from sparsync.schemes.exact_oktopk import ExactOkTopk
from sparsync.schemes.skip_reduce import SkipReduce, divide_, split
from sparsync.schemes.two_shot import TwoShot
from sparsync.wire import Elements


@dataclass(frozen=True)
class TwoShotReduceScatter(KeepingReduceScatter):
    """Send the share `density` of every other rank's chunk to its owner. All elements of a rank's chunk count, at no cost."""

    config: TwoShot

    def total(self, acc: Accumulator, own: Span, bucket: Bucket, comm: Comm) -> tuple[Tensor, int, dict[str, Detail]]:
        P, rank, m, codec, dtype = comm.size, comm.rank, len(own), Elements(self.config.values), acc.values.dtype
        count, chunks = count_for(self.config.density, m), [acc.values[p * m : (p + 1) * m] for p in range(P)]
        chosen = {p: acc.top_k_of(chunk, count, "sent") for p, chunk in enumerate(chunks) if p != rank}
        if not acc.finite:  # so that every owner learns of it without another message
            chosen = {p: replace(part, value=torch.full_like(part.value, torch.nan)) for p, part in chosen.items()}
        packets = [acc.values.new_empty(0, dtype=torch.uint8)] * P
        for p, part in chosen.items():
            packets[p] = codec.encode(part)
        size = codec.nbytes(count, m, dtype)
        received = comm.all_to_all(packets, [size * (source != rank) for source in range(P)])
        total = chunks[rank].clone()
        for source in chosen:
            kernels.scatter_add_(total, codec.decode(received[source], count, m, dtype))
        chunks[rank].zero_()
        for p, part in chosen.items():
            dropped = part.value - codec.decode_values(packets[p], count, m, dtype)
            kernels.put_(chunks[p], part.index, dropped)
        return total, count * (P - 1) + m, {}


@dataclass(frozen=True)
class OkTopkReduceScatter(KeepingReduceScatter):
    """Send the k (P-1)/P largest elements outside this rank's chunk to their owners. All elements inside it count, at no cost."""

    config: ExactOkTopk

    def total(self, acc: Accumulator, own: Span, bucket: Bucket, comm: Comm) -> tuple[Tensor, int, dict[str, Detail]]:
        n, P, m = bucket.grad.numel(), comm.size, len(own)
        k = count_for(1.0 if bucket.step < self.config.dense_steps else self.config.density, n)
        mine = acc.top_k_nonzero(max(1, k - k // P), skip=own)
        if not acc.finite:
            # A NaN for every other rank instead of the selection, so that all learn of it without another message.
            first = torch.arange(0, n, max(1, m), dtype=torch.int32, device=acc.values.device)
            index = first[first != own.start]
            mine = Sparse(index, acc.values.new_full(index.shape, torch.nan), n)
        total, chunks = own.of(acc.values).clone(), [Span(owner * m, (owner + 1) * m) for owner in range(P)]
        moved = sparse_allreduce.split_and_reduce_(total, mine, chunks, comm, Elements(self.config.values))
        own.of(acc.values).zero_()
        kernels.clear_(acc.values, mine.index)
        if moved.error is not None:
            kernels.scatter_add_(acc.values, Sparse(mine.index, moved.error, n))
        sent, received = mine.index.numel(), sum(moved.incoming) - moved.incoming[comm.rank]
        return total, sent + m, {"sent_count": sent, "received_count": received}


@dataclass(frozen=True)
class SkipReduceScatter(KeepingReduceScatter):
    """SkipReduce with fixed owners: an owner's sum omits s of the P-1 other ranks, different ones at every step.

    An owner's sum always includes its gradient, so its weight there is 1/(P-s), and the others' is (P-1-s)/((P-1)(P-s)) in the
    long run. This has no effect if all ranks draw from the same data. The form is always direct, whatever `form` says.
    """

    config: SkipReduce
    called: str = "skip_reduce"

    def __post_init__(self) -> None:
        if self.config.node_size != 1:
            raise ValueError(
                f"node_size must be 1 on a shard axis, got {self.config.node_size}; shard inside the node and use "
                "attach(..., replicate=...) between nodes"
            )

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets these
        return self.called

    @property
    def has_residual(self) -> bool:
        return self.config.feedback

    def reduce_scatter(self, state: State, bucket: Bucket, out: Tensor, comm: Comm, average: bool) -> Report:
        if self.has_residual:
            return super().reduce_scatter(state, bucket, out, comm, average)
        n, P, comm = bucket.grad.numel(), comm.size, MeteredComm(comm)
        step = self._planned(bucket, P, out.numel())
        reduce_scatter(bucket.grad, out, comm, step.plan, step.always)
        contributors = P if self.config.divide_by == "ranks" else P - step.plan.skip
        if average:
            divide_(out, step.always, P)
            divide_(out, step.others, contributors)
        elif contributors != P:  # an estimate of the sum over all P
            for span in step.others:
                span.of(out).mul_(P / contributors)
        lost = sum(map(len, step.left_out(comm.rank, P, out.numel())))
        return Report(self.name, bucket.key, bucket.step, n, n - lost, n, comm.sent, details=step.details(P))

    def total(self, acc: Accumulator, own: Span, bucket: Bucket, comm: Comm) -> tuple[Tensor, int, dict[str, Detail]]:
        n, P, step = bucket.grad.numel(), comm.size, self._planned(bucket, comm.size, len(own))
        flag = or_found_inf(torch.zeros(1, dtype=torch.int32, device=acc.residual.device), acc.is_finite)
        # A host sync: all ranks must decide the same, and owners see nothing from an omitted rank.
        raise_if_found_inf(torch.cat(comm.all_gather(flag, [1] * P)).tolist())
        sent = rounded(acc.values, bucket.grad.dtype)
        total = torch.empty_like(own.of(acc.values))  # in the residual's type, which may be wider
        reduce_scatter(sent, total, comm, step.plan, step.always)
        left_out = step.left_out(comm.rank, P, len(own))
        kept = [span.of(acc.values).clone() for span in left_out]
        acc.values.sub_(sent)  # leaves the rounding error of the wire's type
        for span, values in zip(left_out, kept, strict=True):
            span.of(acc.values).copy_(values)
        return total, n - sum(map(len, left_out)), step.details(P)

    def _planned(self, bucket: Bucket, P: int, m: int) -> "_SkipStep":
        """Plan which ranks are omitted at this step, and where in a chunk; all ranks draw the same plan."""
        skip, config, always, others = skip_count(self.config.skip, P), self.config, (), (Span(0, m),)
        naive, drawn = config.mode == "naive", (skip, P, config.seed, bucket.key, bucket.step)
        if config.feedback or config.protect:  # every chunk has the same layout
            first = [
                replace(entry, name=parameter_of(entry.name)) for entry in bucket.layout[: len(bucket.layout) // P]
            ]
            always, others = (part.spans for part in split(first, config.protect))
        return _SkipStep(SkipPlan(first_offsets(skip) if naive else rotating_offsets(*drawn)), always, others)


@dataclass(frozen=True)
class _SkipStep:
    plan: SkipPlan
    always: Sequence[Span]  # of a chunk, never omitted
    others: Sequence[Span]

    def left_out(self, rank: int, P: int, m: int) -> list[Span]:
        """Return the spans of the whole gradient in which `rank` is omitted."""
        owners = [owner for owner in range(P) if skips(rank, owner, P, self.plan)]
        return [Span(owner * m + span.start, owner * m + span.stop) for owner in owners for span in self.others]

    def details(self, P: int) -> dict[str, Detail]:
        plan = self.plan
        return {"skip": plan.skip, "offsets": str(list(plan.offsets)), "protected": P * sum(map(len, self.always))}

"""The less common options of `sparsync.attach`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sparsync.comm.group import GroupComm
from sparsync.runtime.comparison import CHECK_WEIGHTS_EVERY, Comparison, Named
from sparsync.runtime.findings import Axis
from sparsync.runtime.rescaling import ResidualRescaler
from sparsync.wire import Values


@dataclass(frozen=True, kw_only=True)
class Options:
    """Less common options: `sparsync.attach(model, optimizer=optimizer, options=sparsync.Options(timeout_s=60))`.

    Args:
        timeout_s: seconds that a rank waits for the others.
        check_weights_every: steps between two comparisons of the trained parameters (0: never). None: 100, or the value in `exchange`. On
            FSDP2's shard axis every rank has other parameters, and none are compared.
        follow_rates: for gradients, True if residuals also follow the learning rates of `optimizer`, down to a tenth of the highest one.
            None: True, except under Lightning and the Trainer of transformers, which change rates at every step.
        join_mb: for DistributedDataParallel, megabytes up to which successive buckets are joined if the scheme has a residual (0: none are
            joined). A scheme takes as many exchanges and calls for a small bucket as for a large one. Dense joins at most up to 256 kB.
        dense_below: for DistributedDataParallel, elements below which a joined bucket is sent whole (0: never).
        replicate: for FSDP2, the axis of a mesh, or the process group, over which every rank has the same shard.
        parameters: for FSDP2's shard axis, the format of gathered parameters, such as "int4": a rank sends the rounded difference between
            its shard and the copy that all ranks hold. Errors do not accumulate, and the gather of the backward pass sends nothing, but
            every rank always holds all parameters. None: as the recipe says, or FSDP2's all-gather.
    """

    timeout_s: float = 300.0
    check_weights_every: int | None = None
    follow_rates: bool | None = None
    join_mb: float = 4.0
    dense_below: int = 1024
    replicate: Axis | None = None
    parameters: Values | None = None


@dataclass(frozen=True, kw_only=True)
class GradientOptions(Options):
    """The options of an integration of gradients, with the optimizers and the scaler that residuals follow."""

    optimizers: Sequence[Optimizer] = ()
    scaler: GradScaler | None = None

    @property
    def weights_every(self) -> int:
        return CHECK_WEIGHTS_EVERY if self.check_weights_every is None else self.check_weights_every

    def rescaler(self, names: Mapping[int, str], adds_up: bool = False) -> ResidualRescaler:
        """Make the rescaler of a handle's residuals; `names` maps parameter ids to names."""
        return ResidualRescaler(names, self.optimizers, self.scaler, self.follow_rates is not False, adds_up)

    def comparison(
        self, names: Mapping[int, str], weights: Callable[[], Named] | None, applies: Callable[[], bool] = lambda: True
    ) -> Comparison:
        """Make the comparison of ranks beside buckets; see Comparison."""
        return Comparison(self.optimizers, names, weights, self.weights_every, applies, where_stepped=True)

    def connected(self, group: dist.ProcessGroup | None, *lines: str) -> GroupComm:
        """Open private connections between the ranks of `group`, which must have the same `lines`. Collective over them."""
        fingerprint = "\n".join([*lines, f"check_weights_every={self.weights_every}"])
        return GroupComm.private(group, self.timeout_s, fingerprint=fingerprint)

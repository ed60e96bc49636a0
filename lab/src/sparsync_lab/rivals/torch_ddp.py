"""DistributedDataParallel without sparsync: torch's all-reduce of each bucket, which gloo performs as a ring."""

from dataclasses import dataclass

from sparsync.schemes import Dense


@dataclass(frozen=True)
class TorchDDP(Dense):
    """Train without a hook in `sparsync compare`: `--schemes sparsync_lab.rivals.torch_ddp:TorchDDP`. Elsewhere it is Dense."""

    name = "torch_ddp"  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]  # a class has one name

"""DistributedDataParallel without sparsync: torch's own all-reduce of each bucket, which gloo does round a ring."""

from dataclasses import dataclass

from sparsync.schemes import Dense


@dataclass(frozen=True)
class TorchDDP(Dense):
    """What `sparsync compare` trains without a hook: `--schemes sparsync_lab.rivals.torch_ddp:TorchDDP`. Elsewhere it is Dense."""

    name = "torch_ddp"  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]  # a class has one name

"""DistributedDataParallel without sparsync: torch's own all-reduce of each bucket, which gloo does round a ring."""

from dataclasses import dataclass

from sparsync import Dense


@dataclass
class TorchDDP(Dense):
    """What `sparsync compare` trains without a hook: `--schemes sparsync_lab.rivals.torch_ddp:TorchDDP`. Elsewhere it is Dense."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.name = "torch_ddp"

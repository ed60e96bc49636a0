"""Imports what ranks import: the fork server of `helpers.distributed` does so once, and its ranks find it done.

torch.distributed.optim compiles its optimizers when it is imported, and Python compiles the tests' own modules each time where it is told
to write no bytecode; either takes longer than most of what ranks do.
"""

import atexit
import gc
from importlib import import_module

for _name in (
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "sparsync.attached.checkpoint",
    "sparsync.attached.fsdp2",
    "sparsync.exchanges.local_steps",
    "sparsync.attached.manual",
    "helpers.ddp_training",
    "helpers.fsdp_training",
    "helpers.traces",
    "integrations.page",
):
    import_module(_name)
# Ranks that collect garbage need not look through all that; nanobind says at the end that its functions leak unless the server does.
gc.freeze()
atexit.register(gc.unfreeze)

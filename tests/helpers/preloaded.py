"""Import the modules of ranks: the fork server of `helpers.distributed` does so once for all of its ranks.

torch.distributed.optim compiles its optimizers on import, and Python compiles the tests' modules each time if it must not write bytecode;
either takes longer than most work of ranks.
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
# Spare the ranks' garbage collections all of that; nanobind reports leaked functions at exit unless the server unfreezes.
gc.freeze()
atexit.register(gc.unfreeze)

"""Imports what ranks import: the fork server of `helpers.distributed` does so once, and its ranks find it done.

torch.distributed.optim compiles its optimizers when it is imported, and Python compiles the tests' own modules each time where it is told
to write no bytecode; either takes longer than most of what ranks do.
"""

from importlib import import_module

for _name in (
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "sparsync.integrations.checkpoint",
    "sparsync.integrations.fsdp2",
    "sparsync.integrations.local_steps",
    "sparsync.integrations.manual",
    "helpers.ddp_training",
    "helpers.fsdp_training",
    "integrations.page",
):
    import_module(_name)

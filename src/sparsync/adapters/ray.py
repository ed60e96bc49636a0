"""Ray Train: attaches a scheme inside the training loop of a TorchTrainer, and continues from the checkpoints that the loop reports.

model, handle = sparsync.adapters.ray.prepare_model(model, optimizer=optimizer)
...
sparsync.checkpoint.save(handle, folder)  # on every worker, before
ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))  # on every worker: Ray puts their files together
"""
# pyright: reportMissingImports=false

from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler

from sparsync.adapters.wrapped import ddp_inside, needs
from sparsync.attached import checkpoint
from sparsync.attached.attach import attach
from sparsync.base.scheme import Scheme
from sparsync.exchanges.choice import Exchange, Optimizers
from sparsync.recipes import Bits
from sparsync.runtime.handle import Handle
from sparsync.runtime.options import Options

with needs("ray[train]", "2.60"):
    import ray.train.torch


def prepare_model(
    model: nn.Module,
    scheme: Scheme | None = None,
    *,
    bits: Bits | None = None,
    optimizer: Optimizers | None = None,
    exchange: Exchange | None = None,
    scaler: GradScaler | None = None,
    options: Options = Options(),
    **prepared_by: Any,
) -> tuple[nn.Module, Handle | None]:
    """Return what `ray.train.torch.prepare_model(model, **prepared_by)` makes, attached, and the handle; None with one worker.

    The arguments before `prepared_by`, and what is raised, are as for `sparsync.attach`; TypeError for models that DDP does not train.
    Where the loop starts from a checkpoint with residuals, they are loaded, for any number of workers.
    """
    prepared = ray.train.torch.prepare_model(model, **prepared_by)
    ddp = ddp_inside(prepared, "Ray Train", ray.train.get_context().get_world_size())
    if ddp is None:
        return prepared, None
    handle = attach(ddp, scheme, bits=bits, optimizer=optimizer, exchange=exchange, scaler=scaler, options=options)
    given = ray.train.get_checkpoint()
    if given is not None:
        with given.as_directory() as folder:
            if checkpoint.holds_states(folder):
                checkpoint.load(handle, folder)
    return prepared, handle

"""Hugging Face Accelerate: attaches a scheme to a prepared model, and adds its state to what `save_state` writes.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
handle = sparsync.adapters.accelerate.attach(accelerator, model, optimizer=optimizer)
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from sparsync.adapters.wrapped import clip_by_common_norm, ddp_inside, needs
from sparsync.attached import checkpoint
from sparsync.attached.attach import attach as attach_to_ddp
from sparsync.base.scheme import Scheme
from sparsync.exchanges.choice import Exchange, Optimizers
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.recipes import Bits
from sparsync.runtime.handle import Handle
from sparsync.runtime.options import Options

with needs("accelerate", "1.15"):
    from accelerate import Accelerator


def attach(
    accelerator: Accelerator,
    model: nn.Module | Sequence[nn.Module],
    scheme: Scheme | None = None,
    *,
    bits: Bits | None = None,
    optimizer: Optimizers | None = None,
    exchange: Exchange | None = None,
    options: Options = Options(),
) -> Handle | None:
    """Attach to a `model` from `accelerator.prepare`, or several, and return the handle; with one process, warn and return None.

    With float16, residuals follow Accelerate's loss scaler. Gradients accumulated under `accelerator.accumulate` are reduced once.
    With steps, `accelerator.clip_grad_norm_` clips by the norm of all ranks, and returns it. From now on `accelerator.save_state` writes a
    file with each rank's residual into its folder, which all ranks must see, and `load_state` loads them, for any number of
    ranks. Leave `register_for_checkpointing(handle)` out, which would save one rank's state.
    The other arguments, and what is raised, are as for `sparsync.attach`; TypeError for models that are not trained with DDP.
    """
    models = [model] if isinstance(model, nn.Module) else model
    found = [ddp_inside(each, "Accelerate", accelerator.num_processes) for each in models]
    ddps = [each for each in found if each is not None]
    if not ddps:
        return None
    handle = attach_to_ddp(
        ddps if len(ddps) > 1 else ddps[0],
        scheme,
        bits=bits,
        optimizer=optimizer,
        exchange=exchange,
        scaler=accelerator.scaler,
        options=options,
    )

    clip_by_common_norm(accelerator, "clip_grad_norm_", handle, iter, accelerator.unscale_gradients)

    def save(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        checkpoint.save(handle, folder)

    last = _LoadedLast(handle) if isinstance(handle, LocalTraining) else None

    def load(models: list[nn.Module], folder: str) -> None:
        if last is None:
            checkpoint.load(handle, folder)
        else:
            last.folder = folder

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    if last is not None:
        accelerator.register_for_checkpointing(last)
    return handle


class _LoadedLast:
    """Loads the state of local steps after Accelerate has loaded the main process's weights and optimizers on all ranks."""

    folder = ""  # of the state that is being loaded

    def __init__(self, handle: LocalTraining) -> None:
        self._handle = handle

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        checkpoint.load(self._handle, self.folder)

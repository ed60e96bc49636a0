"""Hugging Face Accelerate: attaches a scheme to a prepared model, and adds its state to what `save_state` writes.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
handle = sparsync.adapters.accelerate.attach(accelerator, model, optimizer=optimizer)
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from sparsync.adapters.wrapped import ddp_inside, needs
from sparsync.attached import checkpoint
from sparsync.attached.attach import attach as attach_to_ddp
from sparsync.base.scheme import Scheme
from sparsync.exchanges.choice import Exchange, Optimizers
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
    From now on `accelerator.save_state` writes a file with each rank's residual into its folder, which all ranks must see, and `load_state`
    loads them, for any number of ranks. Leave `register_for_checkpointing(handle)` out, which would save one rank's state.
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

    state = _States(handle)
    accelerator.register_save_state_pre_hook(state.save)
    accelerator.register_load_state_pre_hook(state.find)
    accelerator.register_for_checkpointing(state)
    return handle


class _States:
    """Saves the states of all ranks, and loads them after Accelerate has loaded the main process's weights and optimizers on all ranks."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._folder = ""  # of the state that is being loaded

    def save(self, models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        checkpoint.save(self._handle, folder)

    def find(self, models: list[nn.Module], folder: str) -> None:
        self._folder = folder

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        checkpoint.load(self._handle, self._folder)

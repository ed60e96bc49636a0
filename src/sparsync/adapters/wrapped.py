"""Shared by adapters: finds the DDP model that a trainer has wrapped, and attaches to it."""

from dataclasses import replace

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from sparsync.attached.attach import Attached, attach
from sparsync.base.scheme import Scheme
from sparsync.exchanges.choice import Exchange, Optimizers
from sparsync.recipes import Bits
from sparsync.runtime.findings import check_scheme, warn_of
from sparsync.runtime.handle import Gradients, Handle
from sparsync.runtime.options import Options
from sparsync.runtime.parameters import inside_wrappers


def ddp_inside(model: nn.Module, framework: str, ranks: int) -> DistributedDataParallel | None:
    """Find the DDP model in `model`, inside torch.compile or Fabric too; return None, with a warning, if there is only one rank.

    Raises TypeError if several ranks train anything but a DDP model.
    """
    model = inside_wrappers(model)
    if isinstance(model, DistributedDataParallel):
        return model
    if ranks == 1:
        warn_of(f"{framework} trains in one process, so there is nothing to send, and no scheme is attached")
        return None
    raise TypeError(
        f"sparsync reduces the gradients of DistributedDataParallel, and {framework} made a {type(model).__name__} for {ranks} ranks; "
        f"choose DDP in {framework}"
    )


class Attaching:
    """The arguments of `sparsync.attach`, for a trainer that makes the model and its optimizers later, possibly several times."""

    def __init__(self, scheme: Scheme | None, bits: Bits | None, exchange: Exchange | None, options: Options) -> None:
        if scheme is not None:
            check_scheme(scheme)
        self._given = {"scheme": scheme, "bits": bits, "exchange": exchange}
        # Trainers change the rate at every step.
        self._options = replace(options, follow_rates=options.follow_rates is True)
        self._before: Handle | None = None

    def attach(
        self, ddp: DistributedDataParallel, optimizer: Optimizers, scaler: GradScaler | None, in_turn: bool = False
    ) -> Attached:
        """Attach and return the handle; later models get the scheme of the first. `in_turn`: optimizers have no common step."""
        given = dict(self._given)
        if in_turn and given["bits"] is None:
            given["exchange"] = given["exchange"] or Gradients()
        if self._before is not None:
            given = {"scheme": self._before.scheme, "exchange": self._before.exchange}
        handle = attach(ddp, **given, optimizer=optimizer, scaler=scaler, options=self._options)
        handle.recipe = handle.recipe if self._before is None else self._before.recipe
        self._before = handle
        return handle

"""The integration by the model's type."""

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.integrations import ddp
from sparsync.integrations.findings import Axis, is_fsdp2
from sparsync.integrations.handle import Handle


def attach(
    model: nn.Module,
    scheme: Scheme,
    *,
    replicate: Axis | None = None,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    timeout_s: float = 300.0,
) -> Handle:
    """Makes `model` reduce its gradients with `scheme`, and returns the handle to its reports and state.

    `model` is wrapped by DistributedDataParallel, or by fully_shard; see `hooks.ddp.attach` and `hooks.fsdp2.attach_fsdp2`. Collective
    over the ranks that reduce: call it on all of them, each with a scheme of its own, set alike. With `optimizer`, residuals follow its
    learning rate, with `scaler` its loss scale. After `timeout_s` seconds without an answer a rank gives up.
    `replicate` is for FSDP2: the axis of a mesh, or the process group, over which every rank has the same shard.
    Warns of what `doctor` warns of. Raises what it would refuse, TypeError for another model and for anything but a scheme, and
    RuntimeError when the ranks come with different schemes or, on a replicate axis, different parameters.
    """
    if not callable(getattr(scheme, "reduce", None)):
        raise TypeError(f"attach takes a scheme such as sparsync.TopK(density=0.01), got {scheme!r}")
    if is_fsdp2(model):
        from sparsync.integrations import fsdp2  # loads torch's FSDP

        return fsdp2.attach_fsdp2(
            model, scheme, replicate=replicate, optimizer=optimizer, scaler=scaler, timeout_s=timeout_s
        )
    if isinstance(model, DistributedDataParallel) and replicate is not None:
        raise ValueError("replicate names an axis of an FSDP2 model; leave it out for a DistributedDataParallel one")
    if isinstance(model, DistributedDataParallel):
        return ddp.attach(model, scheme, optimizer=optimizer, scaler=scaler, timeout_s=timeout_s)
    raise TypeError(
        f"attach takes a model wrapped by DistributedDataParallel or fully_shard, got {type(model).__name__}; wrap it first"
    )

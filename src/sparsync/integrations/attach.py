"""The integration for models that torch has wrapped: DistributedDataParallel, or fully_shard."""

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.integrations import ddp
from sparsync.integrations.findings import Axis, given_or_default, is_fsdp2
from sparsync.integrations.handle import AttachedHandle
from sparsync.integrations.ownership import check_free, take
from sparsync.integrations.parameter_format import ParameterFormat
from sparsync.integrations.parameter_names import inside_wrappers
from sparsync.wire.values import Values


def attach(
    model: nn.Module,
    scheme: Scheme | None = None,
    *,
    replicate: Axis | None = None,
    parameters: Values | ParameterFormat | None = None,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    timeout_s: float = 300.0,
    join_mb: float | None = None,
    dense_below: int | None = None,
) -> AttachedHandle:
    """Make `model` reduce its gradients with `scheme`, and return the handle to its reports and state.

    Without `scheme` it is the one that the environment variable SPARSYNC_SCHEME has as a text that `sparsync.scheme` takes, and `Dense()`
    where that is not set: `sparsync launch --scheme` sets it.
    `model` is wrapped by DistributedDataParallel or by fully_shard, also inside or around torch.compile, and inside what the
    `setup` of Lightning's Fabric returns; see `integrations.ddp.attach` and `integrations.fsdp2.attach_fsdp2`.
    `replicate` is for FSDP2: the axis of a mesh, or the process group, over which every rank has the same shard.
    So is `parameters`: how the shard axis exchanges parameters; None is FSDP2's own all-gather.
    With `optimizer`, residuals follow its learning rates, down to a tenth of the highest one, and it is warned of where it does not go
    with the scheme; with `scaler` they follow its loss scale. A rank that waits longer than `timeout_s` seconds for the others gives up.
    `join_mb` and `dense_below` are for DistributedDataParallel, see there.
    Collective over the ranks that reduce: call it on all of them, each with an instance of its own with the same settings. An instance
    holds the residuals of one model: it serves one handle at a time, and after `handle.close()` or `handle.detach()` the same model only.
    Warns of what `doctor` warns of. Raises what `doctor` says is refused, TypeError for another model and for anything but a Scheme,
    ValueError for a scheme that another handle drives or that holds another model's residuals, and
    RuntimeError when the ranks come with different schemes or, on a replicate axis, different parameters.
    """
    scheme = given_or_default(scheme)
    model = inside_wrappers(model)
    if is_fsdp2(model):
        if join_mb is not None or dense_below is not None:
            raise ValueError(
                "join_mb and dense_below are about the buckets of DistributedDataParallel; FSDP2 has none, leave them out"
            )
        from sparsync.integrations import fsdp2  # loads torch's FSDP

        if replicate is not None:  # a shard axis has a form of its own of the scheme
            check_free(scheme, model)
        handle = fsdp2.attach_fsdp2(
            model,
            scheme,
            replicate=replicate,
            parameters=parameters,
            optimizer=optimizer,
            scaler=scaler,
            timeout_s=timeout_s,
        )
        take(handle.scheme, handle, model)
        return handle
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"attach takes a model wrapped by DistributedDataParallel or fully_shard, got {type(model).__name__}; "
            "wrap it, or reduce the bare module with sparsync.GradientReducer"
        )
    if replicate is not None:
        raise ValueError("replicate is an axis of an FSDP2 model; leave it out for DistributedDataParallel")
    if parameters is not None:
        raise ValueError("DistributedDataParallel gathers no parameters; leave parameters= out")
    return ddp.attach(
        model,
        scheme,
        optimizer=optimizer,
        scaler=scaler,
        timeout_s=timeout_s,
        join_mb=ddp.JOIN_MB if join_mb is None else join_mb,
        dense_below=ddp.DENSE_BELOW if dense_below is None else dense_below,
    )

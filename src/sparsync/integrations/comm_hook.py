"""The integration for trainers that register a communication hook themselves: DDP's pair of a state and a hook."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.integrations.ddp import DENSE_BELOW, JOIN_MB, DdpHandle, opened, reduce_bucket
from sparsync.integrations.findings import given_or_default, optimizers, patterns, warn_of
from sparsync.integrations.hook_state import HookState
from sparsync.integrations.ownership import check_free, take
from sparsync.integrations.parameter_names import named_parameters


class CommHook(NamedTuple):
    """A communication hook, as `DistributedDataParallel.register_comm_hook(state, hook)` takes it."""

    state: HookState
    hook: Callable[..., object]  # (state, bucket) -> Future[Tensor]; DDP looks at its annotations


def ddp_comm_hook(
    scheme: Scheme | None = None,
    module: nn.Module | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    timeout_s: float = 300.0,
    join_mb: float = JOIN_MB,
    dense_below: int = DENSE_BELOW,
) -> CommHook:
    """Return the state and the hook with which `scheme` reduces: `model.register_comm_hook(*sparsync.ddp_comm_hook(scheme))`.

    For trainers that take such a pair; `sparsync.attach` does more, so prefer it where you have the DistributedDataParallel model. The
    pair is for one model, and the backward pass of a second one raises. Nothing is sent before the first bucket, which makes the handle
    on all ranks; afterwards it is `state.handle`. To load a checkpoint before the first step, call `state.open()` on all ranks, after
    init_process_group; it returns the handle.
    Without `scheme` it is that of the environment variable SPARSYNC_SCHEME, or `Dense()`, as for `attach`.
    `group` is the model's process group, None the default one. The other arguments are those of `sparsync.attach`.

    What a hook is not told, and so is missing here:

    - Names. Without `module`, the bare model whose parameters DDP reduces, they are called parameter0, parameter1, ... in the order of
      the first step's buckets, and patterns such as `protect=` and PerParameter's match nothing else. A checkpoint then fits a
      model whose first step has the same buckets: the same `bucket_cap_mb`, and no other parameters trained.
    - The model. `sparsync.doctor` was not asked: what `attach` refuses shows when the first bucket comes, or not at all.
    - The default group, where the model has another one: pass it.

    Raises TypeError for anything but a Scheme, and ValueError for one that another handle drives. Warns as `attach` of `optimizer`, and of
    patterns that match no parameter of `module`.
    """
    scheme = given_or_default(scheme)
    check_free(scheme, module)
    names = [name for name, _ in named_parameters(module)] if module is not None else None
    for finding in [*optimizers(optimizer, scheme), *(patterns(names, scheme) if names is not None else ())]:
        warn_of(finding)
    make = partial(_opened, scheme, module, optimizer, scaler, timeout_s, join_mb, dense_below)
    return CommHook(HookState(group, make), reduce_bucket)


def _opened(
    scheme: Scheme,
    module: nn.Module | None,
    optimizer: Optimizer | None,
    scaler: GradScaler | None,
    timeout_s: float,
    join_mb: float,
    dense_below: int,
    hook: HookState,
) -> DdpHandle:
    check_free(scheme, module)
    parameters = dict(named_parameters(module)) if module is not None else {}
    handle = opened(
        scheme,
        hook,
        {id(parameter): name for name, parameter in parameters.items()},
        optimizer=optimizer,
        scaler=scaler,
        timeout_s=timeout_s,
        join_mb=join_mb,
        dense_below=dense_below,
    )
    take(scheme, handle, module)
    handle.shapes = {name: list(each.shape) for name, each in parameters.items()}
    return handle

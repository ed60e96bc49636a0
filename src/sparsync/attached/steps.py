"""The integration that exchanges the steps of an optimizer: for DistributedDataParallel, FSDP2 with replicas, and bare modules."""

import logging
import weakref
from collections.abc import Sequence
from dataclasses import fields
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparsync.attached.ddp import GradBucket, HookState, Promised, ignored, register, registered_hook
from sparsync.base.scheme import Scheme
from sparsync.exchanges.adamw_steps import AdamWSteps
from sparsync.exchanges.exchanged_steps import Steps
from sparsync.exchanges.rules import optimizers_of, rules_of
from sparsync.exchanges.training_loop import Replica
from sparsync.runtime.dispatcher import future_on, promise
from sparsync.runtime.findings import Axis, Finding, is_fsdp2, warn_of

_LOG = logging.getLogger("sparsync")


class OwnGradients:
    """What DDP's hook has in the place of a handle that reduces: it hands back each bucket, with this rank's own gradients."""

    def __init__(self, handle: AdamWSteps, model: DistributedDataParallel) -> None:
        self._handle, self._model = handle, weakref.ref(model)

    @property
    def closed(self) -> bool:
        return self._handle.closed

    def submit(self, bucket: GradBucket) -> Promised:
        """Return the future of the bucket itself."""
        done = future_on(bucket.buffer().device)
        done.set_result(bucket.buffer())
        model = self._model()
        if self.closed:
            return promise(
                done, ["this handle was closed, and its ranks would part; call detach() instead, or attach again"]
            )
        if model is not None and model._join_config.enable:
            return promise(
                done,
                [
                    "a rank that has joined takes no steps, and the others would wait for it; leave join() out, or attach with "
                    "exchange=sparsync.Gradients()"
                ],
            )
        return done


def attach(
    model: nn.Module,
    called: nn.Module,
    scheme: Scheme,
    optimizer: Optimizer | Sequence[Optimizer],
    exchange: Steps,
    replicate: Axis | None,
    scaler: GradScaler | None,
    timeout_s: float,
) -> AdamWSteps:
    """Have the steps of `optimizer` for `model` exchanged, and return the handle. See `attach.attach`.

    `called` is `model`, or what torch.compile or Fabric made of it. Under DistributedDataParallel each rank keeps its own gradients: the
    hook hands back every bucket.
    """
    inner = optimizers_of(optimizer)
    rules_of(inner)
    kinds = " and ".join(type(each).__name__ for each in inner)
    if any(state for each in inner for state in each.state.values()):
        warn_of(
            Finding(
                f"this {kinds} has moments of earlier steps, and exchanged steps begin with new ones",
                "attach before the first step, and load a checkpoint of the handle",
            )
        )
    replica, group = _replica(model, called, replicate)
    options = {each.name: getattr(exchange, each.name) for each in fields(exchange)}
    handle = AdamWSteps(
        replica.module, inner, scheme, group=group, timeout_s=timeout_s, scaler=scaler, replica=replica, **options
    )
    handle.origin = "sparsync.attach"
    if isinstance(model, DistributedDataParallel):
        _keep_own_gradients(model, handle)
    _LOG.info("the steps of %s are exchanged by %s: %s", kinds, scheme.config_fingerprint(), exchange)
    return handle


def _replica(model: nn.Module, called: nn.Module, replicate: Axis | None) -> tuple[Replica, dist.ProcessGroup | None]:
    """Return what this rank has of a copy of the model, and the ranks that have the same of others."""
    if is_fsdp2(model):
        from sparsync.attached.fsdp2_steps import ShardedReplica  # loads torch's FSDP

        sharded = ShardedReplica(model, [called], replicate)
        return sharded, sharded.replicas
    if not isinstance(model, DistributedDataParallel):
        return Replica(model, [called]), None
    if left_alone := ignored(model.module):
        raise ValueError(
            f"DDP ignores {', '.join(sorted(left_alone))}, and steps are exchanged of all trained parameters; freeze these, or "
            "attach with exchange=sparsync.Gradients()"
        )
    return Replica(model.module, [called, model]), model.process_group


def _keep_own_gradients(model: DistributedDataParallel, handle: AdamWSteps) -> None:
    """Have the hook of `model` hand back each rank's own gradients until `handle` is detached."""
    hook = registered_hook(model) or HookState(model.process_group)
    own = OwnGradients(handle, model)
    register(model, hook)
    hook.handle = own
    handle.on_detach = partial(hook.release, own)

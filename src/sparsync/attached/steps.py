"""The integration that exchanges steps or weight changes: for DistributedDataParallel, FSDP2 with replicas, and bare modules."""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from sparsync.attached.ddp import GradBucket, HookState, Promised, ignored, register, registered_hook
from sparsync.base.scheme import Scheme
from sparsync.exchanges.adamw_steps import AdamWSteps
from sparsync.exchanges.choice import Optimizers
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.exchanges.rules import optimizers_of
from sparsync.exchanges.step_method import StepMethod
from sparsync.exchanges.steps_options import LocalSteps, Steps
from sparsync.exchanges.training_loop import Replica
from sparsync.runtime.findings import Axis, Finding, is_fsdp2, warn_of
from sparsync.runtime.options import Options
from sparsync.runtime.step_in_flight import future_on, promise

_LOG = logging.getLogger("sparsync")


class OwnGradients:
    """Stands in DDP's hook where a handle that reduces would: it hands back each bucket with this rank's own gradients."""

    def __init__(self, handle: StepMethod, model: DistributedDataParallel) -> None:
        # Weakly: DDP's reducer holds this, and Python finds no cycle through it. The optimizer holds the handle.
        self._handle, self._model = weakref.ref(handle), weakref.ref(model)

    @property
    def closed(self) -> bool:
        return (handle := self._handle()) is None or handle.closed

    def submit(self, bucket: GradBucket) -> Promised:
        """Return a finished future of the bucket."""
        done = future_on(bucket.buffer().device)
        done.set_result(bucket.buffer())
        model = self._model()
        if self.closed:
            return promise(
                done, ["this handle is closed, so ranks would differ; call detach() instead, or attach again"]
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


class _Together(Replica):
    """Several models that one optimizer trains. The names of a model's parameters begin with its number."""

    def __init__(self, parts: Sequence[Replica]) -> None:
        super().__init__(nn.ModuleList([each.module for each in parts]))
        self.bodies = [body for each in parts for body in each.bodies]
        self.called = [module for each in parts for module in each.called]


def attach(
    models: Sequence[nn.Module],
    called: Sequence[nn.Module],
    scheme: Scheme,
    optimizer: Optimizers,
    exchange: Steps | LocalSteps,
    group: dist.ProcessGroup | None,
    scaler: GradScaler | None,
    options: Options,
) -> AdamWSteps | LocalTraining:
    """Exchange the steps of `optimizer` for `models`, or the changes of their weights; return the handle. See `attach.attach`.

    `called` are the models as the loop calls them, which torch.compile or Fabric may have wrapped. `group` is for bare models. Under
    DistributedDataParallel each rank keeps its own gradients: the hook hands back every bucket. All else happens in `optimizer.step()`, see
    `exchanges.adamw_steps` and `exchanges.local_steps`.
    """
    parts = [_replica(model, each, options.replicate, group) for model, each in zip(models, called, strict=True)]
    replica, group = parts[0]
    if len(parts) > 1:
        replica = _Together([each for each, _ in parts])
    given = {each.name: getattr(exchange, each.name) for each in fields(exchange)}
    given |= {"group": group, "timeout_s": options.timeout_s, "replica": replica, "scaler": scaler}
    inner = optimizers_of(optimizer)
    if isinstance(exchange, Steps):
        handle, what = AdamWSteps(replica.module, optimizer, scheme, **given), "the steps"
    else:
        handle, what = _local(LocalTraining(replica.module, optimizer, scheme, **given)), "the weight changes"
    handle.origin = "sparsync.attach"
    handle.on_detach = [
        _keep_own_gradients(each, handle) for each in models if isinstance(each, DistributedDataParallel)
    ]
    kinds = " and ".join(type(each).__name__ for each in inner)
    exchange = replace(exchange, keep=exchange.keep_for(scheme))
    _LOG.info("%s of %s are exchanged by %s: %s", what, kinds, scheme, exchange)
    return handle


def _local(handle: LocalTraining) -> LocalTraining:
    """Count the steps that the optimizers take themselves, and warn of those that call no hooks."""
    if silent := handle.count_with_optimizers():
        what = f"{' and '.join(silent)} calls no hooks of torch.optim.Optimizer, so its steps go unnoticed"
        warn_of(Finding(what, "call handle.step() after all optimizers have stepped, on every rank"))
    return handle


def _replica(
    model: nn.Module, called: nn.Module, replicate: Axis | None, group: dist.ProcessGroup | None
) -> tuple[Replica, dist.ProcessGroup | None]:
    """Return this rank's part of one copy of the model, and the ranks that have the same part of the other copies."""
    if is_fsdp2(model):
        from sparsync.attached.fsdp2_steps import ShardedReplica  # loads torch's FSDP

        sharded = ShardedReplica(model, [called], replicate)
        return sharded, sharded.replicas
    if not isinstance(model, DistributedDataParallel):
        return Replica(model, [called]), group
    if left_alone := ignored(model):
        raise ValueError(
            f"DDP ignores {', '.join(sorted(left_alone))}, and exchanged steps include all trained parameters; freeze these, or "
            "attach with exchange=sparsync.Gradients()"
        )
    return Replica(model.module, [called, model]), model.process_group


def _keep_own_gradients(model: DistributedDataParallel, handle: StepMethod) -> Callable[[], None]:
    """Make the hook of `model` hand back each rank's own gradients; return a function that undoes it."""
    hook = registered_hook(model) or HookState(model.process_group)
    own = OwnGradients(handle, model)
    register(model, hook)
    hook.handle = own
    broadcasts = model.broadcast_buffers
    if isinstance(handle, LocalTraining):  # exchanges buffers itself, and less often
        # HACK: DDP has this as an argument only. Price: the attribute may change with torch; a test counts broadcasts.
        model.broadcast_buffers = False
    return partial(_give_back, weakref.ref(model), hook, own, broadcasts)


def _give_back(
    reference: "weakref.ref[DistributedDataParallel]", hook: HookState, own: OwnGradients, broadcasts: bool
) -> None:
    hook.release(own)
    if (model := reference()) is not None:
        model.broadcast_buffers = broadcasts

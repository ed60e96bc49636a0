"""The integration for DistributedDataParallel: a hook, registered once."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from sparsync.attached.joining import Joining
from sparsync.base.error_feedback import ErrorFeedbackScheme
from sparsync.base.scheme import Scheme
from sparsync.core import Bucket, Comm, laid_out
from sparsync.runtime.handle import AttachedHandle
from sparsync.runtime.options import GradientOptions
from sparsync.runtime.parameters import check_undriven, named_parameters, plain_name, trained
from sparsync.runtime.restorable import Snapshot
from sparsync.schemes.dense import Dense

GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]  # public, but missing from torch's __all__
Promised = torch.futures.Future[Tensor]

DENSE_JOIN = 2**18  # bytes up to which Dense joins buckets: beyond, copies cost more than they save


class HookState:
    """The state that DDP passes to the hook with each bucket: DDP keeps its one hook, and the handle in this state changes.

    Without a handle, as after a detach, one all-reduce averages a bucket. A copy has no handle, and is not registered, because a copy of a
    DistributedDataParallel model has no hook.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group  # None: the default group
        self.handle: Any = None  # Any: a DdpHandle, or OwnGradients for steps
        self.registered = False  # with a reducer of DDP

    def __reduce__(self) -> tuple[Any, ...]:  # Any: as object.__reduce__
        return HookState, ()

    @property
    def free(self) -> bool:
        """True if `attach` may give it another handle."""
        return self.handle is None or self.handle.closed

    def submit(self, bucket: GradBucket) -> Promised:
        """Submit a bucket; return the future of the reduced one."""
        if self.handle is None:
            return default_hooks.allreduce_hook(self.group, bucket)  # pyright: ignore[reportArgumentType]  # may be None
        return self.handle.submit(bucket)

    def release(self, handle: object) -> None:
        """Reduce densely from here on, if `handle` is in use."""
        if self.handle is handle:
            self.handle = None


class DdpHandle(AttachedHandle):
    """The handle of a DistributedDataParallel model."""

    switches = True

    def __init__(
        self,
        *args: Any,  # the arguments of Handle
        hook: HookState,
        module: nn.Module,
        driven: Sequence[tuple[str, nn.Parameter]],
        left_alone: Collection[str],
        given: GradientOptions,
    ) -> None:
        super().__init__(*args, module=module, driven=driven)
        self._ignored = left_alone
        self._shapes = {name: list(each.shape) for name, each in named_parameters(module)}
        self._nbytes, self._dense_below = int(given.join_mb * 2**20), given.dense_below
        self._hook = weakref.ref(hook)  # the hook refers to this handle
        self._use(self.scheme)

    @property
    def closed(self) -> bool:
        return super().closed or self._hook() is None  # the DDP model is gone

    def layout(self) -> dict[str, list[int]]:
        return self._shapes

    def detach(self) -> None:
        """Average each bucket by one all-reduce from here on. Call it on all ranks, between two steps; safe to call again.

        Reports, summary and state stay readable; `set` and assigning a scheme raise RuntimeError. To continue with the residual,
        attach again, and give the new handle this one's `state_dict()`.
        """
        self._flight.flush()
        if (hook := self._hook()) is not None:
            hook.release(self)
        self._detached = True
        self.close()

    def state_dict(self) -> dict[str, Any]:  # Any: as Handle.state_dict
        """Return this rank's state, with the buckets of the last step. The first step after loading uses these again."""
        state = super().state_dict()
        return {**state, "buckets": [[key, list(names)] for key, names in self._joining.layout]}

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self._joining.want([(str(key), [str(name) for name in names]) for key, names in state.get("buckets", [])])

    def _regrouped(self, comm: Comm) -> None:
        if (hook := self._hook()) is not None:
            hook.group = None
        self._want_by_type()

    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        if snapshot.shared is not None:
            self._want_by_type()

    def _want_by_type(self) -> None:
        """Make the next step reduce one bucket per type and device, because DDP has other buckets on ranks that join."""
        module, names = self.module, defaultdict[tuple[str, torch.device], list[str]](list)
        for name, each in () if module is None else trained(module):
            if name not in self._ignored:
                names[f"{str(each.dtype).removeprefix('torch.')}/{each.device.type}", each.device].append(name)
        # Without device numbers, which differ between ranks.
        wanted = [(f"{kind}/{number}", members) for number, ((kind, _), members) in enumerate(names.items())]
        self._joining.want(wanted, always=True)

    def _use(self, scheme: Scheme) -> None:
        # A class that overrides `reduce` gets every bucket there.
        plain = type(scheme).reduce is ErrorFeedbackScheme.reduce
        below, flight, state = self._dense_below if plain and scheme.may_send_whole else 0, self._flight, self.state
        self._joining = Joining(
            lambda bucket, prepare: flight.submit(bucket, state, prepare, send_all=bucket.grad.numel() < below),
            self._nbytes if scheme.has_residual else min(self._nbytes, DENSE_JOIN) if type(scheme) is Dense else 0,
            getattr(self, "_joining", None),
        )

    def submit(self, bucket: GradBucket) -> Promised:
        """Submit one of DDP's buckets; return its future, which raises every failure."""
        try:
            if bucket.index() == 0:  # buckets are numbered within a backward pass, so a step begins
                self._go_back(self._step)
                self._loads.forget()
                self._step += 1
                self._joining.begin_step(self._rescaler.rescale)
            promised = self._joining.submit(self._bucket(bucket), bucket.is_last())
            if bucket.is_last():
                self._joining.end_step()
            return promised
        except Exception as error:  # a hook that raises breaks DDP's reducer permanently; a failed future does not
            self._joining.abandon(error)
            return self._failed(bucket.index(), error)

    def _failed(self, index: int, error: Exception) -> Promised:
        """Fail the step on all ranks, on the thread that closes connections; return a future that raises `error`."""
        cause = f"{type(error).__name__}: {error}"

        def fail() -> None:
            raise RuntimeError(f"the hook failed with {cause}")

        return self._flight.submit(Bucket(f"bucket{index}", torch.zeros(1), self._step), Dense().start(), fail)

    def _bucket(self, bucket: GradBucket) -> Bucket:
        layout = laid_out((self._rescaler.names[id(each)], each.shape) for each in bucket.parameters())
        return Bucket(f"bucket{bucket.index()}", bucket.buffer(), self._step, layout)


def attach(ddp_model: DistributedDataParallel, scheme: Scheme, options: GradientOptions) -> DdpHandle:
    """Reduce the gradients of `ddp_model` by `scheme`; return the handle to its reports and state. See `attach.attach`.

    Collective over the ranks of the model's process group. Threads reduce the buckets, which begin in order, on a private process group,
    while the backward pass continues; over gloo, one bucket is computed while others wait for other ranks. Buckets are joined for schemes
    with a residual, and for Dense up to 256 kB; topk, two_shot, in_turn, micro, exdyna, oktopk and their exact variants send buckets below
    `dense_below` whole, with their residual, in one all-reduce.
    Failures: if all ranks fail in the same step, the next step works, without what the failed one took from residuals.
    Comparison: before each bucket the ranks compare step, layout, scheme, shared state and optimizer settings, and every
    `check_weights_every` steps a digest of the parameters that DDP reduces. If they differ, all ranks raise a RuntimeError with the text of
    the RanksDifferError. On a model that used `join()` neither settings nor weights are compared.
    Checkpoints: a state has the buckets of the last step. The first step after loading reduces the same buckets after the backward pass, so
    the result is bit-identical to a run with rebuilt buckets.
    Copies: a copy of the model, by `copy.deepcopy`, `torch.save` or AveragedModel, reduces densely until you attach to it.
    `join()`: a rank without data still sends its residual, and the mean still divides by all ranks.
    `find_unused_parameters=True`: a parameter that no rank used in a step keeps its gradient; what the scheme sent for it is lost.
    """
    module, hook = ddp_model.module, registered_hook(ddp_model) or HookState(ddp_model.process_group)
    join_mb, dense_below = options.join_mb, options.dense_below
    if join_mb < 0 or dense_below < 0:
        raise ValueError(f"join_mb and dense_below must be at least 0, got {join_mb} and {dense_below}")
    reduced = weakref.ref(ddp_model)

    def compares() -> bool:
        # Joined ranks step neither optimizer nor schedule, and get another rank's weights at the end.
        return (model := reduced()) is None or not model._join_config.enable

    driven, left_alone = trained(module), ignored(ddp_model)
    check_undriven(driven)
    names = {id(each): name for name, each in named_parameters(module)}
    rescaler = options.rescaler(names)
    comparison = options.comparison(names, partial(_weights, weakref.ref(module), left_alone), compares)
    joins = f"buckets joined up to {join_mb:g} MB, sent whole below {dense_below} elements"
    comm = options.connected(hook.group, repr(scheme), joins)
    handle = DdpHandle(
        scheme,
        comm,
        rescaler,
        comparison,
        hook=hook,
        module=module,
        driven=driven,
        left_alone=left_alone,
        given=options,
    )
    register(ddp_model, hook)
    hook.handle = handle
    return handle


def register(ddp_model: DistributedDataParallel, hook: HookState) -> None:
    """Register `hook` with a model, unless it is registered already."""
    if not hook.registered:
        # A copied model lists a hook that its reducer does not have.
        ddp_model._comm_hooks = [each for each in ddp_model._comm_hooks if not isinstance(each[1], HookState)]
        ddp_model.register_comm_hook(hook, reduce_bucket)
        hook.registered = True


def registered_hook(model: DistributedDataParallel) -> HookState | None:
    """Find the state of sparsync's hook on this model; None if it has none."""
    states = [state for _, state in getattr(model, "_comm_hooks", ()) if isinstance(state, HookState)]
    return next((state for state in states if state.registered), None)


def reduce_bucket(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket. This is the hook, which DDP calls with each complete bucket, in order."""
    return state.submit(bucket)


def _weights(of: Callable[[], nn.Module | None], left_alone: Collection[str]) -> list[tuple[str, nn.Parameter]]:
    """List the parameters of a module that DDP keeps the same on all ranks."""
    module = of()
    return [] if module is None else [each for each in trained(module) if each[0] not in left_alone]


def ignored(model: DistributedDataParallel) -> set[str]:
    """Name the parameters that DDP was told to ignore."""
    return {plain_name(name) for name in model.parameters_to_ignore}

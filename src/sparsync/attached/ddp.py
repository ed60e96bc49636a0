"""The integration for DistributedDataParallel: a hook, registered once, or the pair of a state and a hook that trainers register."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from sparsync.attached.joining import Joining
from sparsync.base.error_feedback import ErrorFeedbackScheme
from sparsync.base.scheme import Scheme
from sparsync.core import Bucket, Comm, laid_out
from sparsync.exchanges.choice import Optimizers, choose, listed, optimizer_findings, recipe_findings
from sparsync.runtime.driven import check_undriven
from sparsync.runtime.findings import (
    check_model,
    not_floating,
    patterns,
    sparse_embeddings,
    unrelated,
    warn_or_raise,
)
from sparsync.runtime.handle import Gradients
from sparsync.runtime.options import GradientOptions, Options
from sparsync.runtime.parameter_names import named_parameters, plain_name, trained
from sparsync.runtime.snapshot import Snapshot
from sparsync.runtime.step_in_flight import AttachedHandle, future_on, promise
from sparsync.schemes.dense import Dense

GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]  # public, but missing from torch's __all__
Promised = torch.futures.Future[Tensor]

JOIN_MB = 4.0
DENSE_JOIN = (
    2**18
)  # bytes up to which buckets without a residual are joined, whose copies cost more than they save beyond
DENSE_BELOW = 1024


class HookState:
    """What DDP passes to the hook with each bucket: DDP keeps its one hook, and this state changes.

    `handle` is None before `open`, and after a detach, when buckets are averaged by one all-reduce. A copy has no handle, as a copy of a
    DistributedDataParallel model has no hook. But a pickled state of the default group that was not opened yet can be opened: trainers
    that start processes pass it to them.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, make: Callable[["HookState"], "DdpHandle"] | None = None
    ) -> None:
        self.group = group  # None: the default one
        self.handle: Any = None  # Any: a DdpHandle, or None
        self.registered = False  # with a reducer of DDP, by `attach`
        self._make = make
        self._refused = ""
        self._seen: dict[int, weakref.ref[Tensor]] = {}  # the parameters whose gradients came, by id
        self._other_model = False  # this backward pass is of another model

    def __reduce__(self) -> tuple[Any, ...]:  # Any: as object.__reduce__
        keeps = self._make is not None and self.handle is None and self.group is None
        return HookState, (None, self._make) if keeps else ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "HookState":
        return HookState()

    @property
    def free(self) -> bool:
        """True if `attach` may give it another handle."""
        return self._make is None if self.handle is None else self.handle.closed

    def open(self) -> "DdpHandle":
        """Return the handle. The first call makes it, which is collective over the ranks of the group.

        The first bucket calls this; call it yourself to load a checkpoint before. Raises as `sparsync.attach`, and RuntimeError after a
        detach.
        """
        if self.handle is None:
            if self._make is None:
                raise RuntimeError("this hook was detached, or copied; call sparsync.attach on the model")
            self.handle = self._make(self)
        return self.handle

    def submit(self, bucket: GradBucket) -> Promised:
        """Return the future of the reduced bucket."""
        if self.handle is None and self._make is None:
            return default_hooks.allreduce_hook(self.group, bucket)  # pyright: ignore[reportArgumentType]  # may be None
        try:
            if self._refused:
                raise RuntimeError(self._refused)
            self._check_model(bucket)
            handle = self.open()
        except Exception as error:  # a hook that raises breaks DDP's reducer permanently; a failed future does not
            if not self._other_model:  # that error is not the first model's
                self._refused = str(error)
            done = future_on(bucket.buffer().device)
            done.set_result(bucket.buffer())
            return promise(done, [str(error)])
        return handle.submit(bucket)

    def _check_model(self, bucket: GradBucket) -> None:
        """Raise ValueError for a bucket of another model: each backward pass of the same one begins with a known parameter."""
        parameters = bucket.parameters()
        known = [each for each in parameters if (seen := self._seen.get(id(each))) is not None and seen() is each]
        if bucket.index() == 0:
            self._other_model = bool(self._seen) and not known
        if self._other_model:
            raise ValueError(
                "this pair of a state and a hook reduces another model already, and two models would mix their residuals in it; "
                "make a pair for each model: sparsync.ddp_comm_hook(scheme), one after the other"
            )
        if len(known) < len(parameters):
            self._seen |= {id(each): weakref.ref(each) for each in parameters}

    def release(self, handle: object) -> None:
        """Reduce densely from now on, if `handle` is in use."""
        if self.handle is handle:
            self.handle = self._make = None


class DdpHandle(AttachedHandle):
    """The handle of a DistributedDataParallel model. Unnamed parameters get a name with their first bucket."""

    switches = True

    def __init__(
        self,
        *args: Any,  # as those of Handle
        hook: HookState,
        module: nn.Module | None,
        driven: Sequence[tuple[str, nn.Parameter]],
        join_mb: float,
        dense_below: int,
    ) -> None:
        super().__init__(*args, module=module, driven=driven)
        self._ignored = ignored(module)
        named = () if module is None else named_parameters(module)
        self.shapes = {name: list(each.shape) for name, each in named}  # of the parameters
        self._nbytes, self._dense_below = int(join_mb * 2**20), dense_below
        self._hook = weakref.ref(hook)  # which holds this handle
        self._use(self.scheme)

    @property
    def closed(self) -> bool:
        return super().closed or self._hook() is None  # the DDP model is gone

    def layout(self) -> dict[str, list[int]]:
        return self.shapes

    def detach(self) -> None:
        """Have DDP average each bucket by one all-reduce from now on. Call it on all ranks, between two steps; safe to call again.

        Reports, summary and state stay readable; `set`, `switch` and assigning a scheme raise RuntimeError. To continue with the residual,
        attach again, and give the new handle this one's `state_dict()`.
        """
        self._flight.flush()
        if (hook := self._hook()) is not None:
            hook.release(self)
        self._detached = True
        self.close()

    def state_dict(self) -> dict[str, Any]:  # Any: as Handle.state_dict
        """Return this rank's state, with the buckets of the last step, which the first step after loading it uses again."""
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
        """Have the next step reduce one bucket for each type and device: ranks that join have other buckets of DDP than the others."""
        module, names = self.module, defaultdict[tuple[str, torch.device], list[str]](list)
        if module is None:
            return
        whole = {id(each.weight) for _, each in sparse_embeddings(module)}
        for name, each in trained(module):
            if id(each) not in whole and name not in self._ignored:
                names[f"{str(each.dtype).removeprefix('torch.')}/{each.device.type}", each.device].append(name)
        # The number of a device differs between ranks.
        wanted = [(f"{kind}/{number}", found) for number, ((kind, _), found) in enumerate(names.items())]
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
        """Return the future of one of DDP's buckets; it raises every failure."""
        try:
            if bucket.index() == 0:  # buckets are numbered within a backward pass, so a step begins
                self._go_back(self._step)
                self._loads.forget()
                self._step += 1
                self._joining.begin_step(self._rescaler.rescale)
            if bucket.buffer().is_sparse:
                promised = self._submit_sparse(bucket)
            else:
                promised = self._joining.submit(self._bucket(bucket, bucket.buffer()), bucket.is_last())
            if bucket.is_last():
                self._joining.end_step()
            return promised
        except Exception as error:  # a hook that raises breaks DDP's reducer permanently; a failed future does not
            self._joining.abandon(error)
            return self._failed(bucket.index(), error)

    def _failed(self, index: int, error: Exception) -> Promised:
        """Return a future that raises `error`, and fail the step on all ranks, on the thread that closes connections."""
        cause = f"{type(error).__name__}: {error}"

        def fail() -> None:
            raise RuntimeError(f"the hook failed with {cause}")

        return self._flight.submit(Bucket(f"bucket{index}", torch.zeros(1), self._step), Dense().start(), fail)

    def _submit_sparse(self, bucket: GradBucket) -> Promised:
        """Reduce a sparse gradient in full. DDP gives each a separate bucket."""
        self._joining.flush()
        sparse, rescale = bucket.buffer(), self._rescaler.rescale if bucket.index() == 0 else None
        whole = self._bucket(bucket, torch.zeros(sparse.shape, dtype=sparse.dtype, device=sparse.device).flatten())

        def prepare() -> None:  # on the thread that reduces, so that a failure ends the step on all ranks
            whole.grad.copy_(sparse.to_dense().flatten())
            if rescale is not None:
                rescale()

        reduced = self._flight.submit(whole, Dense().start(), prepare)
        return reduced.then(lambda done: done.value().view(sparse.shape).to_sparse(sparse.sparse_dim()))

    def _bucket(self, bucket: GradBucket, grad: Tensor) -> Bucket:
        layout = laid_out((self._name(each), each.shape) for each in bucket.parameters())
        return Bucket(f"bucket{bucket.index()}", grad, self._step, layout)

    def _name(self, parameter: Tensor) -> str:
        """Return the name of a parameter; number unnamed ones in the order in which they first come."""
        names = self._rescaler.names
        name = names.get(id(parameter))
        if name is None:
            name = names[id(parameter)] = f"parameter{len(self.shapes)}"
            self.shapes[name] = list(parameter.shape)
        return name


def attach(ddp_model: DistributedDataParallel, scheme: Scheme, options: GradientOptions) -> DdpHandle:
    """Make `ddp_model` reduce its gradients with `scheme`, and return the handle to its reports and state. See `attach.attach`.

    Collective over the ranks of the model's process group. Threads reduce the buckets, which begin in order, on a private process group,
    while the backward pass continues; over gloo, one bucket is computed while others wait for other ranks. Buckets are joined for schemes
    with a residual, and for Dense up to 256 kB; topk, two_shot, in_turn, micro, exdyna and oktopk send those below `dense_below` whole,
    with their residual, in one all-reduce.
    Failures: if all ranks fail in the same step, the next step works, without what the failed one took from residuals.
    Comparison: before each bucket the ranks compare step, layout, scheme, shared state and optimizer settings, and every
    `check_weights_every` steps a digest of the parameters that DDP reduces. If they differ, all ranks raise a RuntimeError with the text of
    the RanksDifferError. On a model that used `join()` neither settings nor weights are compared.
    Checkpoints: a state has the buckets of the last step. The first step after loading it reduces the same ones after the backward pass, so
    the result is bit-identical to a run with rebuilt buckets.
    Copies: a copy of the model, by `copy.deepcopy`, `torch.save` or AveragedModel, reduces densely until you attach to it.
    `join()`: a rank without data still sends its residual, and the mean still divides by all ranks.
    `find_unused_parameters=True`: a parameter that no rank used in a step keeps its gradient; what the scheme sent for it is lost.
    A sparse gradient of an embedding is reduced in full; its report says "dense".
    """
    hook = registered_hook(ddp_model) or HookState(ddp_model.process_group)
    reduced = weakref.ref(ddp_model)

    def compares() -> bool:
        # Ranks that have joined step neither optimizer nor schedule, and get another rank's weights at the end.
        return (model := reduced()) is None or not model._join_config.enable

    handle = opened(scheme, ddp_model.module, options, hook, compares)
    register(ddp_model, hook)
    hook.handle = handle
    return handle


def register(ddp_model: DistributedDataParallel, hook: HookState) -> None:
    """Register `hook` with a model, unless it is already."""
    if not hook.registered:
        # The reducer of a copied model has no hook, but its list has.
        ddp_model._comm_hooks = [each for each in ddp_model._comm_hooks if not isinstance(each[1], HookState)]
        ddp_model.register_comm_hook(hook, reduce_bucket)
        hook.registered = True


class CommHook(NamedTuple):
    """A communication hook, as `DistributedDataParallel.register_comm_hook(state, hook)` takes it."""

    state: HookState
    hook: Callable[..., object]  # (state, bucket) -> Future[Tensor]; DDP looks at its annotations


def ddp_comm_hook(
    scheme: Scheme | None = None,
    module: nn.Module | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    optimizer: Optimizers | None = None,
    scaler: GradScaler | None = None,
    options: Options = Options(),
) -> CommHook:
    """Return the state and the hook with which `scheme` reduces: `model.register_comm_hook(*sparsync.ddp_comm_hook(scheme))`.

    Only for trainers that take such a pair and nothing else; wherever you have the DistributedDataParallel model, use `sparsync.attach`.
    A pair is for one model, and the backward pass of a second one raises. The first bucket makes the handle on all ranks; afterwards it is
    `state.handle`. To load a checkpoint before the first step, call `state.open()` on all ranks after init_process_group; it returns the
    handle.

    A hook sees DDP's gradient buckets and nothing else. Compared with `attach`, it lacks:

    - Steps and local steps. It exchanges gradients only, which costs AdamW quality if they are sparse; there are no own weights.
    - Clipping and learning rates. Residuals follow them, and ranks compare settings, only if you pass `optimizer` yourself.
    - Names. Without `module`, parameters are called parameter0, parameter1, ... in the order of the first step's buckets, and patterns such
      as `protect=` match nothing else. A checkpoint then fits only a model whose first step has the same buckets: the same `bucket_cap_mb`
      and the same trained parameters.
    - The model. What `attach` refuses shows with the first bucket, or not at all.
    - `join()`. Ranks without data step neither optimizer nor schedule, and then they differ: leave `optimizer` out, and pass
      `check_weights_every=0`.

    Args:
        scheme: as for `sparsync.attach`, like all arguments after `group`.
        module: the bare model whose parameters DDP reduces.
        group: the model's process group. None: the default one.

    Raises:
        TypeError: for anything but a Scheme, a module and an optimizer.
        ValueError: for a model that another handle drives.
    """
    chosen = choose(scheme, None, Gradients(), optimizer)
    scheme = chosen.scheme
    if module is not None:
        check_model(module)
    driven = [] if module is None else trained(module)
    check_undriven(driven)
    names = [name for name, _ in named_parameters(module)] if module is not None else None
    warn_or_raise(
        [
            *not_floating(each for each in driven if each[0] not in ignored(module)),
            *recipe_findings(chosen, optimizer, None),
            *optimizer_findings(optimizer, scheme),
            *unrelated(optimizer, {id(each) for _, each in driven}),
            *(patterns(names, scheme) if names is not None else ()),
        ]
    )
    given = GradientOptions(**vars(options), optimizers=listed(optimizer), scaler=scaler)
    return CommHook(HookState(group, partial(opened, scheme, module, given)), reduce_bucket)


def opened(
    scheme: Scheme,
    module: nn.Module | None,
    options: GradientOptions,
    hook: HookState,
    compares: Callable[[], bool] = lambda: True,
) -> DdpHandle:
    """Return a handle that reduces what `hook` gets, with separate connections. Collective over the ranks of the hook's group.

    `module` is the bare model, if it is known. While `compares` returns False, settings and weights are not compared.
    """
    join_mb = JOIN_MB if options.join_mb is None else options.join_mb
    dense_below = DENSE_BELOW if options.dense_below is None else options.dense_below
    if not 0 <= join_mb < float("inf"):
        raise ValueError(f"join_mb must be in [0, inf), the megabytes up to which buckets are joined, got {join_mb}")
    if dense_below < 0:
        raise ValueError(f"dense_below must be at least 0 elements, got {dense_below}")
    driven = [] if module is None else trained(module)
    check_undriven(driven)
    names = {} if module is None else {id(each): name for name, each in named_parameters(module)}
    rescaler = options.rescaler(names)
    weights = None if module is None else partial(_weights, weakref.ref(module))
    comparison = options.comparison(names, weights, compares)
    joins = f"buckets joined up to {join_mb:g} MB, sent whole below {dense_below} elements"
    comm = options.connected(hook.group, repr(scheme), joins)
    joining = {"join_mb": join_mb, "dense_below": dense_below}
    return DdpHandle(scheme, comm, rescaler, comparison, hook=hook, module=module, driven=driven, **joining)


def registered_hook(model: DistributedDataParallel) -> HookState | None:
    """Return the state of sparsync's hook on this model; None if it has none."""
    states = [state for _, state in getattr(model, "_comm_hooks", ()) if isinstance(state, HookState)]
    return next((state for state in states if state.registered), None)


def reduce_bucket(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket. This is the hook, which DDP calls with each complete bucket, in order."""
    return state.submit(bucket)


def _weights(of: Callable[[], nn.Module | None]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a module that DDP keeps the same on all ranks."""
    module = of()
    left_alone = ignored(module)
    return [] if module is None else [(name, each) for name, each in trained(module) if name not in left_alone]


def ignored(module: nn.Module | None) -> set[str]:
    """Return the names of the parameters that DDP was told to leave alone."""
    # HACK: torch has no public function for this. Price: a name that torch may change.
    return {plain_name(name) for name in getattr(module, "_ddp_params_and_buffers_to_ignore", ())}

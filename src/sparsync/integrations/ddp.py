"""The integration for DistributedDataParallel: one hook, registered once."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparsync.base.error_feedback import ErrorFeedbackScheme
from sparsync.base.scheme import Scheme
from sparsync.comm.group import GroupComm
from sparsync.core import Bucket, laid_out
from sparsync.integrations.doctor import ddp_hook, doctor
from sparsync.integrations.findings import given_or_default, warn_of
from sparsync.integrations.handle import AttachedHandle
from sparsync.integrations.hook_state import HookState
from sparsync.integrations.joining import Joining
from sparsync.integrations.ownership import check_free, take
from sparsync.integrations.parameter_names import named_parameters
from sparsync.integrations.residual_units import ResidualRescaler
from sparsync.schemes.dense import Dense

GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]  # public, but missing from torch's __all__


JOIN_MB = 4.0
DENSE_BELOW = 1024


class DdpHandle(AttachedHandle):
    """The handle of a DistributedDataParallel model. Parameters without a name get one when they first come."""

    switches = True

    def __init__(
        self,
        scheme: Scheme,
        comm: GroupComm,
        rescaler: ResidualRescaler,
        hook: HookState,
        join_mb: float = 0.0,
        dense_below: int = 0,
    ) -> None:
        super().__init__(scheme, comm, rescaler)
        self.shapes: dict[str, list[int]] = {}  # of the parameters, by name
        self._names = dict(rescaler.names)  # by id of the parameter
        self._nbytes, self._dense_below = int(join_mb * 2**20), dense_below
        self._hook = weakref.ref(hook)  # which holds this handle
        self._use(scheme)

    def layout(self) -> dict[str, list[int]]:
        return self.shapes

    def detach(self) -> None:
        """Have DDP reduce dense from now on: the plain mean of each bucket, with nothing of ours. Call it on all ranks, between two steps.

        Reports, summary and state stay readable; `set`, `switch` and assigning a scheme raise RuntimeError. The residual stays in
        `handle.scheme`: attach that to the same model, and it goes on where it was; attach a new scheme, and it is dropped. Safe to call
        again.
        """
        self._dispatcher.flush()
        if (hook := self._hook()) is not None:
            hook.release(self)
        self._detached = True
        self.close()

    def state_dict(self) -> dict[str, Any]:  # Any: as Handle.state_dict
        """Return this rank's state, with the buckets of the last step: the first step after loading it has the same ones."""
        state = super().state_dict()
        return {**state, "buckets": [[key, list(names)] for key, names in self._joining.layout]}

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self._joining.want([(str(key), [str(name) for name in names]) for key, names in state.get("buckets", [])])

    def _use(self, scheme: Scheme) -> None:
        if isinstance(scheme, ErrorFeedbackScheme) and scheme.may_send_whole:
            object.__setattr__(scheme, "dense_below", self._dense_below)  # a scheme may be a frozen dataclass
        dispatcher = self._dispatcher
        before = getattr(self, "_joining", None)
        self._joining = Joining(
            lambda bucket, prepare: dispatcher.submit(bucket, scheme, prepare),
            self._nbytes if scheme.has_residual else 0,
            before,
        )

    def submit(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Return the future of one bucket of DDP's; every failure reaches the caller through it."""
        try:
            if bucket.index() == 0:  # buckets count up within a backward pass, so this one begins a step
                self._step += 1
                self._joining.begin_step(self._rescaler.rescale)
            if bucket.buffer().is_sparse:
                promised = self._submit_sparse(bucket)
            else:
                promised = self._joining.submit(self._bucket(bucket, bucket.buffer()), bucket.is_last())
            if bucket.is_last():
                self._joining.end_step()
            return promised
        except Exception as error:  # a hook that raises breaks DDP's reducer for good; a failed future does not
            self._joining.abandon(error)
            return self._failed(bucket.index(), error)

    def _failed(self, index: int, error: Exception) -> torch.futures.Future[Tensor]:
        """Return a future that raises `error`, and fail the step on all ranks: on the thread that reduces, which closes connections."""
        cause = f"{type(error).__name__}: {error}"

        def fail() -> None:
            raise RuntimeError(f"the hook failed with {cause}")

        return self._dispatcher.submit(Bucket(f"bucket{index}", torch.zeros(1), self._step), Dense(), fail)

    def _submit_sparse(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a sparse gradient, which DDP puts into a bucket of its own, in full."""
        self._joining.flush()
        sparse, rescale = bucket.buffer(), self._rescaler.rescale if bucket.index() == 0 else None
        whole = self._bucket(bucket, torch.zeros(sparse.shape, dtype=sparse.dtype, device=sparse.device).flatten())

        def prepare() -> None:  # on the dispatcher's thread, so that a failure ends the step on all ranks
            whole.grad.copy_(sparse.to_dense().flatten())
            if rescale is not None:
                rescale()

        reduced = self._dispatcher.submit(whole, Dense(), prepare)
        return reduced.then(lambda done: done.value().view(sparse.shape).to_sparse(sparse.sparse_dim()))

    def _bucket(self, bucket: GradBucket, grad: Tensor) -> Bucket:
        layout = laid_out((self._name(each), each.shape) for each in bucket.parameters())
        return Bucket(f"bucket{bucket.index()}", grad, self._step, layout)

    def _name(self, parameter: Tensor) -> str:
        """Return the name of a parameter; of one that nothing is known of, by its number in the order in which they first come."""
        name = self._names.get(id(parameter))
        if name is None:
            name = self._names[id(parameter)] = f"parameter{len(self.shapes)}"
            self.shapes[name] = list(parameter.shape)
            self._rescaler.names = self._names
        return name


def attach(
    ddp_model: DistributedDataParallel,
    scheme: Scheme | None = None,
    *,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    timeout_s: float = 300.0,
    join_mb: float = JOIN_MB,
    dense_below: int = DENSE_BELOW,
) -> DdpHandle:
    """Make `ddp_model` reduce its gradients with `scheme`, and return the handle to its reports and state. See `attach.attach`.

    Collective over the ranks of the model's process group. With a scheme that has a residual, successive buckets are joined until they
    have `join_mb` megabytes (0: none are), because a scheme takes as many exchanges for a small one as for a large one. What has fewer
    elements than `dense_below` even then is sent whole, with its residual, in one all-reduce, by topk, two_shot, micro, exdyna and
    oktopk. One thread reduces the buckets in order, on a private process group, while the backward pass goes on.
    Skipped steps: a step in which any bucket has NaN or Inf is one, as for a loss scaler; what its other buckets have sent is rolled back.
    Failures: when a step fails, on whatever rank, its backward pass raises on all ranks. Where all ranks fail in the same step, the next
    one works again, without what the failed step had taken from residuals. Where some ranks were through with it, their next step raises
    too, and so does every further one until a checkpoint was loaded on all ranks, because their weights differ.
    Before each bucket the ranks compare step, layout, scheme and shared state. Where they differ all ranks raise; the RuntimeError that
    DDP makes of it has the text of the RanksDifferError.
    Checkpoints: a state has the buckets of the last step, and the first step after loading it has the same ones, all reduced when the
    backward pass is done: so it has the bits that the next step would have had, if DDP had rebuilt its buckets before (see
    docs/concepts.md).
    Copies: a copy of the model, by `copy.deepcopy`, `torch.save` or AveragedModel, reduces densely until it is attached to.
    `join()`: a rank that has run out of data still sends its residual, and the mean still divides by all ranks.
    `find_unused_parameters=True`: a parameter that no rank used in a step keeps its gradient as it was; what the scheme sent for it from
    its residual is lost.
    A sparse gradient of an embedding is reduced in full: its report is one of "dense".
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(f"attach takes a DistributedDataParallel model, got {type(ddp_model).__name__}; wrap it first")
    scheme = given_or_default(scheme)
    for finding in doctor(ddp_model, scheme, optimizer=optimizer):
        if finding.refused:
            raise finding.refused(str(finding))
        warn_of(finding)
    module = ddp_model.module
    check_free(scheme, module)
    names = {id(parameter): name for name, parameter in named_parameters(module)}
    hook = ddp_hook(ddp_model) or HookState(ddp_model.process_group)
    handle = opened(
        scheme,
        hook,
        names,
        optimizer=optimizer,
        scaler=scaler,
        timeout_s=timeout_s,
        join_mb=join_mb,
        dense_below=dense_below,
    )
    take(scheme, handle, module)
    handle.shapes = {name: list(each.shape) for name, each in named_parameters(module)}
    if not hook.registered:
        # Of a copied model: its reducer has no hook, but its list has.
        ddp_model._comm_hooks = [each for each in ddp_model._comm_hooks if not isinstance(each[1], HookState)]
        ddp_model.register_comm_hook(hook, reduce_bucket)
        hook.registered = True
    hook.handle = handle
    return handle


def opened(
    scheme: Scheme,
    hook: HookState,
    names: Mapping[int, str],
    *,
    optimizer: Optimizer | None,
    scaler: GradScaler | None,
    timeout_s: float,
    join_mb: float,
    dense_below: int,
) -> DdpHandle:
    """Return a handle that reduces what `hook` gets, with connections of its own. Collective over the ranks of the hook's group."""
    if not 0 <= join_mb < float("inf"):
        raise ValueError(f"join_mb must be in [0, inf), the megabytes up to which buckets are joined, got {join_mb}")
    rescaler = ResidualRescaler(scheme, names, optimizer, scaler)
    if dense_below < 0:
        raise ValueError(f"dense_below must be at least 0 elements, got {dense_below}")
    joined = f"buckets joined up to {join_mb:g} MB, sent whole below {dense_below} elements"
    comm = GroupComm.private(hook.group, timeout_s, fingerprint=f"{scheme.config_fingerprint()}, {joined}")
    return DdpHandle(scheme, comm, rescaler, hook, join_mb, dense_below)


def reduce_bucket(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket: the hook, which DDP calls with each bucket that is complete, in order."""
    return state.submit(bucket)

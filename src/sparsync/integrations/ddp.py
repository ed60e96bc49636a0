"""The integration for DistributedDataParallel: one hook, registered once."""

import warnings

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
from sparsync.integrations.doctor import doctor
from sparsync.integrations.handle import AttachedHandle
from sparsync.integrations.joining import Joining
from sparsync.integrations.residual_units import ResidualRescaler
from sparsync.schemes.dense import Dense

GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]  # public, but missing from torch's __all__


JOIN_MB = 4.0
DENSE_BELOW = 1024


class DdpHandle(AttachedHandle):
    """The handle of a DistributedDataParallel model."""

    scheme: Scheme

    def __init__(self, scheme: Scheme, comm: GroupComm, rescaler: ResidualRescaler, join_mb: float = 0.0) -> None:
        super().__init__(scheme, comm, rescaler)
        self.shapes: dict[str, list[int]] = {}  # of the parameters, by name
        dispatcher = self._dispatcher
        nbytes = int(join_mb * 2**20) if scheme.has_residual else 0
        self._joining = Joining(lambda bucket, prepare: dispatcher.submit(bucket, scheme, prepare), nbytes)

    def layout(self) -> dict[str, list[int]]:
        return self.shapes

    def submit(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Return the future of one bucket of DDP's; every failure reaches the caller through it."""
        try:
            if bucket.index() == 0:  # buckets count up within a backward pass, so this one begins a step
                self._step += 1
                self._joining.begin_step(self._rescaler.rescale)
            if bucket.buffer().is_sparse:
                return self._submit_sparse(bucket)
            return self._joining.submit(self._bucket(bucket, bucket.buffer()), bucket.is_last())
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
        layout = laid_out((self._rescaler.names[id(each)], each.shape) for each in bucket.parameters())
        return Bucket(f"bucket{bucket.index()}", grad, self._step, layout)


def attach(
    ddp_model: DistributedDataParallel,
    scheme: Scheme,
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
    `join()`: a rank that has run out of data still sends its residual, and the mean still divides by all ranks.
    `find_unused_parameters=True`: a parameter that no rank used in a step keeps its gradient as it was; what the scheme sent for it from
    its residual is lost.
    A sparse gradient of an embedding is reduced in full: its report is one of "dense".
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(f"attach takes a DistributedDataParallel model, got {type(ddp_model).__name__}; wrap it first")
    for finding in doctor(ddp_model, scheme, optimizer=optimizer):
        if finding.refused:
            raise finding.refused(str(finding))
        warnings.warn(str(finding), stacklevel=2)
    names = {id(parameter): name for name, parameter in ddp_model.module.named_parameters()}
    if not 0 <= join_mb < float("inf"):
        raise ValueError(f"join_mb must be in [0, inf), the megabytes up to which buckets are joined, got {join_mb}")
    rescaler = ResidualRescaler(scheme, names, optimizer, scaler)
    if dense_below < 0:
        raise ValueError(f"dense_below must be at least 0 elements, got {dense_below}")
    joined = f"buckets joined up to {join_mb:g} MB, sent whole below {dense_below} elements"
    fingerprint = f"{scheme.config_fingerprint()}, {joined}"
    comm = GroupComm.private(ddp_model.process_group, timeout_s, fingerprint=fingerprint)
    if isinstance(scheme, ErrorFeedbackScheme) and scheme.may_send_whole:
        object.__setattr__(scheme, "dense_below", dense_below)  # a scheme may be a frozen dataclass
    handle = DdpHandle(scheme, comm, rescaler, join_mb)
    handle.shapes = {name: list(each.shape) for name, each in ddp_model.module.named_parameters()}
    ddp_model.register_comm_hook(handle, reduce_bucket)
    return handle


def reduce_bucket(handle: DdpHandle, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket: the hook, which DDP calls with each bucket that is complete, in order."""
    return handle.submit(bucket)

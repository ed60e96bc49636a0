"""The integration for DistributedDataParallel: one hook, registered once."""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.comm.group import GroupComm
from sparsync.core import Bucket, laid_out
from sparsync.integrations.doctor import doctor
from sparsync.integrations.handle import Handle
from sparsync.integrations.residual_scale import Terms
from sparsync.schemes.dense import Dense

GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]  # public, but missing from torch's __all__


class DdpHandle(Handle):
    """The handle of a DistributedDataParallel model."""

    scheme: Scheme

    def __init__(self, model: DistributedDataParallel, scheme: Scheme, comm: GroupComm, terms: Terms) -> None:
        names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        super().__init__(scheme, comm, names, terms)

    def submit(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The future of one bucket of DDP's; every failure reaches the caller through it."""
        try:
            if bucket.index() == 0:  # buckets count up within a backward pass, so this one opens a step
                self._step += 1
            rescale = self._follow_terms if bucket.index() == 0 else None
            if bucket.buffer().is_sparse:
                return self._submit_sparse(bucket, rescale)
            return self._dispatcher.submit(self._bucket(bucket, bucket.buffer()), self.scheme, rescale)
        except Exception as error:  # a hook that raises breaks DDP's reducer for good; a failed future does not
            return _failed(error)

    def _submit_sparse(self, bucket: GradBucket, rescale: Callable[[], None] | None) -> torch.futures.Future[Tensor]:
        """A sparse gradient, which DDP puts into a bucket of its own, is reduced in full."""
        sparse = bucket.buffer()
        whole = self._bucket(bucket, torch.zeros(sparse.shape, dtype=sparse.dtype, device=sparse.device).flatten())

        def prepare() -> None:  # on the dispatcher's thread, so that a failure ends the step on all ranks
            whole.grad.copy_(sparse.to_dense().flatten())
            if rescale is not None:
                rescale()

        reduced = self._dispatcher.submit(whole, Dense(), prepare)
        return reduced.then(lambda done: done.value().view(sparse.shape).to_sparse(sparse.sparse_dim()))

    def _bucket(self, bucket: GradBucket, grad: Tensor) -> Bucket:
        slots = laid_out((self._names[id(parameter)], parameter.numel()) for parameter in bucket.parameters())
        return Bucket(f"bucket{bucket.index()}", grad, self._step, slots)


def attach(
    ddp_model: DistributedDataParallel,
    scheme: Scheme,
    *,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    timeout_s: float = 300.0,
) -> DdpHandle:
    """Makes `ddp_model` reduce its gradients with `scheme`, and returns the handle to its reports and state.

    Collective over the ranks of the model's process group: call it on all of them, each with a scheme of its own, set alike. Buckets are
    reduced in order by one thread on a private process group while the backward pass goes on. With `optimizer`, residuals follow its
    learning rate: what was learnt at one rate is applied at that rate; with `scaler`, its loss scale. A step in which any bucket holds NaN
    or Inf counts as skipped, as a loss scaler does: what its other buckets sent is kept back again. After `timeout_s` seconds without an
    answer a rank gives up.
    When a step fails, on whatever rank, its backward pass raises on all ranks; where all fail in the same
    step the next one starts afresh, without what the failed step had taken from residuals. Under `join()` a rank that has run out of data
    still sends its residual, and the mean still divides by all ranks. A parameter that no rank
    used in a step (find_unused_parameters=True) keeps its gradient as it was: what the scheme sent for it from its residual is lost.
    A sparse gradient of an embedding is reduced in full: its report is one of "dense".
    Warns of what `doctor` warns of. Raises what it would refuse, TypeError for anything but a DistributedDataParallel model and a
    scheme, and RuntimeError when the ranks come with different schemes.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(f"attach takes a DistributedDataParallel model, got {type(ddp_model).__name__}; wrap it first")
    if not callable(getattr(scheme, "reduce", None)):
        raise TypeError(f"attach takes a scheme such as sparsync.TopK(density=0.01), got {scheme!r}")
    for finding in doctor(ddp_model, scheme):
        if finding.refused:
            raise finding.refused(str(finding))
        warnings.warn(str(finding), stacklevel=2)
    comm = GroupComm.private(ddp_model.process_group, timeout_s, fingerprint=scheme.config_fingerprint())
    handle = DdpHandle(ddp_model, scheme, comm, Terms(optimizer, scaler))
    ddp_model.register_comm_hook(handle, reduce_bucket)
    return handle


def reduce_bucket(handle: DdpHandle, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook; DDP calls it with each bucket that is complete, in order."""
    return handle.submit(bucket)


def _failed(error: Exception) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()

    def result(_: torch.futures.Future) -> Tensor:
        raise error

    failed = done.then(result)
    done.set_result(torch.empty(0))
    return failed

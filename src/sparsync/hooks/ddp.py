"""The door for DistributedDataParallel: one hook, registered once."""

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparsync.comm.group import GroupComm
from sparsync.core import Bucket, Report, laid_out
from sparsync.feedback import state_from
from sparsync.hooks.dispatcher import Dispatcher
from sparsync.hooks.doctor import doctor
from sparsync.protocols import Scheme
from sparsync.schemes.dense import Dense
from sparsync.schemes.per_parameter import PerParameter

GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]  # public, but missing from torch's __all__
KEPT_REPORTS = 10_000  # the newest ones; a year of training must not fill the memory with them


class Handle:
    """What `attach` returns: the reports, and the state to save with a checkpoint. State differs from rank to rank: save each one's."""

    def __init__(
        self, model: DistributedDataParallel, scheme: Scheme, comm: GroupComm, optimizer: Optimizer | None
    ) -> None:
        self.scheme = scheme
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._rates = _Rates(optimizer, self._names) if optimizer is not None else None
        self._place = {"rank": comm.rank, "ranks": comm.size}
        self._step = -1
        self._reports: deque[Report] = deque(maxlen=KEPT_REPORTS)
        self._dispatcher = Dispatcher(scheme, comm, self._reports.append)
        weakref.finalize(self, self._dispatcher.stop)

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and how many ranks there are."""
        return self._place["rank"], self._place["ranks"]

    def reports(self) -> list[Report]:
        """One report for each bucket and step so far, oldest first; the newest 10 000 are kept."""
        return list(self._reports)

    def take_reports(self) -> list[Report]:
        """The reports since the last call, and forgets them."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def state_dict(self) -> dict[str, Any]:  # Any: as Scheme.state_dict
        """This rank's state; call it between steps."""
        self._dispatcher.flush()
        rates = dict(self._rates.applied) if self._rates else {}
        return {**self._place, "step": self._step, "rates": rates, "scheme": self.scheme.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned on this rank; call it on all ranks, with states of the same step.

        Raises ValueError for another rank's state, whose residual would count twice, or for that of a world of another size.
        """
        step, rates, scheme = (state_from(state, key, "a sparsync handle") for key in ("step", "rates", "scheme"))
        place = {key: state_from(state, key, "a sparsync handle") for key in self._place}
        if place != self._place:
            raise ValueError(
                f"this is the state of rank {place['rank']} of {place['ranks']}, and this is rank {self._place['rank']} of "
                f"{self._place['ranks']}; load each rank's own. sparsync.hooks.checkpoint.load finds it, and deals "
                "residuals out to another number of ranks"
            )
        self._dispatcher.flush()
        self.scheme.load_state_dict(scheme)
        self._step = step
        if self._rates:
            self._rates.applied = dict(rates)

    def submit(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The future of one bucket of DDP's; every failure reaches the caller through it."""
        try:
            if bucket.index() == 0:  # buckets count up within a backward pass, so this one opens a step
                self._step += 1
            rescale = self._follow_rates() if bucket.index() == 0 else None
            if bucket.buffer().is_sparse:
                return self._submit_sparse(bucket, rescale)
            return self._dispatcher.submit(self._bucket(bucket, bucket.buffer()), rescale)
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

        reduced = self._dispatcher.submit(whole, prepare, scheme=Dense())
        return reduced.then(lambda done: done.value().view(sparse.shape).to_sparse(sparse.sparse_dim()))

    def _bucket(self, bucket: GradBucket, grad: Tensor) -> Bucket:
        slots = laid_out((self._names[id(parameter)], parameter.numel()) for parameter in bucket.parameters())
        return Bucket(f"bucket{bucket.index()}", grad, self._step, slots)

    def _follow_rates(self) -> Callable[[], None] | None:
        """What puts the residuals in terms of the present learning rates, to be run before this step's first bucket."""
        factors = self._rates.factors() if self._rates is not None else {}
        return partial(self.scheme.rescale_residual, factors) if factors else None


class _Rates:
    """The learning rate that each parameter's residual was last put in terms of."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._names = names
        self.applied: dict[str, float] = {}

    def factors(self) -> dict[str, float]:
        """old rate / new rate for each parameter whose rate has changed, so that rate * residual stays the same.

        A rate of zero applies nothing, so it leaves the residual as it is until a rate comes that does.
        """
        changed: dict[str, float] = {}
        for group in self._optimizer.param_groups:
            rate = float(group["lr"])
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is None or rate == 0.0:
                    continue
                before = self.applied.get(name, rate)
                if before != rate:
                    changed[name] = before / rate
                self.applied[name] = rate
        return changed


def attach(
    ddp_model: DistributedDataParallel,
    scheme: Scheme,
    *,
    optimizer: Optimizer | None = None,
    timeout_s: float = 300.0,
) -> Handle:
    """Makes `ddp_model` reduce its gradients with `scheme`, and returns the handle to its reports and state.

    Collective over the ranks of the model's process group: call it on all of them, each with a scheme of its own, set alike. Buckets are
    reduced in order by one thread on a private process group while the backward pass goes on. With `optimizer`, residuals follow its
    learning rate: what was learnt at one rate is applied at that rate. After `timeout_s` seconds without an answer a rank gives up.
    When a step fails, on whatever rank, its backward pass raises on all ranks; where all fail in the same
    step the next one starts afresh, without what the failed step had taken from residuals. Under `join()` a rank that has run out of data
    still sends its residual, and the mean still divides by all ranks. Loss scalers: see docs/schemes.md. A parameter that no rank
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
    comm = GroupComm.private(ddp_model.process_group, timeout_s, alike=alike(scheme))
    handle = Handle(ddp_model, scheme, comm, optimizer)
    ddp_model.register_comm_hook(handle, reduce_bucket)
    return handle


def reduce_bucket(handle: Handle, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook; DDP calls it with each bucket that is complete, in order."""
    return handle.submit(bucket)


def alike(scheme: Scheme) -> str:
    """What all ranks must have alike; of a scheme that is no dataclass only the kind is known."""
    if isinstance(scheme, PerParameter):
        return f"{alike(scheme.default)}, { ({pattern: alike(each) for pattern, each in scheme.patterns.items()}) }"
    return repr(scheme) if is_dataclass(scheme) else type(scheme).__qualname__


def _failed(error: Exception) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()

    def result(_: torch.futures.Future) -> Tensor:
        raise error

    failed = done.then(result)
    done.set_result(torch.empty(0))
    return failed

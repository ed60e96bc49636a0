"""The integration for any training loop: one call after the backward pass. No DDP, no hook, no thread."""

import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from sparsync import phases
from sparsync.base.scheme import Scheme
from sparsync.comm.group import ConnectionLostError, GroupComm
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Report, laid_out
from sparsync.integrations.rollback import Rollback
from sparsync.schemes.dense import Dense

Group = dist.ProcessGroup
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_SPARSE = "sparse/"  # starts the key of a bucket that is one sparse gradient


@dataclass
class _Connection:
    """What one model and one scheme share from call to call."""

    scheme: Scheme
    group: GroupComm
    step: int = 0


_CONNECTIONS: "weakref.WeakKeyDictionary[nn.Module, _Connection]" = weakref.WeakKeyDictionary()


def reduce_gradients(
    model: nn.Module,
    scheme: Scheme,
    *,
    group: Group | None = None,
    step: int | None = None,
    scaler: GradScaler | None = None,
    timeout_s: float = 300.0,
) -> list[Report]:
    """Replaces the gradients of `model` by `scheme`'s estimate of their mean over ranks, and returns a report for each bucket.

    Call it on every rank of `group` (None: the default group) after the backward pass and before the optimizer's step, with a scheme of
    the rank's own, made alike on all, and the same one each time: it keeps the residual. There is one bucket for each type and device of
    gradients. A parameter without a gradient counts as zero here and gets the mean like any other; one that is frozen, or that shares
    another's storage, is left alone. Sparse gradients of embeddings are reduced in full, each in a bucket of its own. When gradients are
    accumulated, call it after the last backward pass only. With a loss scaler, pass it and call before `scaler.unscale_` and
    `scaler.step`, which look for infinities on their own rank only: after this call all ranks find the same ones. What is kept back is
    in terms of the loss without scale. A call that leaves NaN or Inf in any gradient counts as a skipped step, and what its other
    buckets sent is kept back again. To go on after a restart, save and load the scheme's own state on each rank, and pass the number
    of the `step`, alike on all: what schemes draw depends on it. None counts calls.
    Where it raises, the other ranks' calls raise too, and the next ones start on fresh connections.
    Raises TypeError for a model that DDP reduces already and for anything but a scheme, ValueError when a model comes with another scheme
    than last time or a scheme with another model, and RuntimeError when a rank is missing or comes with another scheme or step, and when
    an optimizer has stepped during the backward pass already.
    """
    if isinstance(model, DistributedDataParallel):
        raise TypeError(
            "DistributedDataParallel reduces this model's gradients already; use sparsync.attach, or pass the bare module"
        )
    if not callable(getattr(scheme, "reduce", None)):
        raise TypeError(f"reduce_gradients takes a scheme such as sparsync.TopK(density=0.01), got {scheme!r}")
    connection = _connection(model, scheme, group, timeout_s, step)
    comm = MeteredComm(connection.group)
    try:
        skipped = Rollback() if connection.scheme.has_residual else None
        scale = 1.0 if scaler is None else float(scaler.get_scale())  # a host sync on CUDA
        reports = [
            _reduced(key, parameters, connection, comm, skipped, scale) for key, parameters in _buckets(model).items()
        ]
    except BaseException as error:
        lost, told = isinstance(error, ConnectionLostError), ""
        with suppress(Exception):  # why the call failed is what its caller needs to hear
            told = connection.group.end(because="" if lost else f"{type(error).__name__}: {error}")
        if lost and told:
            fuller = ConnectionLostError(f"{error} ({told})")
            for note in getattr(error, "__notes__", []):  # bucket and step
                fuller.add_note(note)
            raise fuller from error
        raise
    finally:
        connection.step += 1  # a failed call counts, too, for it may have failed on some ranks only
    return reports


def _connection(
    model: nn.Module, scheme: Scheme, group: Group | None, timeout_s: float, step: int | None
) -> _Connection:
    known = _CONNECTIONS.get(model)
    if known is not None and known.scheme is not scheme:
        raise ValueError(
            f"this model was reduced by another scheme before, {known.scheme!r}; make one and pass it every time"
        )
    if known is None and any(each.scheme is scheme for each in _CONNECTIONS.values()):
        raise ValueError("this scheme reduces another model, whose residual it keeps; make one for each model")
    if known is None and any(getattr(parameter, "_in_backward_optimizers", None) for parameter in model.parameters()):
        raise RuntimeError(
            "an optimizer steps during the backward pass, with gradients that are not reduced yet; step it after reduce_gradients"
        )
    if known is None:
        known = _CONNECTIONS[model] = _Connection(
            scheme, GroupComm.private(group, timeout_s, fingerprint=scheme.config_fingerprint())
        )
    known.step = known.step if step is None else step
    if known.group.group is None:  # closed by a failure
        known.group = known.group.reconnect(fingerprint=f"gradients of call {known.step}")
        known.scheme.reset_shared_state()
    return known


def _buckets(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """The trained parameters by bucket, each bucket of one type on one device, the same on every rank."""
    buckets: dict[str, dict[str, nn.Parameter]] = {}
    sparse = {id(module.weight) for module in model.modules() if isinstance(module, _EMBEDDINGS) and module.sparse}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        key = f"{str(parameter.dtype).removeprefix('torch.')}/{parameter.device.type}"
        buckets.setdefault(f"{_SPARSE}{name}" if id(parameter) in sparse else key, {})[name] = parameter
    return buckets


def _reduced(
    key: str,
    parameters: dict[str, nn.Parameter],
    connection: _Connection,
    comm: MeteredComm,
    skipped: Rollback | None,
    scale: float,
) -> Report:
    began = time.perf_counter()
    slots = laid_out((name, parameter.numel()) for name, parameter in parameters.items())
    with torch.no_grad(), phases.recorded(key) as spent:
        bucket = Bucket(key, torch.cat([_gradient(each) for each in parameters.values()]), connection.step, slots)
        if scale != 1.0:
            bucket.grad.div_(scale)
        scheme = Dense() if key.startswith(_SPARSE) else connection.scheme
        try:
            report = scheme.reduce(bucket, comm)
        except BaseException as error:
            error.add_note(f"{scheme.name} failed on bucket {key!r} at step {connection.step}")
            raise
        if skipped is not None:
            skipped.reduced(scheme, bucket, report)
        for slot, parameter in zip(slots, parameters.values(), strict=True):
            mean = slot.span.of(bucket.grad).view(parameter.shape)
            mean = mean if scale == 1.0 else mean * scale  # not in place: what was written may be put back later
            _write(parameter, mean.to_sparse(1) if key.startswith(_SPARSE) else mean)
    sent, wait_s = comm.take()
    return replace(report, sent=sent, seconds=time.perf_counter() - began, wait_s=wait_s, phases=spent)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter).flatten() if parameter.grad is None else parameter.grad.to_dense().flatten()


def _write(parameter: nn.Parameter, mean: Tensor) -> None:
    if parameter.grad is None or mean.is_sparse or parameter.grad.is_sparse:
        parameter.grad = mean.clone()
    else:
        parameter.grad.copy_(mean)

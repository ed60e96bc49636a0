"""The door for any training loop: one call after the backward pass. No DDP, no hook, no thread."""

import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsync import stations
from sparsync.comm.group import GroupComm
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Report, Slot, Span
from sparsync.protocols import Scheme
from sparsync.schemes.dense import Dense

Group = dist.ProcessGroup
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_SPARSE = "sparse/"  # starts the key of a bucket that is one sparse gradient


@dataclass
class _Connection:
    """What one model and one scheme share from call to call."""

    scheme: Scheme
    comm: MeteredComm
    step: int = 0


_CONNECTIONS: "weakref.WeakKeyDictionary[nn.Module, dict[int, _Connection]]" = weakref.WeakKeyDictionary()


def reduce_gradients(
    model: nn.Module, scheme: Scheme, *, group: Group | None = None, timeout_s: float = 300.0
) -> list[Report]:
    """Replaces the gradients of `model` by `scheme`'s estimate of their mean over ranks, and returns a report for each bucket.

    Call it on every rank of `group` (None: the default group) after the backward pass and before the optimizer's step, with a scheme of
    the rank's own, made alike on all, and the same one each time: it keeps the residual. There is one bucket for each type and device of
    gradients. A parameter without a gradient counts as zero here and gets the mean like any other; one that is frozen, or that shares
    another's storage, is left alone. When gradients are accumulated, call it after the last backward pass only.
    Raises TypeError for a model that is hooked already (it would be reduced twice), RuntimeError when a rank is missing or comes with
    another scheme. Sparse gradients of embeddings are reduced in full, each in a bucket of its own.
    """
    if getattr(model, "_comm_hooks", None):
        raise TypeError(
            "this model's gradients are reduced by a hook already; call reduce_gradients on models without one"
        )
    connection = _connection(model, scheme, group, timeout_s)
    reports = [_reduced(key, parameters, connection) for key, parameters in _buckets(model).items()]
    connection.step += 1
    return reports


def _connection(model: nn.Module, scheme: Scheme, group: Group | None, timeout_s: float) -> _Connection:
    known = _CONNECTIONS.setdefault(model, {})
    if id(scheme) not in known:
        comm = GroupComm.private(group, timeout_s, alike=repr(scheme))
        known[id(scheme)] = _Connection(scheme, MeteredComm(comm))
    return known[id(scheme)]


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


def _reduced(key: str, parameters: dict[str, nn.Parameter], connection: _Connection) -> Report:
    began = time.perf_counter()
    slots = tuple(_slots(parameters))
    with torch.no_grad(), stations.recorded() as spent:
        bucket = Bucket(key, torch.cat([_gradient(each) for each in parameters.values()]), connection.step, slots)
        scheme = Dense() if key.startswith(_SPARSE) else connection.scheme
        report = scheme.reduce(bucket, connection.comm)
        for slot, parameter in zip(slots, parameters.values(), strict=True):
            mean = slot.span.of(bucket.grad).view(parameter.shape)
            _write(parameter, mean.to_sparse(1) if key.startswith(_SPARSE) else mean)
    sent, wait_s = connection.comm.take()
    return replace(report, sent=sent, seconds=time.perf_counter() - began, wait_s=wait_s, stations=spent)


def _slots(parameters: dict[str, nn.Parameter]) -> Iterator[Slot]:
    position = 0
    for name, parameter in parameters.items():
        yield Slot(name, Span(position, position + parameter.numel()))
        position += parameter.numel()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter).flatten() if parameter.grad is None else parameter.grad.to_dense().flatten()


def _write(parameter: nn.Parameter, mean: Tensor) -> None:
    if parameter.grad is None or mean.is_sparse:
        parameter.grad = mean.clone()
    else:
        parameter.grad.copy_(mean)

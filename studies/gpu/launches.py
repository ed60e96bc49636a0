"""Count on a CPU the launches and waits that a piece of work would cause on a GPU.

A launch is a call of a kernel, a call of a communicator, or a torch operation on at least one element; views and metadata do not count, nor
does work inside a kernel or a communicator. A wait is an operation whose result the host needs: a number, a size that depends on the data,
a copy to the host. Work that a GPU would leave to the host counts too, since a CPU does not distinguish them: counts are upper bounds.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsync import wire
from sparsync.collectives import skipping
from sparsync.comm.local import LocalComm
from sparsync.core import Arriving
from sparsync.exchanges.moments import Moments
from sparsync.kernels import dispatch, operations
from sparsync.runtime.connection import Connection

WAITS = {"_local_scalar_dense", "equal", "nonzero", "nonzero_static", "masked_select", "bincount", "_unique2"}
WAITS |= {"unique_dim", "unique_consecutive"}
# Kernels whose result sizes depend on the data.
SIZED_BY_DATA = {"select_ge", "accumulate_select_ge", "top_k_nonzero", "accumulate_top_k_nonzero", "coalesce", "split"}
METADATA = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "_unsafe_view"}
TO_HOST = ("tolist", "numpy", "cpu")  # methods that the dispatcher does not show on a CPU
# Functions by which the host processes its own memory.
HOSTS = ((Connection, "any_of"), (Arriving, "read"), (Moments, "count"), (skipping, "_shifts"))
COLLECTIVES = ("send_recv", "all_gather", "all_to_all", "all_reduce")


@dataclass
class Counts:
    launches: int = 0
    syncs: int = 0


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts, self.inside = Counts(), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not self.inside and not func.is_view and name not in METADATA:
            by_mask = name.startswith("index") and _has_mask(args[1:])
            self.counts.syncs += name in WAITS or by_mask
            self.counts.launches += name != "_local_scalar_dense" and _has_elements((args, kwargs, result))
        return result


_counting = threading.local()  # one rank of a LocalWorld is counted; the others run between its calls


@contextmanager
def counted() -> Iterator[Counts]:
    """Count the work of this thread during the block."""
    with ExitStack() as stack:
        if gc.isenabled():  # a collection in this thread would close objects of other threads
            gc.disable()
            stack.callback(gc.enable)
        for module in (dispatch, wire):  # the callers of kernels
            stack.enter_context(patch.object(module, "run", _as_launch(dispatch.run, _kernel_waits)))
        for name in COLLECTIVES:
            stack.enter_context(patch.object(LocalComm, name, _as_launch(getattr(LocalComm, name), _never)))
        for name in TO_HOST:
            stack.enter_context(patch.object(Tensor, name, _as_wait(getattr(Tensor, name))))
        for owner, name in HOSTS:
            stack.enter_context(patch.object(owner, name, _uncounted(getattr(owner, name))))
        _counting.counter = stack.enter_context(_Counter())
        stack.callback(vars(_counting).clear)
        yield _counting.counter.counts


def _as_launch(function: Callable[..., Any], waits: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    """Wrap `function` as one launch that hides its inside. `waits(first argument, result)` tells whether it also waits."""

    def launched(*args: Any, **kwargs: Any) -> Any:  # Any: as the function has them
        counter = getattr(_counting, "counter", None)
        if counter is None or counter.inside:
            return function(*args, **kwargs)
        result = _uncounted(function)(*args, **kwargs)
        nothing = isinstance(result, list) and not result  # a selection from no regions
        if not nothing and _has_elements((args, result)):
            counter.counts.launches += 1
            counter.counts.syncs += waits(args[0], result)
        return result

    return launched


def _uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:  # Any: as the function has them
        counter = getattr(_counting, "counter", None)
        if counter is None or counter.inside:
            return function(*args, **kwargs)
        counter.inside = True
        try:
            return function(*args, **kwargs)
        finally:
            counter.inside = False

    return called


def _as_wait(function: Callable[..., Any]) -> Callable[..., Any]:
    def waited(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:  # Any: as the method has them
        counter = getattr(_counting, "counter", None)
        if counter is not None and not counter.inside:
            counter.counts.syncs += tensor.numel() > 0
        return _uncounted(function)(tensor, *args, **kwargs)

    return waited


def _never(_: Any, __: Any) -> bool:
    return False


def _kernel_waits(operation: str, result: Any) -> bool:  # Any: as the kernel returns it
    """Tell whether the host waits for the result; not if the kernel may return its number as a tensor, as it does on a GPU."""
    numbers = any(isinstance(each, bool | int | float) for each in _leaves(result, into_objects=False))
    return operation in SIZED_BY_DATA or (numbers and not _may_be_tensor(operation))


@cache
def _may_be_tensor(operation: str) -> bool:
    function = getattr(operations, operation, None)
    return function is not None and "bool | torch.Tensor" in str(signature(function).return_annotation)


def _has_elements(found: Any) -> bool:  # Any: arguments
    return any(isinstance(each, Tensor) and each.numel() > 0 for each in _leaves(found))


def _has_mask(found: Any) -> bool:  # Any: arguments
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in _leaves(found))


def _leaves(found: Any, into_objects: bool = True) -> Iterator[Any]:  # Any: nested arguments
    if isinstance(found, dict):
        found = list(found.values())
    elif into_objects and is_dataclass(found) and not isinstance(found, type):
        found = [getattr(found, each.name) for each in fields(found)]
    if isinstance(found, list | tuple):
        for each in found:
            yield from _leaves(each, into_objects)
    else:
        yield found

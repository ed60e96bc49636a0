"""Shared by all adapters: the DDP model that a framework has wrapped, the norm that it clips by, and the error for a missing package."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsync.exchanges.exchanged_steps import ExchangedSteps
from sparsync.runtime.findings import warn_of
from sparsync.runtime.handle import Handle
from sparsync.runtime.parameter_names import inside_wrappers


@contextmanager
def needs(package: str, version: str) -> Iterator[None]:
    """Turn an import that fails inside this block into an ImportError that says what to install; tested with this version."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f'this adapter needs {package} ({error}): pip install "{package}>={version}"') from error


def ddp_inside(model: nn.Module, framework: str, ranks: int) -> DistributedDataParallel | None:
    """Return the DDP model that `model` is, or that torch.compile or Fabric wrapped; None, with a warning, where there is only one rank.

    Raises TypeError where several ranks train anything but a DDP model.
    """
    model = inside_wrappers(model)
    if isinstance(model, DistributedDataParallel):
        return model
    if ranks == 1:
        warn_of(f"{framework} trains in one process, so there is nothing to send, and no scheme is attached")
        return None
    raise TypeError(
        f"sparsync reduces the gradients of DistributedDataParallel, and {framework} made a {type(model).__name__} for {ranks} ranks; "
        f"choose DDP in {framework}"
    )


def clip_by_common_norm(
    owner: object, name: str, handle: Handle, parameters_of: Callable[..., object], prepare: Callable[[], object]
) -> None:
    """Have the method `name` of `owner`, which clips by norm, use `handle.clip_grad_norm_` where steps are exchanged.

    Then all ranks clip and log by the same norm. `parameters_of` returns the parameters among the method's arguments, of which the second
    is the greatest norm; `prepare` is called before. Parameters other than those of `handle` are clipped as before.
    """
    if not isinstance(handle, ExchangedSteps):
        return
    before = getattr(owner, name)

    def clip(first: Any, max_norm: float, *more: Any, **named: Any) -> Any:  # Any: as the method has them
        parameters = list(parameters_of(first))  # pyright: ignore[reportArgumentType]  # an iterable
        own = {id(each) for each in handle.model.parameters() if each.requires_grad}
        if handle.closed or {id(each) for each in parameters if each.requires_grad} != own:
            if isinstance(first, Iterator):
                first = iter(parameters)
            return before(first, max_norm, *more, **named)
        prepare()
        return handle.clip_grad_norm_(max_norm, *more, **named)

    setattr(owner, name, clip)

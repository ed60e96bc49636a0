"""Shared by all adapters: finding the DDP model that a framework has wrapped, and the error for a missing package."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsync.runtime.findings import warn_of
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

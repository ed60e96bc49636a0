"""Run a script on one rank up to its first optimizer step, and pass its model and optimizer to `sparsync.doctor`.

It runs in this process and leaves it changed, so the command exits afterwards.
"""

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsync.base.scheme_text import COMMAND_LINE, VARIABLE

if TYPE_CHECKING:
    from sparsync.runtime.findings import Finding

_ONE_RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


@dataclass(frozen=True)
class Result:
    """The result of a trial; only `failure` is set if there was no optimizer step."""

    failure: str = ""
    model: str = ""
    optimizer: str = ""
    scheme: str = ""
    findings: "Sequence[Finding]" = ()


class _Found(BaseException):
    """Ends a script once its model and optimizer are known. Not an Exception, which scripts often catch."""

    def __init__(self, result: Result) -> None:
        self.result = result


def of_script(script: Sequence[str], scheme: str) -> Result:
    """Run a script with its arguments up to its first optimizer step, and examine it."""
    os.environ |= _ONE_RANK
    sys.argv, sys.path[0] = list(script), str(Path(script[0]).resolve().parent)
    _watch(scheme)
    try:
        runpy.run_path(script[0], run_name="__main__")
    except _Found as found:
        return found.result
    except SystemExit as error:
        return Result(f"it ended with status {error.code} before its first optimizer step")
    except Exception as error:
        traceback.print_exc()
        return Result(f"it ended with {type(error).__name__}: {error} before its first optimizer step")
    return Result("it ended without a step of a torch optimizer, so there was nothing to look at")


def _watch(scheme: str) -> None:
    """Raise _Found at the first step of any torch optimizer, or at the first forward pass after the script used sparsync."""
    from torch import nn
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim import Optimizer
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from sparsync.runtime.handle import Handle

    models: list[nn.Module] = []
    handles: list[Handle] = []
    make = Handle.__init__

    def made(handle: Handle, *arguments: Any, **options: Any) -> None:  # Any: as Handle takes them
        make(handle, *arguments, **options)
        handles.append(handle)

    def called(module: nn.Module, _: Any) -> None:  # Any: the arguments of the model
        models.append(module)
        if handles:
            used = f"{type(handles[0].scheme).__name__}, by {handles[0].origin} in the script, which has checked it"
            raise _Found(Result("", _described(module), "the script's own", used))

    def stepped(optimizer: Optimizer, *_: Any) -> None:  # Any: its arguments
        stepping = {id(each) for group in optimizer.param_groups for each in group["params"]}
        own = [each for each in models if any(id(parameter) in stepping for parameter in each.parameters())]
        # The first model called is the outermost: wrappers call what they wrap.
        found = _examined(own[0], optimizer, scheme) if own else Result("its optimizer steps parameters of no model")
        raise _Found(found)

    Handle.__init__ = made  # pyright: ignore[reportAttributeAccessIssue]
    register_module_forward_pre_hook(called)
    register_optimizer_step_pre_hook(stepped)


def _examined(model: Any, optimizer: Any, scheme: str) -> Result:  # Any: torch's, which this module does not import
    import sparsync

    if scheme:
        os.environ |= {VARIABLE: scheme, COMMAND_LINE: scheme}  # read by `sparsync.attach`
    about = (_described(model), type(optimizer).__name__, os.environ.get(VARIABLE) or "default")
    try:
        return Result("", *about, sparsync.doctor(model, optimizer=optimizer))
    except TypeError:
        return Result(
            f"{type(model).__name__} reduces gradients itself; wrap the model by DistributedDataParallel or fully_shard, or pass the bare "
            "one to sparsync.attach"
        )


def _described(model: Any) -> str:  # Any: a torch module
    return f"{type(model).__name__}, {sum(each.numel() for each in model.parameters()):,} parameters"

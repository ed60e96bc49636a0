"""One step of a script or a job on one rank, in a separate process, to hand its model and optimizer to `sparsync.doctor`.

The child process writes what it found to a file, for what a script prints is its own.
"""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sparsync.base.scheme_text import COMMAND_LINE, VARIABLE

SHOWN_LINES = 15  # of a failed script's standard error
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
class TrialJob:
    """What is tried: a script with its arguments, or a workload with its options; and the scheme, "" for the default recipe."""

    script: tuple[str, ...] = ()
    workload: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)  # Any: options of the workload
    scheme: str = ""
    timeout_s: float = 120.0

    @property
    def title(self) -> str:
        return " ".join(self.script) or self.workload


@dataclass(frozen=True)
class Result:
    """What was found; `failure` where it did not come to a step, and `output`: the end of what it wrote then."""

    failure: str = ""
    model: str = ""
    optimizer: str = ""
    scheme: str = ""
    findings: Sequence[Mapping[str, str]] = ()  # "what", "cure" and "refused": the name of the error, or ""
    output: Sequence[str] = ()


def run(job: TrialJob) -> Result:
    """Run the job up to its first optimizer step, and return what was found."""
    with TemporaryDirectory(prefix="sparsync-lab-") as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", __name__, str(path), json.dumps(asdict(job))]
        try:
            done = subprocess.run(
                command, env={**os.environ, **_ONE_RANK}, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                timeout=job.timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Result(f"no optimizer step within {job.timeout_s:g} s; give it longer with --timeout")
        if path.exists():
            return Result(**json.loads(path.read_text("utf-8")))
    output = done.stderr.splitlines()[-SHOWN_LINES:]
    if done.returncode:
        return Result(f"it ended with status {done.returncode} before its first optimizer step", output=output)
    return Result("it ended without a step of a torch optimizer, so there was nothing to look at", output=output)


def main() -> None:
    """Run in the child process: write what was found to the file that the first argument names."""
    path, job = Path(sys.argv[1]), TrialJob(**json.loads(sys.argv[2]))
    if job.workload:
        try:
            found = _of_workload(job)
        except Exception as error:  # of the job's own methods, too
            found = Result(f"{type(error).__name__}: {error}")
        path.write_text(json.dumps(asdict(found)), "utf-8")
        return
    _watch(job, path)
    script = job.script[0]
    sys.argv, sys.path[0] = list(job.script), str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _of_workload(job: TrialJob) -> Result:
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.nn.parallel import DistributedDataParallel

    from sparsync_lab import workloads

    workload = workloads.get(job.workload, **job.options)
    workload.prepare()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(workload.model(0), find_unused_parameters=workload.find_unused_parameters)
    optimizer, _ = workload.optimizer(model, 1)
    found = examined(model, optimizer, job.scheme)
    dist.destroy_process_group()
    return found


def _watch(job: TrialJob, path: Path) -> None:
    """Have the first step of any torch optimizer, or the first use of sparsync, write what was found, and end this process."""
    from torch import nn
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim import Optimizer
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from sparsync.runtime.handle import Handle

    models: list[nn.Module] = []
    handles: list[Handle] = []
    make = Handle.__init__

    def end(result: Result) -> None:
        path.write_text(json.dumps(asdict(result)), "utf-8")
        sys.stdout.flush()
        os._exit(0)

    def made(handle: Handle, *arguments: Any, **options: Any) -> None:  # Any: as Handle takes them
        make(handle, *arguments, **options)
        handles.append(handle)

    def called(module: nn.Module, _: Any) -> None:  # Any: what the model is called with
        models.append(module)
        if handles:
            used = f"{type(handles[0].scheme).__name__}, by {handles[0].origin} in the script, which has checked it"
            end(Result("", _described(module), "the script's own", used))

    def stepped(optimizer: Optimizer, *_: Any) -> None:  # Any: its arguments
        stepping = {id(each) for group in optimizer.param_groups for each in group["params"]}
        own = [each for each in models if any(id(parameter) in stepping for parameter in each.parameters())]
        # The first that was called is the outermost: wrappers call what they wrap.
        end(examined(own[0], optimizer, job.scheme) if own else Result("its optimizer steps parameters of no model"))

    Handle.__init__ = made  # pyright: ignore[reportAttributeAccessIssue]
    register_module_forward_pre_hook(called)
    register_optimizer_step_pre_hook(stepped)


def examined(model: Any, optimizer: Any, scheme: str) -> Result:  # Any: torch's, which this module does not import
    """Return what `sparsync.doctor` says of them."""
    import sparsync

    if scheme:
        os.environ |= {VARIABLE: scheme, COMMAND_LINE: scheme}  # which `sparsync.attach` of the script would read
    about = (_described(model), type(optimizer).__name__, os.environ.get(VARIABLE) or "default")
    try:
        found = sparsync.doctor(model, optimizer=optimizer)
    except TypeError:
        what = f"{type(model).__name__} reduces gradients by itself"
        cure = "wrap the model by DistributedDataParallel or fully_shard, or pass the bare one to sparsync.attach"
        return Result("", *about, [{"what": what, "cure": cure, "refused": "TypeError"}])
    findings = [
        {"what": each.what, "cure": each.cure, "refused": each.refused.__name__ if each.refused else ""}
        for each in found
    ]
    return Result("", *about, findings)


def _described(model: Any) -> str:  # Any: a torch module
    return f"{type(model).__name__}, {sum(each.numel() for each in model.parameters()):,} parameters"


if __name__ == "__main__":
    main()

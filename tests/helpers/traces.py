"""Find what a function leaves behind in a process of tests that the next one shares: settings, threads, patched names and more.

Seeds and the memory of warnings shown once are restored, and garbage is collected; everything else is reported, so that the process can be
discarded. Names are checked in the package, in the helpers and in those parts of torch and Python that tests patch.
"""

import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any  # Any: settings are of many kinds

import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group, is_initialized  # as they are before a test patches them
from torch.nn.modules import module as modules
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from sparsync import kernels

ENDS_S = 2.0  # for threads of collected objects to end
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR2)
PATCHED = ("sparsync", "helpers", "integrations", "invariants", "test_")  # prefixes of modules
PATCHED_ALONE = {"os", "time", "threading", "socket", "torch.distributed", "torch.optim.optimizer"}
PATCHED_ALONE |= {"torch.distributed.distributed_c10d", "torch.cuda"}
KEPT = ("sparsync", "helpers.traces")  # modules whose lists, dicts and sets may grow
SEED = torch.get_rng_state()
_ABSENT = object()


class Traces:
    """The state before a function is called, for comparison with the state afterwards."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._settings: dict[str, Any] = {}
        self._environment: set[tuple[str, str]] = set()
        self._names: dict[str, dict[str, Any]] = {}
        self._lengths: dict[tuple[str, str], int] = {}
        self._group: object = None

    def begin(self) -> None:
        """Prepare for a function, after its modules were imported and its process group was made."""
        torch.set_rng_state(SEED)
        self._group, self._settings, self._environment = dist.group.WORLD, _settings(), {*os.environ.items()}
        for space, names in _spaces():
            if space not in self._names:
                self._names[space] = dict(names)
                self._lengths |= {(space, name): len(each) for name, each in _collections(space, names)}

    def left(self) -> list[str]:
        """End the process group, and list everything else that was left behind."""
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()  # it would give a later mesh of the same shape the groups that end here
        gc.collect()
        traces = ["another default process group"] if dist.group.WORLD is not self._group else []
        if is_initialized():
            destroy_process_group()
        self._group = None
        deadline = time.monotonic() + ENDS_S
        while (threads := self._new_threads()) and time.monotonic() < deadline:
            time.sleep(0.001)
        traces += [f"thread {name}" for name in threads]
        now = _settings()
        traces += [f"{name}: {now[name]!r:.200}" for name, was in self._settings.items() if now[name] != was]
        changed = {name for name, _ in self._environment ^ {*os.environ.items()}}
        traces += [f"environment variable {name}" for name in sorted(changed)]
        for space, names in _spaces():
            for name, was in self._names.get(space, {}).items():
                now = names.get(name, _ABSENT)
                if now is not was or ((space, name) in self._lengths and len(was) != self._lengths[space, name]):
                    traces.append(f"{space}.{name} changed")
        gc.freeze()  # spares the next collection the imported modules
        return traces

    def _new_threads(self) -> list[str]:
        return [each.name for each in set(threading.enumerate()) - self._threads]


def _settings() -> dict[str, Any]:
    files = Path("/proc/self/fd")
    opened = {_target(each) for each in files.iterdir()} if files.exists() else set()
    return {
        "number of threads": torch.get_num_threads(),
        "default type": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "gradient mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "anomaly mode": torch.is_anomaly_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "precision of products": torch.get_float32_matmul_precision(),
        "torch warns always": torch.is_warn_always_enabled(),
        "torch's modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "hooks of all modules": {
            name: list(hooks) for name, hooks in vars(modules).items() if name.startswith("_global_") and hooks
        },
        "hooks of all optimizers": [
            hook
            for hook in (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
            if not getattr(hook, "__module__", "").startswith("sparsync.")  # kept permanently
        ],
        "backend of kernels": kernels.backend(),
        "signal handlers": [signal.getsignal(each) for each in SIGNALS],
        "hooks of Python": (sys.excepthook, threading.excepthook, sys.gettrace(), sys.getprofile()),
        "hooks of threads": (threading._trace_hook, threading._profile_hook),  # pyright: ignore[reportAttributeAccessIssue]
        "filters of warnings": (list(warnings.filters), warnings.showwarning),
        "logging": (logging.root.manager.disable, logging.root.level, list(logging.root.handlers)),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "streams": (sys.stdout, sys.stderr, sys.stdin),
        "child processes": _children(),
        "open files": sorted(each for each in opened if each.startswith("/") and not each.startswith("/proc/")),
    }


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:  # the descriptor that listed them
        return ""


def _children() -> str:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return children.read_text() if children.exists() else ""


def _collections(space: str, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the lists, dicts and sets of tests and helpers; some of the package's hold permanent data."""
    for name, value in names.items():
        if isinstance(value, (list, dict, set)) and not name.startswith("__") and not space.startswith(KEPT):
            yield name, value


def _spaces() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the names of modules and their classes; forget the warnings that modules have shown."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType):
            continue
        names = vars(module)
        names.pop("__warningregistry__", None)
        if name.startswith(PATCHED):
            yield name, names
            for each in list(names.values()):
                if isinstance(each, type) and each.__module__ == name:
                    yield f"{name}.{each.__qualname__}", vars(each)
        elif name in PATCHED_ALONE:
            yield name, {key: each for key, each in names.items() if callable(each)}

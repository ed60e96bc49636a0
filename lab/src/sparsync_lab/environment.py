"""The versions and the machine of a run, needed to judge and reproduce its figures."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import sparsync
from sparsync.kernels import dispatch
from sparsync_lab.slow_kernels import SLOW_KERNELS


def kernels(device: str = "cpu") -> str:
    """Name the kernel backend for tensors on `device`: "cpp/avx512", "triton", SLOW_KERNELS or another."""
    here = [name for name in dispatch.backends() if (name == dispatch.TRITON) == (device != "cpu")]
    return next(iter(here), SLOW_KERNELS)


def versions() -> dict[str, Any]:  # Any: JSON
    """Report the versions of Python, torch and sparsync and, in a checkout, its commit ("+changes" if uncommitted changes exist)."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sparsync": importlib.metadata.version("sparsync"),
        "commit": _commit(),
    }


def machine() -> dict[str, Any]:  # Any: JSON
    """Report processor, cores, memory and kernel, but nothing that identifies the machine or its user."""
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
    }


def identity(device: str) -> dict[str, str]:
    """Describe what hosts must have in common: the versions of torch and sparsync, and compiled kernels or not."""
    found = versions()
    return {
        "the version of torch": found["torch"],
        "the version of sparsync": f"{found['sparsync']} {found['commit']}",
        "the kernels": "the slow reference" if kernels(device) == SLOW_KERNELS else "compiled",
    }


def _field(path: Path, name: str) -> str:
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "unknown")


def _commit() -> str | None:
    root = Path(sparsync.__file__).parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD")
    return f"{commit}+changes" if commit and git("status", "--porcelain", "--untracked-files=no") else commit or None

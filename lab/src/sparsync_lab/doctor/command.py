"""The checks and the output of `sparsync doctor`. The machine checks need neither torch nor other commands' packages."""

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from sparsync_lab.doctor import trial
from sparsync_lab.netlab import reexecution_prefix
from sparsync_lab.terminal import aligned

NEEDED = ("matplotlib", "numpy", "pydantic", "rich")  # by other commands
ADAPTED = ("accelerate", "lightning", "transformers")
LEAST_TORCH = (2, 8)
_BUILD_LINKS = "from sparsync_lab.netlab import network\nwith network(2, 1e7):\n    pass"


@dataclass(frozen=True)
class Check:
    """The name and finding of a check, and the fix if one is needed."""

    name: str
    found: str
    to_do: str = ""


def doctor(script: Sequence[str] = (), scheme: str = "") -> int:
    """Print what the machine offers and what a script would meet, then what to do. Returns the exit status: 0 if nothing, else 1.

    `scheme`: "" for the default recipe.
    """
    todo = _shown("This machine", [check() for check in (_python, _torch, _kernels, _links, _packages)])
    if script:
        todo += _shown(" ".join(script), _of_script(trial.of_script(script, scheme)))
    if not todo:
        print("Nothing to do." if script else "Nothing to do. Try it: sparsync demo")
        return 0
    print("To do:")
    for number, text in enumerate(todo, start=1):
        print(aligned({f"{number}.": text}))
    return 1


def _shown(title: str, checks: Iterable[Check]) -> list[str]:
    checks = list(checks)
    print(f"{title}\n{aligned({f'  {each.name}': each.found for each in checks})}\n")
    return [f"{each.name}: {each.to_do}" for each in checks if each.to_do]


def _python() -> Check:
    return Check("python", f"{platform.python_version()}, {sys.executable}")


def _torch() -> Check:
    version = _version("torch")
    if version is None:
        return Check("torch", "missing", f"{sys.executable} -m pip install torch")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    wanted = ".".join(map(str, LEAST_TORCH))
    return Check("torch", version, "" if numbers >= LEAST_TORCH else f"install torch {wanted} or later")


def _kernels() -> Check:
    if _version("torch") is None:
        return Check("kernels", "not known without torch")
    from sparsync.kernels import dispatch

    if (why := dispatch.why_missing) is None:
        first, *others = dispatch.backends()
        return Check("kernels", f"built; {first} is used, of {', '.join([first, *others])}")
    return Check(
        "kernels",
        f"the C++ ones are missing ({why}), so the slow reference runs: the same results, many times the time",
        "install a C++ compiler such as g++, then install sparsync again",
    )


def _links() -> Check:
    """Build two links as compare and launch do."""
    name = "limited links"
    try:
        prefix = reexecution_prefix()
        done = subprocess.run(
            [*prefix, sys.executable, "-c", _BUILD_LINKS], capture_output=True, text=True, check=False
        )
    except RuntimeError as error:
        return Check(name, f"cannot be made: {error}", f"{error}")
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Check(name, f"cannot be made: {said}", said)
    return Check(name, f"two were made, {'in a user namespace' if prefix else 'as root'} (ip, tc, unshare, nsenter)")


def _packages() -> Check:
    found = [f"{name} {_version(name) or 'missing'}" for name in NEEDED]
    missing = [name for name in NEEDED if _version(name) is None]
    others = [f"{name} {version}" for name in ADAPTED if (version := _version(name)) is not None]
    for_adapters = f"; for adapters: {', '.join(others) or 'none'}"
    fix = f"install what is missing: {sys.executable} -m pip install {' '.join(missing)}" if missing else ""
    return Check("packages", ", ".join(found) + for_adapters, fix)


def _of_script(result: trial.Result) -> Iterator[Check]:
    """Yield the findings of `sparsync.doctor` for a script."""
    if result.failure:
        yield Check("failed", result.failure, "fix this error")
        return
    yield Check("model", result.model)
    yield Check("optimizer", result.optimizer)
    yield Check("scheme", result.scheme)
    for number, finding in enumerate(result.findings, start=1):
        kind = "refused" if finding.refused else "warning"
        yield Check(f"{kind} {number}", finding.what, finding.cure)
    if not result.findings:
        yield Check("found", "nothing that would not work")


def _version(package: str) -> str | None:
    """Look up the version of an installed package; None if it cannot be imported."""
    return importlib.metadata.version(package) if find_spec(package) else None

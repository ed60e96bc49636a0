"""Tries the rows of studies/version_rows.py with the Python and the torch that run this, and adds the verdicts to the file given.

Each row is a part of the checks of the table "What works where" or of the invariants, on the installed package.
"""

import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from version_rows import ROWS  # noqa: E402


def main() -> None:
    warnings.simplefilter("ignore")  # torch's, of names that it will rename, and the doctor's
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(
            "version_features.py FILE [ROW ...]: checks the package that is installed, and writes the verdicts there"
        )
    out = Path(sys.argv[1])
    verdicts: dict[str, dict[str, object]] = json.loads(out.read_text()) if out.exists() else {}
    for row in sys.argv[2:] or ROWS:
        began = time.monotonic()
        word, reason = _verdict(_CHECKS[row])
        verdicts[row] = {"word": word, "reason": reason, "seconds": round(time.monotonic() - began)}
        out.write_text(json.dumps(verdicts, indent=1))


def _verdict(check: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    try:
        return check()
    except (Exception, SystemExit) as error:
        return "fails", f"{type(error).__name__}: {error}"


def package() -> tuple[str, str]:
    import sparsync

    for name in sparsync.__all__:
        getattr(sparsync, name)
    assert Path(sparsync.__file__).is_relative_to(sys.prefix), f"{sparsync.__file__} is not what was installed"
    return "works", ""


def command() -> tuple[str, str]:
    own = Path(sys.prefix) / "bin" / "sparsync"
    with tempfile.TemporaryDirectory() as folder:
        for arguments in (
            "--help",
            "workloads --new job.py",
            "compare --workload job.py:MyJob --link none --ranks 2 --steps 3 --schemes dense,topk --out results",
        ):
            run = [own, *arguments.split()]
            done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                return "fails", f"sparsync {arguments}: {done.stderr[-2000:]}"
        assert (Path(folder) / "results" / "report.html").exists()
    return "works", ""


def compiled() -> tuple[str, str]:
    from sparsync.kernels import dispatch

    return ("works", "") if dispatch.backend().startswith("cpp/") else ("refused", dispatch._why_missing)


def schemes() -> tuple[str, str]:
    from integrations.table import SCHEMES
    from invariants.table import ROWS as SCHEME_ROWS
    from sparsync.testing import check

    for row in SCHEME_ROWS:
        if row.id in SCHEMES.values():
            check("conservation" if row.has_residual else "replicas", row.subject_in((4,)))
    return "works", ""


def situation(integration: str, name: str) -> Callable[[], tuple[str, str]]:
    """Return the check of one situation behind one integration, with all schemes of the table "What works where"."""

    def check() -> tuple[str, str]:
        from integrations.table import FAILS, WORKS, cells

        found = cells(_cases(integration), [name])[name].values()
        failed = next((each for each in found if each.word == FAILS), None)
        works = next((each for each in found if each.word == WORKS), None)
        verdict = failed or works or next(iter(found))
        return verdict.word, verdict.reason

    return check


def _cases(integration: str) -> dict:
    if integration == "ddp":
        from integrations.attach import CASES
    elif integration == "manual":
        from integrations.manual import CASES
    elif integration == "shards":
        from integrations.fsdp import SHARDS as CASES
    else:
        from integrations.fsdp import REPLICAS as CASES
    return dict(CASES)


def on_ranks(name: str) -> Callable[[], tuple[str, str]]:
    """Return the check that a function of helpers.version_training does on 2 ranks."""

    def check() -> tuple[str, str]:
        from helpers import version_training
        from helpers.distributed import run

        refusals: Iterable[str] = run(getattr(version_training, name), 2)
        reason = next(iter(refusals))
        return ("refused", reason) if reason else ("works", "")

    return check


_CHECKS = {
    "the package": package,
    "the command": command,
    "C++ kernels": compiled,
    "schemes": schemes,
    "GradientReducer": situation("manual", "float32 parameters"),
    "DDP": situation("ddp", "float32 parameters"),
    "DDP, failure": situation("ddp", "a rank fails in a step"),
    "checkpoint": situation("ddp", "resuming with another number of ranks"),
    "LocalSteps": on_ranks("local_steps"),
    "AdamWSteps": on_ranks("adamw_steps"),
    "FSDP2, replicate": situation("replicas", "float32 parameters"),
    "FSDP2, two axes": on_ranks("two_axes"),
    "FSDP2, shard": situation("shards", "float32 parameters"),
    "FSDP2, parameters": on_ranks("gathered"),
    "FSDP2, unused": on_ranks("unused"),
    "FSDP2, failure": on_ranks("failed"),
}

if __name__ == "__main__":
    main()

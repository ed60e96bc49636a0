"""The commands and rights that the emulated network needs, and how an ordinary user gets them. This module builds no network."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

TIMEOUT_S = 30.0  # for one command or anchor; they take milliseconds, or longer on a loaded machine
CURE = (
    "or do without it: compare, launch and probe take --link none (times then prove nothing), and frontier, traffic, "
    "simulate, advise and report need no network"
)
PACKAGE_OF = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "cat": "coreutils"}
USER_NAMESPACE = ("--user", "--map-root-user")


class NetworkUnavailableError(RuntimeError):
    """The rate-limited network cannot be built on this machine or by this user; the message names the cause and the fix."""


def tool(name: str) -> str:
    """Look up the path of a required command. Raises NetworkUnavailableError that names missing commands and their packages."""
    found = {each: _which(each) for each in PACKAGE_OF}
    path = found[name]
    if path is None:
        missing = [each for each, at in found.items() if at is None]
        packages = sorted({PACKAGE_OF[each] for each in missing})
        raise NetworkUnavailableError(
            f"the rate-limited network needs the commands {', '.join(PACKAGE_OF)}; not found: {', '.join(missing)}; "
            f"install {' and '.join(packages)}, {CURE}"
        )
    return path


def reexecution_prefix() -> list[str]:
    """Return the argv prefix that gives a program the rights for `network`; empty if this process already has them.

    An ordinary user becomes root of a user namespace, where every file still belongs to the same user, and home and environment stay.
    The prefix replaces itself with the program without a fork, so signals reach the program. The caller runs
    `os.execv(prefix[0], [*prefix, *argv])` once: inside, the prefix is empty. Raises NetworkUnavailableError if neither way is allowed.
    """
    if not sys.platform.startswith("linux"):
        raise NetworkUnavailableError(
            f"the rate-limited network needs Linux, this is {sys.platform}; use Linux, {CURE}"
        )
    for name in PACKAGE_OF:  # check all now: some are needed only when the network is built
        tool(name)
    unshare = tool("unshare")
    direct = _refusal([unshare])
    if direct is None:
        return []
    by_user_namespace = _refusal([unshare, *USER_NAMESPACE])
    if by_user_namespace is None:
        return [unshare, *USER_NAMESPACE, "--"]
    raise NetworkUnavailableError(
        f"user {os.geteuid()} may not create network namespaces ({direct}), nor a user namespace in which it may "
        f"({by_user_namespace}); run as root (sudo), allow user namespaces "
        f"(sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns), {CURE}"
    )


def restart_with_rights(module: str, arguments: Sequence[str]) -> None:
    """Replace this process by `python -m module arguments` if it lacks the rights; otherwise return."""
    prefix = reexecution_prefix()
    if prefix:
        os.execv(prefix[0], [*prefix, sys.executable, "-m", module, *arguments])


def _refusal(unshare: Sequence[str]) -> str | None:
    """Try to add a veth pair in a namespace made by `unshare`; return None, or the error message."""
    # Some systems grant the namespace but no rights in it. The pair vanishes with its namespace.
    pair = ["link", "add", "probe0", "type", "veth", "peer", "name", "probe1"]
    try:
        done = subprocess.run(
            [*unshare, "--net", "--", tool("ip"), *pair], capture_output=True, check=False, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT_S:g} s"
    return None if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"


def _which(name: str) -> str | None:
    # Debian keeps ip and tc in /usr/sbin, which is not on an ordinary user's path.
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))

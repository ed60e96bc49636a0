"""The process that a user sees: starts the supervisor, hands it every signal, and ends what is left when it is gone."""

import json
import signal
import subprocess
import sys
from contextlib import suppress

from sparsync_lab.launch.settings import LaunchSettings
from sparsync_lab.workers.descendants import subreaper

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SUPERVISOR = "sparsync_lab.launch.supervisor"


def launch(settings: LaunchSettings) -> int:
    """Run the command on every rank, and return the exit status: that of the first rank that failed, 0 where none did.

    A rank that a signal has ended counts as 128 + the signal, and so does this program. No process, namespace or interface is left when
    it returns, nor when it is killed: the supervisor, in a separate session, ends all of them when its standard input closes, and what
    a killed supervisor leaves is ended here. Where both are killed at once the kernel ends the ranks, and orphans of theirs stay.
    """
    supervisor: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, frame: object) -> None:
        if supervisor is None:
            early.append(number)
            return
        with suppress(ProcessLookupError):
            supervisor.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        with subreaper():
            supervisor = subprocess.Popen(
                [sys.executable, "-m", SUPERVISOR], stdin=subprocess.PIPE, start_new_session=True
            )
            assert supervisor.stdin is not None
            with suppress(BrokenPipeError):  # it has ended; its exit status says so
                supervisor.stdin.write(json.dumps(settings.as_json()).encode() + b"\n")
                supervisor.stdin.flush()
            for number in early:
                forward(number, None)
            status = supervisor.wait()
        if status < 0:
            print(
                f"sparsync launch: its supervisor was ended by signal {-status}; the ranks were killed", file=sys.stderr
            )
        return 128 - status if status < 0 else status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

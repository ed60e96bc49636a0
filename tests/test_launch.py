"""`sparsync launch`: what a rank finds in its environment, what is shown of it, and that nothing is left, whatever ends the run."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.rights import ORDINARY, builds
from sparsync.base.scheme_text import VARIABLE
from sparsync_lab import cli
from sparsync_lab.launch.settings import LaunchSettings, environment
from sparsync_lab.launch.supervisor import LONGEST_LINE, Lines
from sparsync_lab.netlab import rates
from sparsync_lab.report.format import links_text

PATIENCE_S = 300.0
TOKEN = "SPARSYNC_TEST_TOKEN"
PYTHON = [sys.executable, "-S", "-u", "-c"]
# Every rank leaves a process in a session of its own, whose parent has ended, and then waits.
WAITS = """
import os, subprocess, sys, time
subprocess.run(["sh", "-c", "setsid sleep 1000 & echo left $!"], stderr=subprocess.DEVNULL)
print("waits")
time.sleep(1000)
"""


@dataclass
class Launched:
    """A running launch; all of its processes have a word in their environment."""

    process: subprocess.Popen[str]
    token: str

    def processes(self) -> set[int]:
        found = set()
        for file in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.token in file.read_text(errors="replace"):
                    found.add(int(file.parent.name))
            except OSError:  # it has ended, or belongs to another user
                continue
        return found

    def await_ranks(self, ranks: int) -> None:
        """Return when all ranks have printed that they wait."""
        assert self.process.stdout is not None
        waiting = 0
        while waiting < ranks:
            line = self.process.stdout.readline()
            assert line, "the launch has ended"
            waiting += "waits" in line

    def await_processes(self, count: int) -> None:
        """Return when `count` processes are seen: one that is executing another program has no environment for a moment."""
        deadline_s = time.monotonic() + PATIENCE_S
        while (found := len(self.processes())) != count:
            assert time.monotonic() < deadline_s, f"{found} processes are seen, not {count}"
            time.sleep(0.05)

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err


@contextmanager
def launched(*arguments: str, before: tuple[str, ...] = ()) -> Iterator[Launched]:
    token = f"token-{uuid.uuid4()}"
    environment = {**os.environ, TOKEN: token, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "sparsync_lab.cli", "launch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    run = Launched(process, token)
    try:
        yield run
    finally:
        process.kill()
        process.communicate()
        deadline_s = time.monotonic() + PATIENCE_S
        while left := run.processes():
            if time.monotonic() > deadline_s:
                for each in left:
                    os.kill(each, signal.SIGKILL)
                pytest.fail(f"the launch has left {len(left)} processes")
            time.sleep(0.05)


def both(python: str) -> list[str]:
    """Return the command of a rank that runs this text."""
    return ["--", *PYTHON, python]


@builds
def test_a_rank_that_fails_ends_the_others_and_its_exit_status_is_that_of_the_launch() -> None:
    code = f"""
import os, sys, time
if os.environ["RANK"] == "1":
    print("half a line", end="")
    print("to stderr", file=sys.stderr)
    time.sleep(0.3)
    sys.exit(3)
{WAITS}
"""
    with launched("--ranks", "2", "--link", "10mbit", "--up", "1mbit", "--grace", "0.2", *both(code)) as run:
        status, out, err = run.finish()
        assert run.processes() == set()
    assert status == 3
    assert set(re.sub(r"left \d+", "left", out).splitlines()) == {
        "[rank 0] left",
        "[rank 0] waits",
        "[rank 1] half a line",
    }
    assert "[rank 1] to stderr\n" in err
    assert "rank 1 ended with exit status 3; the others have 0.2 s to end by themselves" in err
    assert "rank 1 failed first, with exit status 3" in err
    assert "2 ranks, links of 1 Mbit/s up and 10 Mbit/s down" in err
    assert re.search(r"^ 0 +signal 15 ", err, re.MULTILINE)
    assert re.search(r"^ 1 +exit status 3 ", err, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "says"),
    [
        (signal.SIGINT, 130, "stopped by SIGINT; nothing is left running"),
        (signal.SIGTERM, 143, "stopped by SIGTERM; nothing is left running"),
        (signal.SIGKILL, -9, ""),
    ],
)
@pytest.mark.parametrize("link", ["10mbit", "none"])
@builds
def test_nothing_is_left_behind_after(number: int, status: int, says: str, link: str) -> None:
    # Who is killed cannot end what ranks have started; otherwise each rank leaves a process, too.
    waits = 'print("waits"); import time; time.sleep(1000)' if number == signal.SIGKILL else WAITS
    with launched("--ranks", "2", "--link", link, "--grace", "1", *both(waits)) as run:
        run.await_ranks(2)
        # This program, the ranks with what they left, and what holds the namespaces.
        run.await_processes((3 if waits is not WAITS else 5) + (3 if link != "none" else 0))
        run.process.send_signal(number)
        ended, _, err = run.finish()
        assert ended == status
        assert says in err


@pytest.mark.slow
@builds
def test_a_rank_that_ignores_signals_is_killed_and_a_second_ctrl_c_does_not_wait() -> None:
    stubborn = "import signal\nfor each in (2, 15): signal.signal(each, signal.SIG_IGN)\n" + WAITS
    with launched("--ranks", "2", "--link", "none", "--grace", "1000", *both(stubborn)) as run:
        run.await_ranks(2)
        run.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(0.5)
        run.process.send_signal(signal.SIGINT)
        assert run.finish()[0] == 130
    code = f"import os, sys\nif os.environ['RANK'] == '0': os.kill(os.getpid(), 9)\n{stubborn}"
    with launched("--ranks", "2", "--link", "none", "--grace", "0.2", *both(code)) as run:
        status, _, err = run.finish()
    assert (status, "rank 0 failed first, with signal 9" in err) == (137, True)


@pytest.mark.slow
@builds
def test_a_reader_that_goes_away_ends_the_run() -> None:
    endless = "while True: print('line')"
    with launched("--ranks", "2", "--link", "none", *both(endless)) as run:
        assert run.process.stdout is not None
        assert run.process.stdout.readline() in ("[rank 0] line\n", "[rank 1] line\n")
        run.process.stdout.close()
        assert run.process.wait(PATIENCE_S) == 128 + signal.SIGPIPE


@pytest.mark.slow
@builds
@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv takes root's rights away")
def test_an_ordinary_user_launches_in_a_user_namespace_and_bytes_are_those_of_each_rank() -> None:
    code = """
import os, socket, time
rank, where = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    connection = socket.create_server(where).accept()[0]
    while connection.recv(1 << 16): pass
else:
    for _ in range(100):
        try: connection = socket.create_connection(where)
        except OSError: time.sleep(0.1)
        else: break
    connection.sendall(bytes(500_000))
"""
    with launched("--ranks", "2", "--link", "10mbit", *both(code), before=tuple(ORDINARY)) as run:
        status, out, err = run.finish()
    assert (status, out) == (0, "")
    sent = re.search(r"^ 1 +exit status 0 +(\S+) kB ", err, re.MULTILINE)
    received = re.search(r"^ 0 +exit status 0 +\S+ kB +(\S+) kB$", err, re.MULTILINE)
    assert sent and received
    assert sent[1] == received[1]
    assert 500 * 1.04 <= float(sent[1]) <= 500 * 1.08


def test_a_rank_finds_what_torchrun_sets(tmp_path: Path) -> None:
    def found(settings: LaunchSettings, *names: str) -> list[str | None]:
        given = environment(settings, 2, "eth0", "10.77.0.1", 29500, "id", tmp_path)
        return [given.get(name) for name in names]

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", VARIABLE)
    assert found(LaunchSettings(("x",), 4, 1e8, 1e8, scheme="topk"), *names) == ["2", "4", "2", "4", "0", "2", "topk"]
    where = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE")
    assert found(LaunchSettings(("x",), 4, 1e8, 1e8), *where) == ["10.77.0.1", "29500", "eth0", "eth0", "False"]


def test_lines_are_cut_at_their_ends_and_a_line_that_was_overwritten_shows_its_last_state() -> None:
    lines = Lines(b"[rank  3] ")
    assert lines.cut(b"one\ntw") == b"[rank  3] one\n"
    assert lines.cut(b"o\n\n") == b"[rank  3] two\n[rank  3] \n"
    assert lines.cut(b"10%\r20%\r\n") == b"[rank  3] 20%\n"
    assert lines.cut(b"\xff no utf-8") == b""
    assert lines.cut(b"") == b"[rank  3] \xff no utf-8\n"
    assert lines.cut(b"") == b""
    noise = (
        b"[W1126 17:13:49.995 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3\n"
    )
    assert lines.cut(noise + b"kept\n") == b"[rank  3] kept\n"
    assert lines.cut(b"x" * (LONGEST_LINE + 1)) == b"[rank  3] " + b"x" * (LONGEST_LINE + 1) + b"\n"


@pytest.mark.parametrize(
    ("given", "expected", "shown"),
    [
        (("100mbit", None, None), (1e8, 1e8), "100 Mbit/s links"),
        (("100mbit", "10mbit", "1gbit"), (1e7, 1e9), "links of 10 Mbit/s up and 1 Gbit/s down"),
        (("100mbit", "none", "none"), (None, None), ""),
    ],
)
def test_a_direction_has_the_rate_of_the_link_where_it_has_no_other(
    given: tuple[str, str | None, str | None], expected: tuple[float | None, float | None], shown: str
) -> None:
    assert rates(*given) == expected
    assert links_text(*expected) == shown


@pytest.mark.usefixtures("signal_handlers_are_put_back")
@pytest.mark.parametrize("by", ["--scheme", "environment"])
def test_a_scheme_that_cannot_be_made_is_refused_before_any_rank_starts(
    by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparsync_lab.launch.supervisor.launch", lambda settings: pytest.fail("the ranks were started"))
    monkeypatch.setenv(VARIABLE, "topk" if by == "--scheme" else "tpok")
    chosen = ["--scheme", "tpok"] if by == "--scheme" else []
    with pytest.raises(SystemExit) as ended:
        cli.main(["launch", "--link", "none", *chosen, "--", "true"])
    assert ended.value.code == 2
    assert re.search(r"sparsync: error: .*unknown scheme 'tpok'.*did you mean 'topk'", capsys.readouterr().err)

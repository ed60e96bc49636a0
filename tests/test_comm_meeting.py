"""How ranks find each other on a store: whoever comes late, often, or never, and a store that hangs."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import ClassVar, TypeVar

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not in __all__

from helpers.distributed import context
from sparsync.comm.meeting import Meeting, Store, StoreSilentError

Result = TypeVar("Result")


def together(*calls: Callable[[], Result]) -> list[Result | str]:
    """Make the calls on a thread each, and return their results, or the messages of their errors."""
    results: list[Result | str] = [""] * len(calls)

    def run(place: int) -> None:
        try:
            results[place] = calls[place]()
        except RuntimeError as error:
            results[place] = str(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def meetings(store: Store, size: int) -> list[Meeting]:
    return [Meeting(store, "here", rank, size) for rank in range(size)]


def test_ranks_that_failed_a_different_number_of_times_meet_under_new_names() -> None:
    first, second = meetings(HashStore(), 2)
    for _ in range(3):
        with pytest.raises(
            RuntimeError, match=r"rank 0 of 2: rank 1 did not come to make a private group within 0\.05 s"
        ):
            first.meet("same", 0.05)
    with pytest.raises(RuntimeError, match="rank 1 of 2: rank 0 did not come"):
        second.meet("same", 0.05)
    names = [together(lambda: first.meet("same", 10.0), lambda: second.meet("same", 10.0)) for _ in range(2)]
    assert [len(set(each)) for each in names] == [1, 1] and names[0] != names[1]


def test_all_ranks_get_the_error_of_those_that_differ_even_one_that_comes_back_at_once() -> None:
    first, second = meetings(HashStore(), 2)

    def twice() -> str:
        (error,) = together(lambda: second.meet("step 2", 10.0))
        return f"{error}; then {second.meet('step 1', 10.0)}"

    def late() -> str:
        (error,) = together(lambda: first.meet("step 1", 10.0))
        return f"{error}; then {first.meet('step 1', 10.0)}"

    here, there = together(late, twice)
    assert here.startswith("ranks must agree, but rank 0 has step 1, rank 1 has step 2")
    assert there.startswith("ranks must agree, but rank 1 has step 2, rank 0 has step 1")
    assert here.split("; then ")[-1] == there.split("; then ")[-1]


def test_reports_of_a_failure_reach_all_and_none_stands_for_a_rank_that_is_silent() -> None:
    first, second, _ = meetings(HashStore(), 3)
    found = together(lambda: first.report("this", "no memory", 0.3), lambda: second.report("this", "", 0.3))
    assert found == [["no memory", "", None]] * 2


class Slow(PrefixStore):
    """Answers late, and notes who has read."""

    ended: ClassVar[list[str]] = []

    def get(self, key: str) -> bytes:
        time.sleep(0.1)
        found = super().get(key)
        self.ended.append("rank 1 has read")
        return found


def test_rank_0_whose_process_may_host_the_store_leaves_after_the_others_have_read() -> None:
    shared, Slow.ended = HashStore(), []
    first, second = Meeting(PrefixStore("", shared), "here", 0, 2), Meeting(Slow("", shared), "here", 1, 2)

    def leave() -> list[str | None]:
        reports = first.report("this", "no memory", 10.0)
        Slow.ended.append("rank 0 has left")
        return reports

    found = together(leave, lambda: second.report("this", "", 10.0))
    assert found == [["no memory", ""]] * 2
    assert Slow.ended == ["rank 1 has read", "rank 1 has read", "rank 0 has left"]


def serve_store(connection: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    time.sleep(600)


@pytest.fixture
def frozen() -> Iterator[Store]:
    """A client of a TCPStore whose process is stopped: it neither answers nor closes the connection."""
    ours, theirs = multiprocessing.Pipe()
    host = context().Process(target=serve_store, args=(theirs,), daemon=True)
    host.start()
    try:
        client = TCPStore("127.0.0.1", ours.recv(), timeout=timedelta(seconds=60), wait_for_workers=False)
        client.set("before", "")
        os.kill(host.pid, signal.SIGSTOP)
        yield client
    finally:
        host.kill()
        host.join()


def test_a_store_that_hangs_is_an_error_that_says_so(frozen: Store) -> None:
    rank = Meeting(frozen, "here", 1, 2)
    for call in (lambda: rank.meet("same", 0.2), lambda: rank.report("this", "no memory", 0.2)):
        with pytest.raises(
            StoreSilentError, match=r"rank 1 of 2 .* the store of the process group has not answered for 1\.2 s"
        ):
            call()

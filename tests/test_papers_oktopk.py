"""The study of Ok-Topk's claims: what an exchange takes, and when a training reaches its target."""

import pytest
import torch

from sparsync import Bucket
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync_lab.predict.network import Link
from sparsync_lab.rivals.gtopk import GTopK
from studies.papers import oktopk
from studies.papers.oktopk_runs import RecordingComm


def test_an_exchange_counts_the_bytes_that_a_rank_sends_or_receives_whichever_are_more() -> None:
    def body(comm: LocalComm) -> list[tuple[int, int]]:
        recording = RecordingComm(comm)
        recording.all_gather(torch.zeros(comm.rank + 1), [1, 2, 3])
        recording.all_to_all([torch.zeros(6 * comm.rank)] * 3, [0, 6, 12])
        recording.all_reduce(torch.zeros(3))
        return [(call.sent.steps, max(call.sent.nbytes, call.received)) for call in recording.calls]

    gathered = [4 * 5, 4 * 4, 4 * 6]  # rank 2 sends more than it receives
    split = [4 * 18, 4 * 12, 4 * 24]
    assert LocalWorld(3).run(body) == [[(1, a), (1, b), (2, 4 * 4)] for a, b in zip(gathered, split, strict=True)]


def test_a_tree_takes_all_of_its_rounds_one_after_the_other() -> None:
    def body(comm: LocalComm) -> list[tuple[int, int]]:
        recording = RecordingComm(comm)
        GTopK(0.1).start().reduce(Bucket("w", torch.arange(100.0) + comm.rank, 0), recording)
        return [(call.sent.steps, max(call.sent.nbytes, call.received)) for call in recording.calls]

    calls = LocalWorld(4).run(body)
    busiest = [max(each) for each in zip(*calls, strict=True)]
    assert [rounds for rounds, _ in busiest] == [1, 1, 1, 1]
    assert len({nbytes for _, nbytes in busiest}) == 1


def test_the_target_is_what_all_reach_and_times_add_compute_latency_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oktopk, "NETWORKS", {"a link": Link(8.0, 0.5)})
    monkeypatch.setattr(oktopk, "COMPUTE_S", 2.0)
    fast = {"evaluations": [(10, 9.0, 20, 100), (20, 4.0, 40, 200)]}
    slow = {"evaluations": [(10, 8.0, 10, 50), (20, 7.0, 20, 100)]}
    assert oktopk.target({"a": [fast], "b": [slow, slow]}) == 7.0
    assert oktopk.reached([fast], 7.0) == oktopk.Reached(20, {"a link": 20 * 2.0 + 40 * 0.5 + 200})
    assert oktopk.reached([slow, fast], 9.0) == oktopk.Reached(
        10, {"a link": 20 + (10 * 0.5 + 50 + 20 * 0.5 + 100) / 2}
    )

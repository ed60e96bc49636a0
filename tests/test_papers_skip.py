"""The logic of the study of SkipReduce and the thesis, without its trainings."""

from dataclasses import replace

import pytest
import torch

from sparsync.schemes import SkipReduce
from sparsync_lab.frontier.runs import Finished, Key
from sparsync_lab.workloads.one_process import Trained
from studies.papers import plays, skip_reduce, thesis
from studies.papers.plays import Plays

P = skip_reduce.P
DENSE = Trained(((8, 16.0), (16, 8.0), (24, 4.0)), 1e6, 2, 0, 1)


def finished(trained: Trained) -> Finished:
    return Finished(Key("", str(trained.rounds), P, 24, 0, 1.0), 10, 0.0, trained)


def test_the_step_of_a_target_lies_between_two_evaluations_and_is_the_first() -> None:
    assert skip_reduce.steps_to(((8, 16.0), (16, 8.0), (24, 12.0), (32, 4.0)), 10.0) == 14
    assert skip_reduce.steps_to(DENSE.quality, 3.0) is None


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_a_ring_that_skips_s_steps_saves_s_of_its_rounds_and_bytes_and_none_of_the_computing(share: float) -> None:
    skipping = replace(DENSE, nbytes=DENSE.nbytes * 10 / 14, rounds=10)
    dense = finished(DENSE)
    dense_s = skip_reduce.step_s(dense, share, dense)
    assert skip_reduce.step_s(finished(skipping), share, dense) == pytest.approx(
        dense_s * (1 - share * 4 / 14), rel=1e-12
    )


def test_the_gain_is_none_if_a_seed_never_reaches_the_target() -> None:
    never = finished(replace(DENSE, quality=((8, 16.0), (16, 15.0))))
    found = {"dense": [finished(DENSE)] * 2, "skipping": [finished(DENSE), never]}
    assert skip_reduce.gain(found, "skipping", 0.5) is None
    assert skip_reduce.gain(found, "dense", 0.5) == 1


def test_each_method_trains_as_many_steps_as_fit_in_the_time_of_dense() -> None:
    methods = ("dense", "skip_reduce:skip=4:mode=naive", "skip_reduce:skip=7")
    assert [skip_reduce.steps_in_time(each) for each in methods] == [200, 275, 381]


def test_a_form_that_leaves_out_another_number_of_steps_is_told() -> None:
    sent = skip_reduce.counted(4, SkipReduce(2), 16)
    assert set(sent) == {(*skip_reduce.expected(4, 2, 16), True)} == {(4, 64, True)}
    assert set(sent) != {(*skip_reduce.expected(4, 1, 16), True)}


def test_only_fixed_shards_never_meet_some_ranks() -> None:
    naive, authors, ours = (skip_reduce.shards(kind, 3, 16) for kind in ("naive", skip_reduce.AUTHORS, "random"))
    assert (naive.unseen, authors.unseen, ours.unseen) == (3 / (P - 1), 2 / (P - 1), 0)
    assert naive.bias > authors.bias > ours.bias > 0


def test_ranks_with_shards_draw_from_disjoint_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    numbered = torch.arange(P * 8).view(P, 8, 1).float()  # play, passage
    monkeypatch.setattr(plays, "passages", lambda: numbered)

    def drawn(job: Plays, rank: int) -> set[int]:
        batches = [job.batch(0, step, rank, P) for step in range(100)]
        assert all(torch.equal(each.input.flatten() // 8, each.target.float()) for each in batches)
        return {int(number) for each in batches for number in each.input.flatten()}

    by_play = [drawn(Plays(passages=8, shards="by play"), rank) for rank in range(P)]
    mixed = [drawn(Plays(passages=8, shards="mixed"), rank) for rank in range(P)]
    assert by_play == [set(range(8 * rank, 8 * rank + 8)) for rank in range(P)]
    assert mixed == [set(range(rank, 64, 8)) for rank in range(P)]
    assert drawn(Plays(passages=8), 0) == set(range(64))


def test_a_skipped_step_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thesis, "COUNT", 80)
    assert thesis.operations(SkipReduce.ring_pruning(4))["add"] == 3 / 8
    assert thesis.operations(SkipReduce(0))["add"] == 7 / 8

"""What lies in a folder of checkpoints, and what is taken from it: of which model, of which step, whole, and never executed."""

import errno
import hashlib
import io
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.resized import check_resized
from helpers.stepped import SHAPES, Stepped
from sparsync.attached import checkpoint
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.runtime import state_file
from sparsync.schemes import ExactMiCRO, PerParameter, TopK
from sparsync_lab.rivals.dgc import DGC

OTHER = {"weight": (4, 5), "head": (7,)}


def alone(body: Callable[[LocalComm], Any]) -> Any:
    return LocalWorld(1).run(body)[0]


def wait(comm: LocalComm) -> None:
    comm.all_gather(torch.zeros(1))


def saved(folder: Path, steps: int = 2, **options: Any) -> tuple[Stepped, Path]:
    """The handle of one rank after some steps, and the file it wrote."""
    handle = alone(lambda comm: Stepped(comm, **options).step(steps))
    return handle, checkpoint.save(handle, folder)


def fresh(**options: Any) -> Stepped:
    return alone(lambda comm: Stepped(comm, **options))


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


# Several models.


def test_two_models_in_one_folder_need_names_and_then_each_gets_its_own(tmp_path: Path) -> None:
    first, second = fresh().step(1), fresh(shapes=OTHER).step(2)
    checkpoint.save(first, tmp_path)
    checkpoint.save(second, tmp_path, name="head")
    again, other = fresh(), fresh(shapes=OTHER)
    assert checkpoint.load(again, tmp_path) == 1
    assert checkpoint.load(other, tmp_path, name="head") == 2
    assert torch.equal(again.residual, first.residual)
    assert torch.equal(other.residual, second.residual)


def test_a_state_of_another_model_or_scheme_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    _, file = saved(tmp_path)
    for options, message in (
        ({"shapes": OTHER}, "it has a parameter 'bias', which this model lacks"),
        ({"shapes": {**SHAPES, "more": (1,)}}, "it has no parameter 'more', which this model has"),
        ({"shapes": {**SHAPES, "bias": (6,)}}, r"its parameter 'bias' has the shape \(5,\), and here \(6,\)"),
        ({"scheme": ExactMiCRO(0.1)}, "its scheme is 'topk', and this one is 'exact_micro'"),
    ):
        handle = fresh(**options).step(3)
        before = handle.residual
        with pytest.raises(ValueError, match=message) as error:
            checkpoint.load(handle, tmp_path)
        assert str(error.value).startswith(str(file))
        assert torch.equal(handle.residual, before) and handle.state_dict()["step"] == 2
    with pytest.raises(ValueError, match=r"no state of sparsync-other .*none at all"):
        checkpoint.load(fresh(), tmp_path, name="other")
    for name in ("a/b", "a.b", "ä"):
        with pytest.raises(ValueError, match="name must consist of letters, digits"):
            checkpoint.save(fresh(), tmp_path, name=name)


# Damage.


def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    _, file = saved(tmp_path)
    content, drawn = file.read_bytes(), random.Random(0)
    for _ in range(400):
        damaged = bytearray(content)
        damaged[drawn.randrange(len(content))] ^= drawn.randrange(1, 256)
        with pytest.raises(ValueError, match=r"^the file cannot be loaded: .*; restore it from a copy"):
            state_file.decoded(torch.frombuffer(damaged, dtype=torch.uint8), "the file")


class Runs:
    """What a pickle runs when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return Path.touch, (self.folder / "executed",)


def test_content_that_is_no_state_is_one_clear_error_and_never_executed(tmp_path: Path) -> None:
    _, file = saved(tmp_path)
    whole, trusted, other = file.read_bytes(), io.BytesIO(), io.BytesIO()
    torch.save({"residual": torch.ones(3)}, other)
    torch.save(Runs(tmp_path), trusted)
    after = fresh()
    for content, message in (
        (b"", "cannot mmap an empty file"),
        (whole[:7], "it is not a state of format version 4, or was cut"),
        (whole[:-1], "it is not a state of format version 4, or was cut"),
        (b"x" + whole, "its checksum does not fit its content"),
        (other.getvalue(), "it is not a state of format version 4"),
        (whole.replace(b"sparsync 4", b"sparsync 7"), "it has format version 7, and this sparsync reads version 4"),
        (ended(trusted.getvalue()), "Weights only load failed"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            checkpoint.load(after, tmp_path)
        assert str(error.value).startswith(str(file))
        assert not after.state_dict()["scheme"]["residual"] and after.state_dict()["step"] == -1
    assert names(tmp_path) == [file.name]


def ended(content: bytes) -> bytes:
    """A zip file with the right comment."""
    return content[:-2] + b"\x4b\x00sparsync 4 " + hashlib.sha256(content[:-2]).hexdigest().encode()


# Writing.


def test_a_full_disk_leaves_the_old_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"weight": (1000, 100)}
    handle, _ = saved(tmp_path, shapes=shapes)
    kept, before = handle.residual, names(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            checkpoint.save(handle.step(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the older file is still whole" in vars(error.value)["__notes__"][0]

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(handle, tmp_path)
    assert names(tmp_path) == before
    again = fresh(shapes=shapes)
    assert checkpoint.load(again, tmp_path) == 2
    assert torch.equal(again.residual, kept)


def test_a_state_comes_back_as_it_was_and_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    tensors = [
        torch.tensor(3),
        torch.ones(2, 0),
        torch.arange(3).bool(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.eye(3).T,
    ]
    state = {"a": tensors, "b": {1: (2, None), "$c": {"x": -0.1}}, "c": [True, "1", float("inf"), 10**30]}
    state_file.save(state, tmp_path / "file", tmp_path / "unfinished")
    back = state_file.read(tmp_path / "file")
    for was, now in zip(tensors, back.pop("a"), strict=True):
        assert was.dtype == now.dtype and torch.equal(was, now)
    del state["a"]
    assert back == state
    with pytest.raises(TypeError, match=r"a state holds pathlib.* which cannot be saved"):
        state_file.save({"scheme": {"x": Path("x")}}, tmp_path / "file", tmp_path / "unfinished")
    assert names(tmp_path) == ["file"]


# Steps and worlds.


def test_a_training_changes_its_number_of_ranks_in_one_folder(tmp_path: Path) -> None:
    held: list[list[Tensor]] = []  # by each rank, after each training

    def body(comm: LocalComm) -> tuple[Tensor, Tensor]:
        handle = Stepped(comm)
        if held:
            assert checkpoint.load(handle, tmp_path) == 2 * len(held)
        loaded = handle.residual
        wait(comm)
        for _ in range(2):
            checkpoint.save(handle.step(), tmp_path)
        wait(comm)
        return loaded, handle.residual

    for P in (4, 2, 3, 3, 1, 4):
        ranks = LocalWorld(P).run(body)
        if held and len(held[-1]) != P:
            check_resized(held[-1], [loaded for loaded, _ in ranks], f"on {P} ranks")
        elif held:
            assert all(torch.equal(loaded, own) for (loaded, _), own in zip(ranks, held[-1], strict=True))
        held.append([residual for _, residual in ranks])
    # A rank that was not the last one to save keeps its file before this one until it saves again.
    assert [each for each in names(tmp_path) if "step12." in each] == [
        f"sparsync.step12.rank{rank}of4.pt" for rank in range(4)
    ]
    assert all("step12." in each or "step11." in each for each in names(tmp_path))


def test_ranks_that_die_between_their_saves_leave_the_checkpoint_before(tmp_path: Path) -> None:
    def train(comm: LocalComm) -> Tensor:
        handle = Stepped(comm).step(2)
        checkpoint.save(handle, tmp_path)
        kept = handle.residual
        handle.step(2)
        if comm.rank < 2:
            checkpoint.save(handle, tmp_path)
        wait(comm)
        return kept

    def resume(comm: LocalComm) -> Tensor:
        handle = Stepped(comm)
        assert checkpoint.load(handle, tmp_path) == 2
        wait(comm)
        loaded = handle.residual
        handle.step(2)
        if comm.rank == 2:  # with the files of the attempt before, this one would be complete
            checkpoint.save(handle, tmp_path)
        wait(comm)
        return loaded

    kept = LocalWorld(3).run(train)
    for _ in range(2):
        assert all(map(torch.equal, LocalWorld(3).run(resume), kept))
    assert names(tmp_path)[-1] == "sparsync.step4.rank2of3.pt"


def test_a_rank_ahead_of_the_others_removes_nothing_that_they_need(tmp_path: Path) -> None:
    """Between two exchanges of LocalTraining ranks do not wait for each other."""

    def body(comm: LocalComm) -> None:
        handle = Stepped(comm)
        # None of these needs another rank.
        for turn in range(2):
            if comm.rank == turn:
                for _ in range(3):
                    handle._step += 1
                    checkpoint.save(handle, tmp_path)
                    assert turn == 0 or checkpoint.holds_states(tmp_path)
            wait(comm)

    LocalWorld(2).run(body)
    assert names(tmp_path) == [f"sparsync.step3.rank{rank}of2.pt" for rank in range(2)]


def test_a_run_that_starts_again_does_not_replace_one_that_came_further(tmp_path: Path) -> None:
    saved(tmp_path, steps=9)
    with pytest.raises(
        ValueError, match="has a complete checkpoint of step 9, and this run is at step 1; load it first"
    ):
        checkpoint.save(fresh().step(), tmp_path)
    assert checkpoint.load(fresh(), tmp_path) == 9


def test_a_folder_without_all_states_is_refused(tmp_path: Path) -> None:
    assert not checkpoint.holds_states(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no state of sparsync"):
        checkpoint.load(fresh(), tmp_path / "nowhere")

    def body(comm: LocalComm) -> None:
        if comm.rank == 1:
            checkpoint.save(Stepped(comm), tmp_path)

    LocalWorld(3).run(body)
    assert checkpoint.holds_states(tmp_path)
    with pytest.raises(ValueError, match=r"step 0 has those of ranks \[1\] of 3"):
        checkpoint.load(fresh(), tmp_path)


# States.


def test_a_scheme_with_other_patterns_is_refused_before_anything_is_loaded() -> None:
    saved = fresh(scheme=PerParameter(TopK(0.1), {"bias": TopK(0.5)})).step(3).state_dict()
    for other, message in (
        (
            PerParameter(TopK(0.1), {"weight": TopK(0.5)}),
            r"this state is of schemes for \['', 'bias'\], and per_parameter has \['', 'weight'\]",
        ),
        (PerParameter(TopK(0.1), {"bias": DGC(0.5)}), r"its scheme is 'per_parameter\(topk, topk\)', and this one is"),
    ):
        handle = fresh(scheme=other).step()
        before = handle.residual
        with pytest.raises(ValueError, match=message):
            handle.load_state_dict(saved)
        assert torch.equal(handle.residual, before) and handle.state_dict()["step"] == 0

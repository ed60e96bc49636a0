"""A training in one process that is stopped and continues: it ends with the bits of one that was not, and leaves nothing behind."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from helpers.quick import one_in
from helpers.third_party import LineFit
from sparsync_lab.frontier import study
from sparsync_lab.frontier.runs import Key, unfinished_file
from sparsync_lab.frontier.study import FrontierStudy, complete, train
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync_lab.workloads.base import Batch
from sparsync_lab.workloads.gpt import Gpt
from sparsync_lab.workloads.muon import Several
from sparsync_lab.workloads.one_process import Trained
from sparsync_lab.workloads.unfinished import StateFileError, Unfinished

STEPS = 7


class Stopped(BaseException):
    """What stops a training, as SIGINT does."""


@dataclass(frozen=True)
class Stopping(Gpt):
    """A small transformer that is stopped at a step."""

    width: int = 8
    layers: int = 1
    heads: int = 2
    context: int = 6
    windows: int = 20
    batch_size: int = 4
    stop_at: int = STEPS

    def batch(self, seed: int, step: int, rank: int, ranks: int) -> Batch:
        if step == self.stop_at and rank == ranks - 1:
            raise Stopped
        return super().batch(seed, step, rank, ranks)


def trained(job: Gpt, choice: SchemeChoice, unfinished: Unfinished | None = None, follows: bool = False) -> Trained:
    return study._train(job, choice, Key("", "", 2, STEPS, 0, 1.0, follows), {2, 5, STEPS}, unfinished)


@pytest.mark.parametrize("optimizer", one_in(2, ["adamw", "muon"]))
@pytest.mark.parametrize(
    "scheme",
    one_in(
        4,
        [
            *("dense", "two_shot:density=0.1:values=int4", "micro:density=0.1", "demo", "onebit_adam:warmup_steps=2"),
            *("steps(keep=0.35)/two_shot:density=0.1:values=sign", "steps(keep=0.5)/two_shot:density=1.0:values=sign"),
            *("local_steps(every=2)/two_shot:density=0.1", "local_steps(every=3:delay=1)/dense"),
        ],
    ),
)
def test_a_training_that_was_stopped_ends_with_the_same_bits(
    tmp_path: Path, play: Path, scheme: str, optimizer: str
) -> None:
    (choice,) = parse_schemes(scheme, 0.1)
    options: dict[str, Any] = {"data": str(play), "optimizer_name": optimizer}
    whole = trained(Stopping(**options), choice)
    for every, stop in ((2, 3), (5, 6)):
        file = tmp_path / f"{every}.pt"
        with pytest.raises(Stopped):
            trained(Stopping(**options, stop_at=stop), choice, Unfinished(file, every))
        assert Unfinished(file).read()[0] == every * (stop // every)
        continued = Unfinished(file, every)
        assert trained(Stopping(**options), choice, continued) == whole
    assert {each.suffix for each in tmp_path.iterdir()} == {".pt"}


def test_residuals_that_follow_the_rate_are_kept_with_it(tmp_path: Path, play: Path) -> None:
    (choice,) = parse_schemes("topk:density=0.1", 0.1)
    whole = trained(Stopping(data=str(play)), choice, follows=True)
    with pytest.raises(Stopped):
        trained(Stopping(data=str(play), stop_at=4), choice, Unfinished(tmp_path / "a.pt", 4), follows=True)
    assert trained(Stopping(data=str(play)), choice, Unfinished(tmp_path / "a.pt", 4), follows=True) == whole


def test_all_ranks_decide_alike_what_is_kept_and_by_default_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("sparsync_lab.workloads.unfinished.time.monotonic", lambda: now[0])
    unfinished = Unfinished(tmp_path / "a.pt")
    assert not unfinished.due(1)
    now[0] = 600.0
    assert not unfinished.due(1)  # the first rank has decided
    assert unfinished.due(2)
    now[0] = 601.0
    assert unfinished.due(2)
    assert not unfinished.due(3)


def test_the_state_is_written_when_the_last_rank_has_given_its_own(tmp_path: Path) -> None:
    unfinished = Unfinished(tmp_path / "a.pt", 1)
    unfinished.keep(1, {"of": 1}, rank=1, ranks=2)
    assert unfinished.read() == (0, [])
    unfinished.keep(1, {"of": 0}, rank=0, ranks=2)
    assert unfinished.read() == (1, [{"of": 0}, {"of": 1}])
    unfinished.remove()
    assert not list(tmp_path.iterdir())


LINE_FIT = "helpers.third_party:LineFit"
BEHIND_DENSE = ("topk:density=0.1", "local_steps(every=2)/topk:density=0.1")


def kept_as(tmp_path: Path, scheme: str, write: Callable[[Path], object]) -> Callable[[], object]:
    """Return a training by a method that may fail, after `write` got the file of its state."""
    (choice,) = parse_schemes(scheme, 0.1)
    write(tmp_path / "a.pt")
    return lambda: train(LINE_FIT, {}, choice, Key("", "", 2, 6, 0, 1.0), Unfinished(tmp_path / "a.pt", 2))


@pytest.mark.parametrize("scheme", BEHIND_DENSE)
def test_a_state_that_cannot_be_read_or_used_is_no_failure_of_the_method(tmp_path: Path, scheme: str) -> None:
    damaged = kept_as(tmp_path, scheme, lambda file: file.write_bytes(b"half of it"))
    with pytest.raises(
        StateFileError, match=r"a\.pt cannot be read as the state of a training .*; make it readable, or del"
    ):
        damaged()
    other = {"step": 2, "ranks": [{"evaluations": {"quality": [], "error": None}}] * 2}
    of_another = kept_as(tmp_path, scheme, lambda file: torch.save(other, file))
    with pytest.raises(StateFileError, match=r"a\.pt does not fit its training \(KeyError.*; delete it"):
        of_another()


@pytest.mark.parametrize("scheme", BEHIND_DENSE)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64 vs 0")])
def test_a_state_that_cannot_be_written_is_no_failure_of_the_method(
    tmp_path: Path, scheme: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*given: object) -> None:
        raise error

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(
        StateFileError, match=r"cannot write the state .*a\.pt: .*(No space|unexpected pos).*; make room"
    ):
        kept_as(tmp_path, scheme, lambda file: None)()


def test_several_optimizers_continue_and_one_schedule_still_sets_their_rates() -> None:
    def made() -> Several:
        weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        optimizers = [SGD([each], lr=1.0, momentum=0.5) for each in weights]
        for each in weights:
            each.grad = torch.ones(2)
        return Several(*optimizers)

    before, after = made(), made()
    before.step()
    after.load_state_dict(before.state_dict())
    for group in after.param_groups:
        group["lr"] = 2.0
    after.step()
    # Momentum 1, then 0.5 + 1.
    assert [group["params"][0].tolist() for group in after.param_groups] == [[-2.0, -2.0]] * 2


def interrupted(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], None]:
    """Have LineFit stop at a step; return what undoes that."""
    plain = LineFit.batch

    def batch(self: LineFit, seed: int, step: int, rank: int, ranks: int) -> Batch:
        if step == at and seed >= 0:
            raise Stopped
        return plain(self, seed, step, rank, ranks)

    monkeypatch.setattr(LineFit, "batch", batch)
    return lambda: monkeypatch.setattr(LineFit, "batch", plain)


def test_a_study_that_was_stopped_continues_within_a_training_and_leaves_its_result_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = FrontierStudy(parse_schemes("dense", 0.1), "helpers.third_party:LineFit", steps=(6,), rates=(1.0,))
    whole = complete(asked, tmp_path / "whole", 1, print)
    put_back = interrupted(monkeypatch, at=5)
    with pytest.raises(Stopped):
        complete(asked, tmp_path / "out", 1, print, checkpoint_every=2)
    (key,) = whole
    assert Unfinished(unfinished_file(tmp_path / "out", key)).read()[0] == 4
    put_back()
    began: list[int] = []
    plain = LineFit.batch
    monkeypatch.setattr(
        LineFit, "batch", lambda self, seed, step, *of: began.append(step) or plain(self, seed, step, *of)
    )
    continued = complete(asked, tmp_path / "out", 1, print, checkpoint_every=2)
    assert continued[key].trained == whole[key].trained
    assert min(step for step in began if step) == 4
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["frontier.jsonl"]

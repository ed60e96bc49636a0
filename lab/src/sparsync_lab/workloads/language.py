"""What all language models share: windows of a text, the loss of predicting each next item, and the perplexity of held-out text."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparsync.core import generator
from sparsync_lab.workloads.base import (
    Batch,
    bare,
    chunks,
    device_of,
    evaluating,
    exactly_addable,
    moved,
    require_positive,
    share,
)

CHUNK = 10  # validation windows in one forward pass


def windows(text: Integer[Tensor, " n"], start: Int[Tensor, " windows"], length: int) -> Batch:
    """Return the windows of `length` items that begin at `start`, and the same ones an item later."""
    item = text[start[:, None] + torch.arange(length + 1)].long()  # [windows, length + 1]
    return Batch(item[:, :-1], item[:, 1:])


def drawn(
    text: Integer[Tensor, " n"], length: int, count: int, key: str, seed: int, step: int, rank: int, ranks: int
) -> Batch:
    """Return the share of rank `rank` of `count` windows that start anywhere, drawn again for each (seed, key, step)."""
    own = share(count, rank, ranks)
    start = torch.randint(text.numel() - length, (count,), generator=generator(seed, key, step))
    return windows(text, own.of(start), length)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean negative log-likelihood, in nats, of the items to predict."""
    return cross_entropy(model(batch.input).flatten(0, 1), batch.target.flatten())


def nats(
    model: nn.Module, text: Integer[Tensor, " n"], length: int, count: int, rank: int, ranks: int
) -> tuple[float, int]:
    """Return the summed negative log-likelihood of the items in this rank's share of `count` windows, and how many items.

    The windows lie evenly over `text`. The sums of all ranks are exact, see `Workload.evaluate`.
    """
    total, items = 0.0, 0
    for lost in _lost(model, text, length, count, rank, ranks):
        total += exactly_addable(lost.flatten())
        items += lost.numel()
    return total, items


def nats_and_error(
    model: nn.Module, text: Integer[Tensor, " n"], length: int, count: int
) -> tuple[float, int, float | None]:
    """Return what `nats` does of all windows, and the standard error of the mean over items, see `standard_error`.

    It is None where windows overlap, because they are more than the text has room for: their means are not independent then.
    """
    lost = list(_lost(model, text, length, count, 0, 1))
    total = sum(exactly_addable(each.flatten()) for each in lost)
    apart = count * length < text.numel()  # the first item of the text is never predicted
    error = standard_error(torch.cat(lost).double().mean(1)) if apart else None
    return total, sum(each.numel() for each in lost), error


def standard_error(x: Float[Tensor, " windows"]) -> float | None:
    """Return the standard error of the mean of `x`, sd / sqrt(windows); None for less than two windows, or NaN or Inf in them.

    That is how far the mean may be from that of the whole text the windows are a sample of. Windows must not overlap.
    """
    return finite(float(x.std()) / math.sqrt(len(x))) if len(x) > 1 else None


def finite(x: float) -> float | None:
    """Return `x`, or None where it is NaN or infinite."""
    return x if math.isfinite(x) else None


def perplexity(total: float, count: int) -> float:
    """Return e to the mean of `count` negative log-likelihoods; infinite for a model that has diverged."""
    require_positive(count=count)
    mean = total / count
    return math.exp(mean) if mean < 700 else math.inf  # e**709 is the last that a float holds; NaN is not below 700


def require_windows(training: Tensor, held_out: Tensor, length: int, items: str) -> None:
    """Raise ValueError where a part of the text is too short for one window; `items` are words, characters or bytes."""
    if min(training.numel(), held_out.numel()) <= length:
        raise ValueError(
            f"the text is too short for windows of {length} {items} and the one after: {training.numel()} {items} to train on and "
            f"{held_out.numel()} held out; choose a smaller window or more text"
        )


def _lost(
    model: nn.Module, text: Integer[Tensor, " n"], length: int, count: int, rank: int, ranks: int
) -> Iterator[Float[Tensor, "windows length"]]:
    """Yield the negative log-likelihood of each item in this rank's share of the windows, chunk by chunk."""
    start = torch.linspace(0, text.numel() - length - 1, count, dtype=torch.float64).long()
    model = bare(model)
    with evaluating(model):
        for chunk in chunks(count, CHUNK, rank, ranks):
            batch = moved(windows(text, chunk.of(start), length), device_of(model))
            lost = cross_entropy(model(batch.input).flatten(0, 1), batch.target.flatten(), reduction="none")
            yield lost.view(-1, length)

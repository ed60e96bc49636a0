"""Operations on all parameters of a bucket: lists of tensors share launches, because a launch per tensor takes longer than the work."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Rows, Span
from sparsync.kernels import operations
from sparsync.kernels.cuda.launch import on_one_device, table, takes_all
from sparsync.kernels.operations import COLUMNS, MIX, WORDS

SPLIT = 256  # the most programs per tensor
ROWS = 8  # rows that a program adds at once
TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}  # word types by size in bytes
FOLDED = {"COLUMNS": COLUMNS, "WIDTH": triton.next_power_of_2(COLUMNS)}
assert TYPES.keys() == WORDS.keys()

# Any: the result that `operations` declares, or NotImplemented for unsupported arguments.


def write_own_(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    weights: Tensor,
    unsent: Tensor,
    rows: Rows | None,
    divisor: int,
    share: float,
) -> Any:
    if not targets or not on_one_device([weights, unsent, *targets]):
        return NotImplemented
    if rows is not None:
        unsent = unsent.clone()
        operations.divide_rows_(unsent, rows, divisor)
    local = weights - unsent * share
    spans = [Span(start, start + target.numel()) for target, start in zip(targets, starts, strict=True)]
    torch._foreach_copy_(
        list(targets), [span.of(local).view(target.shape) for target, span in zip(targets, spans, strict=True)]
    )
    return digests(targets)


def digests(tensors: Sequence[Tensor]) -> Any:
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    if not takes_all(flat):
        return NotImplemented
    with torch.cuda.device_of(flat[0]):
        return _digests(flat)


def _digests(flat: Sequence[Tensor]) -> Tensor:
    by_word: dict[int, list[tuple[int, Tensor]]] = {}
    for place, vector in enumerate(flat):
        nbytes = operations.word_of(vector)
        aligned = vector.clone() if vector.data_ptr() % nbytes else vector
        by_word.setdefault(nbytes, []).append((place, aligned))
    found = torch.empty(len(flat), dtype=torch.int64, device=flat[0].device)
    for nbytes, members in by_word.items():
        described = [[vector.data_ptr(), vector.nbytes // nbytes, place] for place, vector in members]
        about = table([number for row in described for number in row], torch.int64, found.device)
        sums = torch.zeros(len(members), FOLDED["WIDTH"], dtype=torch.int64, device=found.device)
        if any(count >= 2 * COLUMNS for _, count, _ in described):
            most = max(count for _, count, _ in described) // COLUMNS
            split = min(SPLIT, triton.cdiv(most, ROWS))
            _fold_kernel[len(members), split](about, sums, split, WORD=TYPES[nbytes], ROWS=ROWS, **FOLDED)
        _hash_kernel[(len(members),)](about, sums, found, *MIX, WORD=TYPES[nbytes], **FOLDED)
    return found


@triton.jit
def _unfolded(count, COLUMNS: tl.constexpr):
    """Count the words before the rows that are added; all words of a short tensor."""
    return tl.where(count >= 2 * COLUMNS, COLUMNS + count % (2 * COLUMNS), count)


@triton.jit(do_not_specialize=["split"])
def _fold_kernel(
    about, sums, split, WORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr
):
    tensor = tl.program_id(0)
    words = tl.load(about + 3 * tensor).to(tl.pointer_type(WORD))
    count = tl.load(about + 3 * tensor + 1)
    rest = _unfolded(count, COLUMNS)
    rows = (count - rest) // COLUMNS
    column = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros([WIDTH], dtype=tl.int64)
    first = tl.program_id(1).to(tl.int64) * ROWS
    while first < rows:
        row = first + tl.arange(0, ROWS)[:, None]
        block = tl.load(words + rest + row * COLUMNS + column, mask=(row < rows) & (column < COLUMNS), other=0)
        total += tl.sum(block.to(tl.int64), axis=0)
        first += split.to(tl.int64) * ROWS
    lane = tl.arange(0, WIDTH)
    tl.atomic_add(sums + tensor * WIDTH + lane, total, mask=lane < COLUMNS)


@triton.jit
def _mixed(word, number, mix0, mix1, mix2):
    """Hash words and their numbers as splitmix64 does, with logical shifts."""
    z = word + number * mix0
    z = (z ^ (z >> 30 & ((1 << 34) - 1))) * mix1
    z = (z ^ (z >> 27 & ((1 << 37) - 1))) * mix2
    return z ^ (z >> 31 & ((1 << 33) - 1))


@triton.jit
def _hash_kernel(about, sums, found, mix0, mix1, mix2, WORD: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    tensor = tl.program_id(0)
    words = tl.load(about + 3 * tensor).to(tl.pointer_type(WORD))
    count = tl.load(about + 3 * tensor + 1)
    rest = _unfolded(count, COLUMNS)
    lane = tl.arange(0, WIDTH).to(tl.int64)
    total = tl.zeros([WIDTH], dtype=tl.int64)
    first = tl.zeros([], dtype=tl.int64)
    while first < rest:
        word = tl.load(words + first + lane, mask=first + lane < rest, other=0).to(tl.int64)
        total += tl.where(first + lane < rest, _mixed(word, first + lane + 1, mix0, mix1, mix2), 0)
        first += WIDTH
    folded = tl.load(sums + tensor * WIDTH + lane)
    number = rest + lane + 1
    total += tl.where((lane < COLUMNS) & (rest < count), _mixed(folded, number, mix0, mix1, mix2), 0)
    tl.store(found + tl.load(about + 3 * tensor + 2), tl.sum(total, axis=0))

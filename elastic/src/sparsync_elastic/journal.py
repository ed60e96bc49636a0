"""The moves of the common weights, bit for bit, for a rank that catches up from an older copy.

A sparse mean with values in few bits takes about as many bytes as the scheme's packets; any other mean takes the bytes of its non-zero
elements.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import sparsync

Packed = Mapping[str, Any]  # Any: tensors and numbers
_BITS = torch.arange(8, dtype=torch.uint8)


class Journal:
    """The moves of a handle from here on, in order.

    `broken`: something other than a step has changed the common weights, or the moves exceed `most_nbytes` bytes, and a new copy is
    smaller.
    """

    def __init__(self, handle: sparsync.Handle, most_nbytes: int) -> None:
        self.moves: deque[Packed] = deque()
        self.broken = False
        self._nbytes, self._most_nbytes = 0, most_nbytes
        self._end = handle.on_move(self.note)

    def note(self, move: Mapping[str, Any] | None) -> None:  # Any: as Snapshot.moves
        """Add a move of the handle; None: the weights have changed in another way."""
        if self.broken:
            return
        means = [] if move is None else [packed(each) for each in move["means"]]
        self._nbytes += sum(map(nbytes_of, means))
        if move is None or self._nbytes > self._most_nbytes:
            self.stop()
        else:
            self.moves.append({**move, "means": means})

    def stop(self) -> None:
        """Mark the journal as broken, and drop its moves."""
        self.broken = True
        self.moves.clear()

    def end(self) -> None:
        """Stop listening to the handle. Call it once, between two steps."""
        self.stop()
        self._end()


def unpacked_move(move: Packed) -> dict[str, Any]:  # Any: as Snapshot.moves
    """Unpack a move of a journal for `Handle.restore`."""
    return {**move, "means": [unpacked(each) for each in move["means"]]}


def packed(x: Tensor) -> Packed:
    """Pack the bits of `x` [n]. Many float32 zeros, or elements with the magnitude of the previous one, take few bytes."""
    x = x.detach().cpu().contiguous()
    if x.dtype != torch.float32 or not x.numel():
        return {"values": x.clone()}
    bits = x.view(torch.int32)
    index = bits.nonzero().view(-1)
    bits = bits if len(index) == len(bits) else bits[index]
    magnitudes, counts = torch.unique_consecutive(bits & 0x7FFFFFFF, return_counts=True)
    common = {"n": x.numel(), "k": len(bits), **_packed_index(index, x.numel())}
    if 2 * len(counts) > len(bits):
        return {**common, "bits": bits.clone()}  # a view would be sent with its whole storage
    different, which = torch.unique(magnitudes, return_inverse=True)
    runs = {"magnitudes": different, "which": _short(which), "counts": _short(counts)}
    return {**common, **runs, "signs": _packed_bits(bits < 0)}


def unpacked(found: Packed) -> Tensor:
    """Unpack a tensor, on the CPU."""
    if "values" in found:
        return found["values"].clone()
    n, k = found["n"], found["k"]
    if "bits" in found:
        bits = found["bits"]
    else:
        bits = found["magnitudes"][found["which"].long()].repeat_interleave(found["counts"].long())
        bits = torch.where(_unpacked_bits(found["signs"], k), bits | torch.iinfo(torch.int32).min, bits)
    whole = torch.zeros(n, dtype=torch.int32)
    whole[_unpacked_index(found)] = bits
    return whole.view(torch.float32)


def nbytes_of(found: Any) -> int:  # Any: Packed, or as Handle.state_dict
    """Sum the bytes of all tensors inside."""
    if isinstance(found, Tensor):
        return found.nbytes
    inner = found.values() if isinstance(found, Mapping) else found if isinstance(found, (list, tuple)) else ()
    return sum(map(nbytes_of, inner))


def _packed_index(index: Tensor, n: int) -> dict[str, Tensor]:
    """Pack ascending numbers below n into 2 + log2(n / k) bits each, by Elias and Fano: low bits unchanged, high bits in unary."""
    k = len(index)
    if k == n:
        return {}
    low = _low_bits(k, n)
    places = (index >> low) + torch.arange(k)
    high = torch.zeros((n >> low) + k + 1, dtype=torch.bool).index_fill_(0, places, True)
    return {"low": _packed_bits(((index.view(-1, 1) >> torch.arange(low)) & 1).view(-1)), "high": _packed_bits(high)}


def _unpacked_index(found: Packed) -> Tensor:
    n, k = found["n"], found["k"]
    if k == n:
        return torch.arange(n)
    low = _low_bits(k, n)
    places = _unpacked_bits(found["high"], (n >> low) + k + 1).nonzero().view(-1)
    lower = _unpacked_bits(found["low"], k * low).view(k, low).long() << torch.arange(low)
    return (places - torch.arange(k) << low) + lower.sum(1)


def _low_bits(k: int, n: int) -> int:
    return (n // k).bit_length() - 1 if k else 0


def _short(x: Tensor) -> Tensor:
    """Convert non-negative numbers to the shortest type that holds them."""
    most = int(x.max()) if len(x) else 0
    return x.to(torch.uint8 if most < 1 << 8 else torch.int16 if most < 1 << 15 else torch.int32)


def _packed_bits(bits: Tensor) -> Tensor:
    """Pack booleans [k] into bytes, [k / 8 rounded up]."""
    whole = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (whole << _BITS).sum(1, dtype=torch.uint8)


def _unpacked_bits(found: Tensor, k: int) -> Tensor:
    return ((found.view(-1, 1) >> _BITS) & 1).view(-1)[:k].bool()

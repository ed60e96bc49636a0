"""What moves the common weights, step by step and to the bit, for a rank that has a copy of older ones and is to catch up.

A mean that a scheme has made of few positions and of values in few bits takes about as many bytes here as in the scheme's own packets;
any other takes what its non-zero elements take.
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
    """The moves of a handle from now on, in order. `broken`: something else has changed the common weights since, or too much has.

    `most_nbytes` is when a new copy is less than all that has moved the old one.
    """

    def __init__(self, handle: sparsync.Handle, most_nbytes: int) -> None:
        self.moves: deque[Packed] = deque()
        self.broken = False
        self._nbytes, self._most_nbytes = 0, most_nbytes
        self._end = handle.on_move(self.note)

    def note(self, move: Mapping[str, Any] | None) -> None:  # Any: as Snapshot.moves
        """Add a move of the handle."""
        if self.broken:
            return
        means = [] if move is None else [packed(each) for each in move["means"]]
        self._nbytes += sum(map(nbytes_of, means))
        if move is None or self._nbytes > self._most_nbytes:
            self.stop()
        else:
            self.moves.append({**move, "means": means})

    def stop(self) -> None:
        """Note that there is no way to catch up by these moves."""
        self.broken = True
        self.moves.clear()

    def end(self) -> None:
        """Stop, and listen no longer. Once, between two steps."""
        self.stop()
        self._end()

    def take(self) -> Packed:
        """Return the first move, and forget it. Raises RuntimeError where the journal has ended."""
        try:
            return self.moves.popleft()
        except IndexError as error:
            raise RuntimeError("the journal has ended") from error


def unpacked_move(move: Packed) -> dict[str, Any]:  # Any: as Snapshot.moves
    """Return a move of a journal as `Handle.restore` takes it."""
    return {**move, "means": [unpacked(each) for each in move["means"]]}


def packed(x: Tensor) -> Packed:
    """Return the bits of `x` [n]. Those of float32 are shorter where many elements are zero or have the magnitude of the one before."""
    x = x.detach().cpu().contiguous()
    if x.dtype != torch.float32 or not x.numel():
        return {"values": x.clone()}
    bits = x.view(torch.int32)
    index = bits.nonzero().view(-1)
    bits = bits if len(index) == len(bits) else bits[index]
    magnitudes, counts = torch.unique_consecutive(bits & 0x7FFFFFFF, return_counts=True)
    found = {"n": x.numel(), "k": len(bits), **_packed_index(index, x.numel())}
    if 2 * len(counts) > len(bits):
        return {
            **found,
            "bits": bits.clone(),
        }  # cloned, because a part of a tensor is sent with the whole of its memory
    different, which = torch.unique(magnitudes, return_inverse=True)
    runs = {"magnitudes": different, "which": _short(which), "counts": _short(counts)}
    return {**found, **runs, "signs": _packed_bits(bits < 0)}


def unpacked(found: Packed) -> Tensor:
    """Return what `packed` was given, on this machine's processor."""
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
    """Return the bytes of the tensors in it."""
    if isinstance(found, Tensor):
        return found.nbytes
    inner = found.values() if isinstance(found, Mapping) else found if isinstance(found, (list, tuple)) else ()
    return sum(map(nbytes_of, inner))


def _packed_index(index: Tensor, n: int) -> dict[str, Tensor]:
    """Return ascending numbers below n in 2 + log2(n / k) bits each, by Elias and Fano: low bits as they are, high ones in unary."""
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
    """Return numbers of 0 and more in the shortest type that holds them."""
    most = int(x.max()) if len(x) else 0
    return x.to(torch.uint8 if most < 1 << 8 else torch.int16 if most < 1 << 15 else torch.int32)


def _packed_bits(bits: Tensor) -> Tensor:
    """Return booleans [k] as bytes, [k / 8 rounded up]."""
    whole = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (whole << _BITS).sum(1, dtype=torch.uint8)


def _unpacked_bits(found: Tensor, k: int) -> Tensor:
    return ((found.view(-1, 1) >> _BITS) & 1).view(-1)[:k].bool()

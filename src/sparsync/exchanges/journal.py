"""What moves the common weights, step by step and to the bit, for a rank that has a copy of older ones and is to catch up.

A mean that a scheme has made of few positions and of values in few bits takes about as many bytes here as in the scheme's own packets;
any other takes what its non-zero elements take.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsync import wire

Packed = Mapping[str, Any]  # Any: tensors and numbers
_BITS = torch.arange(8, dtype=torch.uint8)


class Journal:
    """The moves since a state was copied, in order. `broken`: something else has changed the common weights since, or too much has.

    `most_nbytes` is when a new copy is less than all that has moved the old one.
    """

    def __init__(self, most_nbytes: int) -> None:
        self.moves: deque[Packed] = deque()
        self.broken = False
        self._nbytes, self._most_nbytes = 0, most_nbytes

    def note(self, move: Packed, nbytes: int) -> None:
        """Add a move that takes so many bytes."""
        self._nbytes += nbytes
        if self._nbytes > self._most_nbytes:
            self.stop()
        if not self.broken:
            self.moves.append(move)

    def stop(self) -> None:
        """Note that there is no way to catch up by these moves."""
        self.broken = True
        self.moves.clear()

    def take(self) -> Packed:
        """Return the first move, and forget it. Raises RuntimeError where the journal has ended."""
        try:
            return self.moves.popleft()
        except IndexError as error:
            raise RuntimeError("the journal has ended") from error

    def take_all(self) -> list[Packed]:
        """Return all moves, and forget them."""
        return [self.take() for _ in range(len(self.moves))]


def packed(x: Tensor) -> Packed:
    """Return the bits of `x` [n]. Those of float32 are shorter where many elements are zero or have the magnitude of the one before."""
    x = x.detach().cpu().contiguous()
    if x.dtype != torch.float32 or not x.numel():
        return {"values": x.clone()}
    bits = x.view(torch.int32)
    index = bits.nonzero().view(-1)
    bits = bits if len(index) == len(bits) else bits[index]
    magnitudes, counts = torch.unique_consecutive(bits & 0x7FFFFFFF, return_counts=True)
    # Cloned, because a part of a tensor is sent with the whole of its memory.
    index = wire.encode_fixed_length(index.to(torch.int32), x.numel()).clone()
    found = {"n": x.numel(), "k": len(bits), "index": index}
    if 2 * len(counts) > len(bits):
        return {**found, "bits": bits.clone()}
    different, which = torch.unique(magnitudes, return_inverse=True)
    runs = {"magnitudes": different.clone(), "which": _short(which), "counts": _short(counts)}
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
    whole[wire.decode_fixed_length(found["index"], k, n).long()] = bits
    return whole.view(torch.float32)


def nbytes_of(found: Any) -> int:  # Any: Packed, or as Handle.state_dict
    """Return the bytes of the tensors in it."""
    if isinstance(found, Tensor):
        return found.nbytes
    inner = found.values() if isinstance(found, Mapping) else found if isinstance(found, (list, tuple)) else ()
    return sum(map(nbytes_of, inner))


def on_processor(state: Any) -> Any:  # Any: as Handle.state_dict
    """Return a state with its tensors in this machine's memory."""
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, Mapping):
        return {key: on_processor(each) for key, each in state.items()}
    return [on_processor(each) for each in state] if isinstance(state, list) else state


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

"""The specification of the passes of exchanged steps, in plain torch. Other backends write the same bytes and numbers, bit for bit.

A rank's gradients are read where they lie: `gradients[i]`, of any shape and floating type, has its first element at `starts[i]` of the
vector of all elements, and counts `factors[i]` times. Where no gradient lies it counts as zero. `spans[j]` are adjacent elements with the
same `numbers[j]`; nothing is done outside of them. `skip`, one number, leaves everything as it is where it is not zero: it may be on a
device, and nobody waits for it.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.functional import pad

from sparsync.core import Span, spans
from sparsync.kernels.share_reference import encode_share_by
from sparsync.kernels.value_reference import greatest_of, nan_packet, values_decode, values_encode

HASH = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)  # an odd number near 2^32 over the golden ratio, and those of MurmurHash3
_WORD = 0xFFFFFFFF

Spread = tuple[float, float, float, float]  # rate, beta2, eps, 1 - beta2^t
Move = tuple[float, float, float]  # beta1, the share of a weight that stays, 1 / (1 - beta1^t)


def squares_fit(tensors: Sequence[Tensor], factors: Sequence[float], most: float) -> bool | Tensor:
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device if tensors else None)
    for each, factor in zip(tensors, factors, strict=True):
        wide = each.reshape(-1).to(torch.promote_types(each.dtype, torch.float32)) * factor
        total += wide.double().square().sum()
    return bool(total <= most)  # a host sync, but not on a GPU, where the flag stays


def make_steps_(
    out: Float[Tensor, " n"],
    gradients: Sequence[Tensor],
    starts: Sequence[int],
    factors: Sequence[float],
    square: Float[Tensor, " n"],
    ratio: Float[Tensor, " blocks"],
    block: int,
    spans: Sequence[Span],
    numbers: Sequence[Spread],
    skip: Tensor | None = None,
) -> None:
    if skip is not None and bool(skip):
        for span in spans:
            span.of(out).zero_()
        return
    gradient = gathered(gradients, starts, factors, out)
    ratios = ratio.repeat_interleave(block)
    for span, (rate, beta2, eps, unbiased) in zip(spans, numbers, strict=True):
        g, v = span.of(gradient), span.of(square)
        v.mul_(beta2).add_(g.square().mul_(1 - beta2))
        scaled = (span.of(ratios) / torch.tensor(unbiased, dtype=out.dtype, device=out.device)).mul_(v)
        # In float64 and back: torch's own root of float32 is not the nearest number on every machine.
        root = scaled.double().sqrt_().to(out.dtype)
        span.of(out).copy_(g.mul_(rate).div_(root.add_(eps)))


def encode_steps_(
    residual: Float[Tensor, " n"],
    gradients: Sequence[Tensor],
    starts: Sequence[int],
    factors: Sequence[float],
    square: Float[Tensor, " n"] | None,
    ratio: Float[Tensor, " blocks"] | None,
    block: int,
    spans: Sequence[Span],
    numbers: Sequence[Spread],
    rank: int,
    P: int,
    bits: int,
    skip: Tensor | None = None,
    out: Float[Tensor, " n"] | None = None,
) -> UInt8[Tensor, " nbytes"]:
    out = residual if out is None else out
    chunks = [chunk for owner, chunk in enumerate(chunks_of(residual.numel(), P)) if owner != rank]
    if skip is not None and bool(skip):
        packets = [nan_packet(len(chunk), bits, residual.device) for chunk in chunks]
    else:
        if square is not None and ratio is not None:
            step = torch.zeros_like(residual)
            make_steps_(step, gradients, starts, factors, square, ratio, block, spans, numbers)
            torch.add(residual, step, out=out)
        elif gradients:  # else every zero keeps its sign
            torch.add(residual, gathered(gradients, starts, factors, residual), out=out)
        packets = [encode_share_by(values_encode, values_decode, chunk.of(out), bits, P) for chunk in chunks]
    return torch.cat([residual.new_empty(0, dtype=torch.uint8), *packets])


def move_steps_(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    momentum: Float[Tensor, " n"],
    mean: Float[Tensor, " n"],
    spans: Sequence[Span],
    numbers: Sequence[Move],
    skip: Tensor | None = None,
) -> None:
    if skip is not None and bool(skip):
        return
    taken = torch.zeros_like(momentum)
    for span, (beta1, _, length) in zip(spans, numbers, strict=True):
        m = span.of(momentum)
        m.mul_(beta1).add_(span.of(mean) * (1 - beta1))
        span.of(taken).copy_(m * length)
    kept = torch.ones_like(momentum)
    for span, (_, share, _) in zip(spans, numbers, strict=True):
        span.of(kept).fill_(share)
    for each, start in zip(targets, starts, strict=True):
        own = Span(start, start + each.numel())
        each.copy_((each.reshape(-1) * own.of(kept) - own.of(taken)).view(each.shape))


def apply_steps_(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    momentum: Float[Tensor, " n"],
    packets: Sequence[Tensor],
    bits: int,
    spans: Sequence[Span],
    numbers: Sequence[Move],
    skip: Tensor | None = None,
) -> None:
    if skip is not None and bool(skip):
        return
    chunks = chunks_of(momentum.numel(), len(packets))
    parts = [values_decode(each, len(chunk), bits) for each, chunk in zip(packets, chunks, strict=True)]
    move_steps_(targets, starts, momentum, torch.cat(parts).to(momentum.dtype), spans, numbers)


def packets_fit(
    packets: Sequence[Tensor], lengths: Sequence[int], bits: int, times: int, dtype: torch.dtype = torch.float32
) -> bool | Tensor:
    if not any(lengths):
        return True
    # A host sync, but not on a GPU, where the flag stays. NaN is not below anything.
    if times * float(greatest_of(packets, lengths, bits)) <= min(
        torch.finfo(each).max for each in (dtype, torch.float32)
    ):
        return True
    values = [values_decode(each, length, bits) for each, length in zip(packets, lengths, strict=True)]
    return all(bool(((each * times).isfinite() & each.to(dtype).isfinite()).all()) for each in values)


def write_mean_(
    grad: Tensor,
    error: Float[Tensor, " n"] | None,
    residual: Float[Tensor, " n"] | None,
    packets: Sequence[Tensor],
    bits: int,
    rank: int,
    skip: Tensor | None = None,
) -> None:
    if skip is not None and bool(skip):
        grad.fill_(torch.nan)
        return
    chunks = chunks_of(grad.numel(), len(packets))
    if residual is not None and error is not None:
        residual.copy_(error)
    for owner, (packet, chunk) in enumerate(zip(packets, chunks, strict=True)):
        mean = values_decode(packet, len(chunk), bits)
        chunk.of(grad).copy_(mean)
        if residual is not None and owner == rank and grad.dtype != mean.dtype:
            chunk.of(residual).add_(len(packets) * (mean - chunk.of(grad).to(mean.dtype)))


def sketch(
    gradients: Sequence[Tensor], starts: Sequence[int], factors: Sequence[float], like: Tensor, block: int, key: int
) -> tuple[Float[Tensor, " blocks"], Float[Tensor, " blocks"]]:
    flat = gathered(gradients, starts, factors, like)
    signed = torch.where(signs(flat.numel(), key, flat.device), -flat, flat)
    return _folded(signed, block), _folded(flat.square(), block)


def signs(n: int, key: int, device: torch.device) -> Tensor:
    """Return for each of `n` places whether a sketch counts it as less than nothing: the lowest bit of a hash of the place and `key`."""
    first, *factors = HASH
    word = (torch.arange(n, device=device) * first + key) & _WORD
    for shift, factor in zip((16, 13), factors, strict=True):
        word = ((word ^ word >> shift) * factor) & _WORD
    return ((word ^ word >> 16) & 1).bool()


def gathered(gradients: Sequence[Tensor], starts: Sequence[int], factors: Sequence[float], like: Tensor) -> Tensor:
    """Return the vector of all gradients, [n]."""
    flat = torch.zeros_like(like)
    for each, start, factor in zip(gradients, starts, factors, strict=True):
        Span(start, start + each.numel()).of(flat).copy_(each.reshape(-1)).mul_(factor)
    return flat


def chunks_of(n: int, P: int) -> Sequence[Span]:
    return spans(n, P)


def _folded(x: Tensor, block: int) -> Tensor:
    """Return the sum of each block. Halves of a power of two of elements, zeros behind those that are there, are added: a fixed order."""
    rows = pad(x, (0, -x.numel() % block)).view(-1, block)
    rows = pad(rows, (0, (1 << (block - 1).bit_length()) - block))
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0].clone()

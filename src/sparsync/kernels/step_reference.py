"""The passes of exchanged steps: their specification in plain torch, as in `operations`.

A rank's gradients are read in place: `gradients[i]`, of any shape and floating type, begins at position `starts[i]` of the
vector of all elements, and is multiplied by `factors[i]`. Elements without a gradient count as zero. `spans[j]` are adjacent elements with
the same `numbers[j]`; elements outside all spans do not change. If `skip`, one number, is not zero, nothing changes. It may be on a
device, and takes no host sync there.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.functional import pad

from sparsync.core import Span, exact_divisor
from sparsync.core import spans as chunks_of
from sparsync.kernels.dispatch import operation
from sparsync.kernels.value_reference import greatest_of, nan_packet, values_decode, values_encode

HASH = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)  # an odd number near 2^32 over the golden ratio, and those of MurmurHash3
_WORD = 0xFFFFFFFF

Vector = Float[Tensor, " n"]
Spread = tuple[float, float, float, float]  # rate, beta2, eps, 1 - beta2^t
Move = tuple[float, ...]  # beta1, the share of a weight that stays, 1 / (1 - beta1^t); with scales, a Spread follows
# Second moments v, [n], one over their mean in each block, [blocks], the length of a block, and what is added to a scale
Scales = tuple[Tensor, Tensor, int, float]


@operation
def squares_fit(tensors: Sequence[Tensor], factors: Sequence[float], most: float) -> bool | Tensor:
    """Return whether the sum of squares of the tensors, times their factors, is at most `most`; false if any element is NaN.

    Sums in float64. On a GPU the answer is a tensor [], without a host sync.
    """
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device if tensors else None)
    for tensor, factor in zip(tensors, factors, strict=True):
        wide = tensor.reshape(-1).to(torch.promote_types(tensor.dtype, torch.float32)) * factor
        total += wide.double().square().sum()
    return bool(total <= most)  # a host sync, but not on a GPU, where the flag stays


@operation
def make_steps_(
    out: Vector,
    gradients: Sequence[Tensor],
    starts: Sequence[int],
    factors: Sequence[float],
    square: Vector,
    ratio: Float[Tensor, " blocks"],
    block: int,
    spans: Sequence[Span],
    numbers: Sequence[Spread],
    skip: Tensor | None = None,
) -> None:
    """Add gradients to second moments, and write AdamW's steps to `out`. The module docstring describes the arguments.

    An element has the numbers (rate, beta2, eps, unbiased) of its span and the ratio r of its block of `block` elements:
    v = beta2 v + (1 - beta2) g^2, out = rate g / (sqrt(v r / unbiased) + eps).
    If `skip`, one number, is not zero, second moments do not change, and the steps are zero.
    """
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
        # Via float64, because torch's float32 square root is not correctly rounded on every machine.
        root = scaled.double().sqrt_().to(out.dtype)
        span.of(out).copy_(g.mul_(rate).div_(root.add_(eps)))


@operation
def encode_steps_(
    residual: Vector,
    gradients: Sequence[Tensor],
    starts: Sequence[int],
    factors: Sequence[float],
    square: Vector | None,
    ratio: Float[Tensor, " blocks"] | None,
    block: int,
    spans: Sequence[Span],
    numbers: Sequence[Spread],
    rank: int,
    P: int,
    bits: int,
    skip: Tensor | None = None,
    out: Vector | None = None,
) -> UInt8[Tensor, " nbytes"]:
    """Make steps as `make_steps_` does, add them to `residual`, and encode shares of the sum, in one pass; spans cover everything.

    Without second moments (`square` None) it adds the gradients unchanged. Returns the packets of sum / P of the other ranks' chunks
    (`core.spans(n, P)`), one after the other, in `bits` bits: 8, 4, 3, 1 or TERNARY, as `value_reference` encodes them.
    `out`, by default the residual, receives the errors, sum - P * decoded, and in this rank's chunk the sum; it may be a
    gradient. If `skip`, one number, is not zero, nothing changes, and all packets decode as NaN.
    """
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
        packets = [encode_share(chunk.of(out), bits, P) for chunk in chunks]
    return torch.cat([residual.new_empty(0, dtype=torch.uint8), *packets])


@operation
def packets_fit(
    packets: Sequence[Tensor], lengths: Sequence[int], bits: int, times: int, dtype: torch.dtype = torch.float32
) -> bool | Tensor:
    """Return whether all values in packets of these lengths are finite in `dtype`, and `times` them in float32.

    On a GPU the answer is a tensor [], without a host sync.
    """
    if not any(lengths):
        return True
    # A host sync, but not on a GPU, where the flag stays. NaN is not below anything.
    if times * float(greatest_of(packets, lengths, bits)) <= min(
        torch.finfo(kind).max for kind in (dtype, torch.float32)
    ):
        return True
    values = [values_decode(packet, length, bits) for packet, length in zip(packets, lengths, strict=True)]
    return all(bool(((value * times).isfinite() & value.to(dtype).isfinite()).all()) for value in values)


@operation
def write_mean_(
    grad: Vector,
    error: Vector | None,
    residual: Vector | None,
    packets: Sequence[Tensor],
    bits: int,
    rank: int,
    skip: Tensor | None = None,
) -> None:
    """Decode the packets of all chunks to `grad`, rounded to its type, and copy `error`, which may be `grad`, to `residual`.

    In this rank's chunk, adds the rounding error of P times the mean to the residual. The residual is optional.
    If `skip`, one number, is not zero, the residual does not change, and the gradient is NaN. Raises RuntimeError for a packet of another
    length.
    """
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


@operation
def move_steps_(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    momentum: Vector,
    mean: Vector,
    spans: Sequence[Span],
    numbers: Sequence[Move],
    skip: Tensor | None = None,
    scales: Scales | None = None,
) -> None:
    """Move weights by the mean step of all ranks; `targets[i]`, of any shape, begins at position `starts[i]`.

    A weight has the numbers (beta1, kept, length) of its span: m = beta1 m + (1 - beta1) mean, weight = kept weight - length m.
    With `scales` the mean is of gradients over their scales. It is multiplied by these, sqrt(v over) + floor, and replaced by the step that
    `make_steps_` makes of the product, without a ratio, by the other four numbers of the span. Second moments v change too.
    Nothing changes if `skip`, one number, is not zero.
    """
    if skip is not None and bool(skip):
        return
    if scales is not None:
        square, over, block, floor = scales
        root = (over.repeat_interleave(block)[: square.numel()] * square).double().sqrt_().to(mean.dtype)
        gradient, mean = root.add_(floor).mul_(mean), torch.zeros_like(mean)
        spreads = [(rate, beta2, eps, unbiased) for _, _, _, rate, beta2, eps, unbiased in numbers]
        make_steps_(mean, [gradient], [0], [1.0], square, torch.ones_like(over), block, spans, spreads)
    taken = torch.zeros_like(momentum)
    for span, (beta1, _, length, *_) in zip(spans, numbers, strict=True):
        m = span.of(momentum)
        m.mul_(beta1).add_(span.of(mean) * (1 - beta1))
        span.of(taken).copy_(m * length)
    kept = torch.ones_like(momentum)
    for span, (_, share, *_) in zip(spans, numbers, strict=True):
        span.of(kept).fill_(share)
    for target, start in zip(targets, starts, strict=True):
        place = Span(start, start + target.numel())
        target.copy_((target.reshape(-1) * place.of(kept) - place.of(taken)).view(target.shape))


@operation
def apply_steps_(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    momentum: Vector,
    packets: Sequence[Tensor],
    bits: int,
    spans: Sequence[Span],
    numbers: Sequence[Move],
    skip: Tensor | None = None,
    scales: Scales | None = None,
) -> None:
    """Move weights as `move_steps_` does, by the mean in the packets of all chunks, in rank order and `bits` bits, in one pass.

    Nothing changes if `skip`, one number, is not zero. Raises RuntimeError for a packet of another length.
    """
    if skip is not None and bool(skip):
        return
    chunks = chunks_of(momentum.numel(), len(packets))
    parts = [values_decode(packet, len(chunk), bits) for packet, chunk in zip(packets, chunks, strict=True)]
    move_steps_(targets, starts, momentum, torch.cat(parts).to(momentum.dtype), spans, numbers, None, scales)


@operation
def sketch(
    gradients: Sequence[Tensor], starts: Sequence[int], factors: Sequence[float], like: Vector, block: int, key: int
) -> tuple[Float[Tensor, " blocks"], Float[Tensor, " blocks"]]:
    """Compute, by block, the sum of gradients with random signs, and the sum of squares; `like` gives their number, type and device.

    The signs depend on the position of an element and `key`, in [0, 2^32).
    """
    flat = gathered(gradients, starts, factors, like)
    signed = torch.where(signs(flat.numel(), key, flat.device), -flat, flat)
    return _folded(signed, block), _folded(flat.square(), block)


@operation
def over_means(x: Vector, block: int, least: float) -> Float[Tensor, " blocks"]:
    """Compute one over the mean of each block of `block` elements, the last maybe shorter. Means count as at least `least`."""
    counts = torch.full_like(means := _folded(x, block), block)
    counts[-1:] -= -x.numel() % block
    return 1 / means.div_(counts).clamp_(min=least)


@operation
def reduce_shares_(
    value: Float[Tensor, " k"], packets: Sequence[Tensor], bits: int, P: int, bits_down: int, skip: Tensor | None = None
) -> UInt8[Tensor, " nbytes"]:
    """Average `value` and the other ranks' packets of `encode_steps_` in `bits` bits, and encode the mean in `bits_down` bits.

    The mean is (value + P * the sum of the decoded `packets`) / P; finite means beyond float32 become its largest number. `value` becomes
    the error, sum - P * decoded mean. Sums in float64, in the order of the packets. Raises RuntimeError for a
    packet of another length. If `skip`, one number, is not zero, nothing changes, and the packet decodes as NaN.
    """
    if skip is not None and bool(skip):
        return nan_packet(value.numel(), bits_down, value.device)
    # Sums of a few quantized values are exact in float64. A rank adds its values unrounded.
    total = value.double()
    for packet in packets:
        total += P * values_decode(packet, value.numel(), bits).double()
    mean, largest = total / exact_divisor(total, P), torch.finfo(value.dtype).max
    mean = torch.where(mean.isfinite(), mean.clamp(-largest, largest), mean).to(value.dtype)
    packet = values_encode(mean, bits_down)
    value.copy_(total - P * values_decode(packet, value.numel(), bits_down).double())
    return packet


def encode_share(value: Tensor, bits: int, P: int) -> Tensor:
    """Encode value / P, and replace `value` [k] by the error, value - P * decoded."""
    packet = values_encode(value / exact_divisor(value, P), bits)
    received = values_decode(packet, value.numel(), bits)
    error = value - P * received
    # P times the received value may overflow float32 although the difference does not.
    error = torch.where(error.isfinite(), error, (value.double() - P * received.double()).to(value.dtype))
    value.copy_(error)
    return packet


def signs(n: int, key: int, device: torch.device) -> Tensor:
    """Return, for `n` positions, whether a sketch subtracts the element: the lowest bit of a hash of the position and `key`."""
    first, *factors = HASH
    word = (torch.arange(n, device=device) * first + key) & _WORD
    for shift, factor in zip((16, 13), factors, strict=True):
        word = ((word ^ word >> shift) * factor) & _WORD
    return ((word ^ word >> 16) & 1).bool()


def gathered(gradients: Sequence[Tensor], starts: Sequence[int], factors: Sequence[float], like: Tensor) -> Tensor:
    """Copy all gradients to one vector, [n]."""
    flat = torch.zeros_like(like)
    for gradient, start, factor in zip(gradients, starts, factors, strict=True):
        Span(start, start + gradient.numel()).of(flat).copy_(gradient.reshape(-1)).mul_(factor)
    return flat


def _folded(x: Tensor, block: int) -> Tensor:
    """Sum every block, padded with zeros to a power of two, by adding halves, for a fixed order."""
    rows = pad(x, (0, -x.numel() % block)).view(-1, block)
    rows = pad(rows, (0, (1 << (block - 1).bit_length()) - block))
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0].clone()

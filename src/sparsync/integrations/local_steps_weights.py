"""The weights of a model as LocalSteps and AdamWSteps exchange them: in buckets, common ones beside own ones, dealt out to fragments."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsync.collectives.broadcast import broadcast
from sparsync.core import Bucket, Comm, ParameterSpan, laid_out

MEGABYTE = 1 << 20


@dataclass
class WeightBucket:
    """Some parameters of a model in one flat vector, in at least float32.

    A rank's own weights are in the parameters themselves. `start - own` is what this rank has learnt and not yet exchanged, negated
    like a gradient.
    """

    key: str
    parameters: Mapping[str, nn.Parameter]
    dtype: torch.dtype
    layout: tuple[ParameterSpan, ...] = field(init=False)
    common: Tensor = field(init=False)  # [n] A, the same bits on all ranks; changed in place
    start: Tensor = field(init=False)  # [n] W after the last exchange; perhaps `common` itself

    def __post_init__(self) -> None:
        self.layout = laid_out((name, each.shape) for name, each in self.parameters.items())
        self.common = self.own()
        self.start = self.common

    def own(self) -> Tensor:
        """Return this rank's own weights, copied."""
        first = next(iter(self.parameters.values()))
        flat = torch.empty(
            sum(each.numel() for each in self.parameters.values()), dtype=self.dtype, device=first.device
        )
        for entry, parameter in zip(self.layout, self.parameters.values(), strict=True):
            entry.span.of(flat).view(parameter.shape).copy_(parameter.detach())
        return flat

    def write(self, weights: Tensor) -> Tensor:
        """Make `weights` [n] the own ones, rounded to each parameter's type, and return what they are now."""
        for entry, parameter in zip(self.layout, self.parameters.values(), strict=True):
            parameter.detach().copy_(entry.span.of(weights).view(parameter.shape))
        return weights if all(each.dtype == self.dtype for each in self.parameters.values()) else self.own()

    def bucket(self, values: Tensor, step: int) -> Bucket:
        """Return `values` [n] as the bucket that a scheme reduces."""
        return Bucket(self.key, values, step, self.layout)

    def by_name(self, values: Tensor) -> dict[str, Tensor]:
        """Return the part of `values` [n] of each parameter, flat, copied."""
        return {entry.name: entry.span.of(values).clone() for entry in self.layout}

    def from_names(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return what `by_name` took apart. Raises ValueError where a parameter is missing or has another size."""
        flat = torch.empty_like(self.common)
        for entry in self.layout:
            known = values.get(entry.name)
            if known is None or known.numel() != len(entry.span):
                raise ValueError(
                    f"this state has {'no' if known is None else known.numel()} elements of {entry.name!r}, the model "
                    f"{len(entry.span)}; load the state of the same model"
                )
            entry.span.of(flat).copy_(known.flatten())
        return flat


def fragments_of(parameters: Mapping[str, nn.Parameter], count: int) -> list[dict[str, nn.Parameter]]:
    """Deal the parameters, in their order, out to `count` fragments of about equally many elements, none of them empty.

    Raises ValueError where there are fewer parameters than fragments.
    """
    if not 1 <= count <= len(parameters):
        raise ValueError(f"fragments must be in [1, {len(parameters)}], the number of trained parameters, got {count}")
    share = sum(each.numel() for each in parameters.values()) / count
    dealt: list[dict[str, nn.Parameter]] = [{}]
    seen = 0
    for position, (name, parameter) in enumerate(parameters.items()):
        left = len(parameters) - position
        # A fragment ends where at least half of the next parameter would be too much, and where each of the others needs one.
        full = seen + parameter.numel() / 2 > share * len(dealt)
        if dealt[-1] and len(dealt) < count and (full or left == count - len(dealt)):
            dealt.append({})
        dealt[-1][name] = parameter
        seen += parameter.numel()
    return dealt


def buckets_of(parameters: Mapping[str, nn.Parameter], bucket_mb: float, prefix: str = "") -> list[WeightBucket]:
    """Return the parameters in buckets of one device and at most `bucket_mb` megabytes; a larger parameter has one of its own.

    Changes of 16-bit weights are summed and sent from float32, so these share buckets with float32 ones.
    """
    open_ones: dict[str, dict[str, nn.Parameter]] = {}
    sizes: dict[str, float] = {}
    made: list[WeightBucket] = []

    def close(kind: str) -> None:
        parameters = open_ones.pop(kind)
        number = sum(each.key.startswith(f"{prefix}{kind}/") for each in made)
        made.append(WeightBucket(f"{prefix}{kind}/{number}", parameters, _wide(next(iter(parameters.values())))))

    for name, parameter in parameters.items():
        kind = f"{str(_wide(parameter)).removeprefix('torch.')}/{parameter.device.type}"
        nbytes = parameter.numel() * _wide(parameter).itemsize
        if kind in open_ones and sizes[kind] + nbytes > bucket_mb * MEGABYTE:
            close(kind)
        sizes[kind] = sizes[kind] + nbytes if kind in open_ones else nbytes
        open_ones.setdefault(kind, {})[name] = parameter
    for kind in list(open_ones):
        close(kind)
    return made


@contextmanager
def common_in_model(buckets: Sequence[WeightBucket]) -> Iterator[None]:
    """Have the common weights in the model; own ones are back afterwards, with the same bits."""
    own = [each.own() for each in buckets]
    try:
        for bucket in buckets:
            bucket.write(bucket.common)
        yield
    finally:
        for bucket, weights in zip(buckets, own, strict=True):
            bucket.write(weights)


def sent_and_drift(buckets: Sequence[WeightBucket], nbytes: int, steps: int) -> dict[str, float]:
    """Return the `bits` sent for each element and step, and the `drift`, the distance of own weights from the common ones."""
    elements = sum(each.common.numel() for each in buckets)
    distances = [(each.own() - each.common).double().square().sum().cpu() for each in buckets]
    return {
        "bits": 8 * nbytes / (elements * steps) if steps else 0.0,
        "drift": float(torch.stack(distances).sum().sqrt()),
    }


def flat_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the contents of tensors on one device as bytes, one after the other, copied."""
    return torch.cat([each.detach().contiguous().reshape(-1).view(torch.uint8) for each in tensors])


def copy_bytes_(tensors: Sequence[Tensor], content: Tensor) -> None:
    """Write what `flat_bytes` returned into the tensors."""
    start = 0
    for each in tensors:
        part = content[start : start + each.nbytes].clone()  # cloned: aligned for its type
        each.detach().copy_(part.view(each.dtype).view(each.shape))
        start += each.nbytes


def copy_from_first(model: nn.Module, comm: Comm) -> None:
    """Copy parameters and buffers of rank 0 to all ranks."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in (*model.parameters(), *model.buffers()):
        by_device.setdefault(each.device, []).append(each)
    for tensors in by_device.values():
        copy_bytes_(tensors, broadcast(flat_bytes(tensors), comm))


def _wide(parameter: nn.Parameter) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)

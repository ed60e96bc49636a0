"""The weights of a model as step methods exchange them: common ones beside own ones, in buckets, and which were set from outside."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsync.base.scheme import Scheme
from sparsync.collectives.values import broadcast
from sparsync.core import Bucket, Comm, ParameterSpan, Span, SpanSet, laid_out

_MEGABYTE = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
_COLUMNS = 2039  # a prime, so that rows of a weight that change places come to stand in other columns


@dataclass(frozen=True)
class Part:
    """The parameters of a bucket that take part in a step, as one shorter vector, and where the others, which are idle, lie."""

    key: str
    layout: tuple[ParameterSpan, ...]
    idle: tuple[Span, ...] = ()
    taking: SpanSet | None = None  # None: all of the bucket

    def bucket(self, values: Tensor, step: int) -> Bucket:
        """Return the part of `values`, one for each element of the whole bucket, as the bucket that a scheme reduces."""
        return Bucket(self.key, values if self.taking is None else self.taking.take(values), step, self.layout)

    def whole(self, taken: Tensor, n: int) -> Tensor:
        """Return what `bucket` took, perhaps changed, as a vector of the whole bucket, [n], that is zero where it is idle."""
        if self.taking is None:
            return taken
        values = taken.new_zeros(n)
        self.taking.put_(values, taken)
        return values


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
        device = next(iter(self.parameters.values())).device
        flat = torch.empty(self.layout[-1].span.stop, dtype=self.dtype, device=device)
        for entry, parameter in zip(self.layout, self.parameters.values(), strict=True):
            entry.span.of(flat).view(parameter.shape).copy_(parameter.detach())
        return flat

    def adopt(self, names: Collection[str]) -> None:
        """Take the own weights of these parameters for the common ones, and for those of the last exchange: nothing was learnt since."""
        self.copy_own_(self.common, names)
        self.copy_own_(self.start, names)

    def copy_own_(self, into: Tensor, names: Collection[str]) -> None:
        """Copy the own weights of these parameters to their place in `into`, [n]."""
        for entry in self.layout:
            if entry.name in names:
                entry.span.of(into).copy_(self.parameters[entry.name].detach().reshape(-1))

    def part(self, idle: Collection[str]) -> Part:
        """Return the part of the bucket without the parameters of these names."""
        taking = [entry for entry in self.layout if entry.name not in idle]
        if len(taking) == len(self.layout):
            return Part(self.key, self.layout)
        others = SpanSet.of(entry for entry in self.layout if entry.name in idle)
        layout = laid_out((entry.name, entry.shape) for entry in taking)
        return Part(self.key, layout, others.spans, SpanSet.of(taking))

    def unsent(self, scheme: Scheme, comm: Comm, idle: Collection[str] = ()) -> Tensor | None:
        """Return what this rank has not sent of the bucket, [n], zero for idle parameters; None where that is nothing."""
        part = self.part(idle)
        unsent = scheme.unsent(part.bucket(self.common, 0), comm) if part.layout else None
        return None if unsent is None else part.whole(unsent.to(self.dtype), len(self.common))

    def idle_from(self, source: Tensor, into: Tensor, idle: Collection[str]) -> Tensor:
        """Copy the elements of idle parameters, [n] in all, from `source`, and return `into`."""
        for span in self.part(idle).idle:
            span.of(into).copy_(span.of(source))
        return into

    def write(self, weights: Tensor, idle: Collection[str] = ()) -> Tensor:
        """Make `weights` [n] the own ones but for idle parameters, rounded to each one's type, and return what they are now."""
        for entry, parameter in zip(self.layout, self.parameters.values(), strict=True):
            if entry.name not in idle:
                parameter.detach().copy_(entry.span.of(weights).view(parameter.shape))
        exact = not idle and all(each.dtype == self.dtype for each in self.parameters.values())
        return weights if exact else self.own()

    def bucket(self, values: Tensor, step: int) -> Bucket:
        """Return `values` [n] as the bucket that a scheme reduces."""
        return Bucket(self.key, values, step, self.layout)

    def by_name(self, values: Tensor) -> dict[str, Tensor]:
        """Return the part of `values` [n] of each parameter, flat: views."""
        return {entry.name: entry.span.of(values) for entry in self.layout}

    def from_names(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return what `by_name` took apart, copied."""
        flat = torch.empty_like(self.common)
        for entry in self.layout:
            entry.span.of(flat).copy_(values[entry.name].flatten())
        return flat


class Weights:
    """The trained parameters of a model, by name, in buckets that are dealt out to fragments.

    Raises ValueError where there are fewer parameters than fragments.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], bucket_mb: float, fragments: int = 1) -> None:
        dealt = fragments_of(trained, fragments)
        prefixes = [f"{i}." for i in range(fragments)] if fragments > 1 else [""]
        self.trained = trained
        self.fragments = [buckets_of(*each) for each in zip(dealt, [bucket_mb] * fragments, prefixes, strict=True)]
        self.buckets = [bucket for fragment in self.fragments for bucket in fragment]
        self._written = LastWritten(trained)

    @property
    def elements(self) -> int:
        """How many elements all trained parameters have."""
        return sum(each.common.numel() for each in self.buckets)

    def note_written(self) -> None:
        """Take the weights that are in the model for those that were written here."""
        self._written.note()

    def adopt(self, names: Collection[str]) -> None:
        """Take what is in the model of these parameters for the common weights."""
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.adopt(names)
        self.note_written()

    def adopt_changed(self) -> list[str]:
        """Take the weights that were set from outside for the common ones, and return their names."""
        if changed := self._written.changed():
            self.adopt(changed)
        return changed

    def common(self) -> list[tuple[str, Tensor]]:
        """Return the common weights of each parameter, flat, by name."""
        return list(by_name(self.buckets, [each.common for each in self.buckets]).items())

    def saved(self, values: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the part of each parameter, flat, by name, copied; `values` are vectors of all buckets."""
        return {name: each.clone() for name, each in by_name(self.buckets, values).items()}

    def from_saved(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the vectors of all buckets that `saved` took apart."""
        return [bucket.from_names(values) for bucket in self.buckets]

    def drift(self) -> float:
        """Return the distance of the own weights from the common ones."""
        distances = [(each.own() - each.common).double().square().sum().cpu() for each in self.buckets]
        return float(torch.stack(distances).sum().sqrt())

    @contextmanager
    def common_in_model(self) -> Iterator[None]:
        """Have the common weights in the model; own ones are back afterwards, with the same bits.

        Raises RuntimeError where the model leaves with other weights, which would be lost.
        """
        own = [each.own() for each in self.buckets]
        try:
            for bucket in self.buckets:
                bucket.write(bucket.common)
            self.note_written()
            yield
            if changed := self._written.changed():
                raise RuntimeError(
                    f"{', '.join(changed[:3])} got other values inside averaged(), which ends with a rank's own weights and would lose "
                    "them; load weights outside of it, or put the old ones back inside"
                )
        finally:
            for bucket, weights in zip(self.buckets, own, strict=True):
                bucket.write(weights)
            self.note_written()


class LastWritten:
    """What parameters were when `note` was last called: the bits of small ones, and sums of the bits of large ones, in one pass."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.note()

    def note(self) -> None:
        """Take the parameters as they are for written."""
        (self._words, self._sizes), self._versions = self._now(), self._versions_now()

    def changed(self) -> list[str]:
        """Return the names of the parameters that have other bits now; where there are any, of all that were written to. A host sync.

        What is loaded may have the bits that a parameter had on this rank, and not those that it had on another.
        """
        words, sizes = self._now()
        if torch.equal(words, self._words):
            return []
        pairs = zip(words.split(sizes), self._words.split(self._sizes), strict=True)
        other = [not torch.equal(now, before) for now, before in pairs]
        written = map(int.__ne__, self._versions_now(), self._versions)
        return [name for name, *either in zip(self._parameters, other, written, strict=True) if any(either)]

    def _now(self) -> tuple[Tensor, list[int]]:
        words = [_words(each.detach()) for each in self._parameters.values()]
        return torch.cat([each.to(words[0].device) for each in words]), [len(each) for each in words]

    def _versions_now(self) -> list[int]:
        # Torch counts what is done to a tensor in place, but not by way of its `data`.
        return [each._version for each in self._parameters.values()]


def by_name(buckets: Sequence[WeightBucket], values: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the part of each parameter of these buckets, flat: views. `values` are vectors of the buckets."""
    parts = map(WeightBucket.by_name, buckets, values)
    return {name: each for part in parts for name, each in part.items()}


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
        if kind in open_ones and sizes[kind] + nbytes > bucket_mb * _MEGABYTE:
            close(kind)
        sizes[kind] = sizes[kind] + nbytes if kind in open_ones else nbytes
        open_ones.setdefault(kind, {})[name] = parameter
    for kind in list(open_ones):
        close(kind)
    return made


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


def copy_from_first(tensors: Iterable[Tensor], comm: Comm) -> None:
    """Copy the values of these tensors on rank 0 to all ranks."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in tensors:
        by_device.setdefault(each.device, []).append(each)
    for on_one in by_device.values():
        copy_bytes_(on_one, broadcast(flat_bytes(on_one), comm))


def _wide(parameter: nn.Parameter) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor; of a large one the sums of columns, and the words before them."""
    flat = tensor.reshape(-1)
    aligned = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
    # Words of 64 bits are added six times as fast as shorter ones.
    words = flat.view(torch.int64 if aligned else _WORDS[flat.element_size()])
    if len(words) < 2 * _COLUMNS:
        return words
    # So that the number of rows is odd: of an even number the highest bits can change in all, and no sum does.
    rest = _COLUMNS + len(words) % (2 * _COLUMNS)
    return torch.cat([words[:rest], words[rest:].view(-1, _COLUMNS).sum(0, dtype=torch.int64)])

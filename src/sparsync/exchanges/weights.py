"""The weights of a model for step methods: common and own weights, in buckets, and a watch for weights set from outside."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from sparsync.base.state import State
from sparsync.collectives.values import broadcast
from sparsync.core import Arriving, Bucket, Comm, ParameterSpan, SpanSet, laid_out
from sparsync.kernels import operations as kernels

_MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Part:
    """The parameters of a bucket that take part in a step, as one shorter vector."""

    key: str
    layout: tuple[ParameterSpan, ...]
    taking: SpanSet | None = None  # None: all of the bucket

    def bucket(self, values: Tensor, step: int) -> Bucket:
        """Take this part of `values` [n] as the bucket that a scheme reduces."""
        return Bucket(self.key, values if self.taking is None else self.taking.take(values), step, self.layout)

    def whole(self, taken: Tensor, n: int) -> Tensor:
        """Put the values of this part back into a vector of the whole bucket, [n], zero elsewhere."""
        if self.taking is None:
            return taken
        values = taken.new_zeros(n)
        self.taking.put_(values, taken)
        return values


@dataclass
class WeightBucket:
    """Some parameters of a model as one flat vector, at least in float32.

    The parameters hold the rank's own weights. `start - own` is the change it has not exchanged yet, with a gradient's sign.
    `shared`: own weights never differ from the common ones. Parameters of type `dtype` then hold the common weights, without a copy.
    """

    key: str
    parameters: Mapping[str, nn.Parameter]
    dtype: torch.dtype
    shared: bool = False
    layout: tuple[ParameterSpan, ...] = field(init=False)
    start: Tensor = field(init=False)  # [n] W after the last exchange; may be `common` itself; none if `shared`

    def __post_init__(self) -> None:
        self.layout = laid_out((name, each.shape) for name, each in self.parameters.items())
        self.shared = self.shared and all(each.dtype == self.dtype for each in self.parameters.values())
        self._common = None
        if not self.shared:
            self._common = self.start = self.own()

    @property
    def common(self) -> Tensor:
        """[n] A, the same bits on all ranks. If you change it in place, call `put_common` with it: if `shared`, it is a copy."""
        return self.own() if self._common is None else self._common

    @contextmanager
    def moved(self) -> Iterator[tuple[list[Tensor], list[int]]]:
        """Give the tensors of the common weights, to be moved in place, and the first element of each one."""
        if self._common is not None:
            yield [self._common], [0]
            return
        held = [each.detach() for each in self.parameters.values()]
        yield held, [entry.span.start for entry in self.layout]
        increment_version(held)  # a kernel does not
        torch.clear_autocast_cache()  # it holds copies of the old weights

    def weights_of(self, entry: ParameterSpan) -> Tensor:
        """View the common weights of a parameter in its shape, while they are `moved`."""
        if self._common is None:
            return self.parameters[entry.name].detach()
        return entry.span.of(self._common).view(entry.shape)

    def hold_common(self) -> None:
        """Keep the common weights apart from here on, because own ones will differ from them."""
        self.shared = False
        self._common = self.start = self.own()

    @property
    def elements(self) -> int:
        """The number of elements n."""
        return self.layout[-1].span.stop

    def put_common(self, weights: Tensor) -> None:
        """Make `weights` [n] the common ones."""
        if self._common is None:
            self.write(weights)
        elif weights is not self._common:
            self._common.copy_(weights)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def empty(self) -> Tensor:
        """Allocate a vector for the bucket, [n]."""
        return torch.empty(self.elements, dtype=self.dtype, device=self.device)

    def own(self) -> Tensor:
        """Copy this rank's own weights into a new vector, [n]."""
        flat = self.empty()
        for entry, parameter in zip(self.layout, self.parameters.values(), strict=True):
            entry.span.of(flat).view(parameter.shape).copy_(parameter.detach())
        return flat

    def copy_own_(self, into: Tensor, names: Collection[str]) -> None:
        """Copy the own weights of these parameters to their place in `into` [n]."""
        for entry in self.layout:
            if entry.name in names:
                entry.span.of(into).copy_(self.parameters[entry.name].detach().reshape(-1))

    def part(self, idle: Collection[str]) -> Part:
        """Take the bucket without the idle parameters."""
        if not idle:
            return Part(self.key, self.layout)
        taking = [entry for entry in self.layout if entry.name not in idle]
        if len(taking) == len(self.layout):
            return Part(self.key, self.layout)
        return Part(self.key, laid_out((entry.name, entry.shape) for entry in taking), SpanSet.of(taking))

    def unsent(self, state: State, comm: Comm, idle: Collection[str] = ()) -> Tensor | None:
        """Return the unsent changes of the bucket, [n], zero for idle parameters; None if there are none."""
        part = self.part(idle)
        unsent = state.unsent(part.bucket(self.common, 0), comm) if part.layout else None
        return None if unsent is None else part.whole(unsent.to(self.dtype), self.elements)

    def idle_from(self, source: Tensor, into: Tensor, idle: Collection[str]) -> Tensor:
        """Copy the elements of idle parameters from `source` [n] to `into` [n], and return `into`."""
        for entry in self.layout:
            if entry.name in idle:
                entry.span.of(into).copy_(entry.span.of(source))
        return into

    def write(self, weights: Tensor, idle: Collection[str] = ()) -> Tensor:
        """Write `weights` [n] as own ones except for idle parameters; return the own weights, rounded to the type of their parameter."""
        for entry, parameter in zip(self.layout, self.parameters.values(), strict=True):
            if entry.name not in idle:
                parameter.detach().copy_(entry.span.of(weights).view(parameter.shape))
        torch.clear_autocast_cache()  # it holds copies of the old weights
        exact = not idle and all(each.dtype == self.dtype for each in self.parameters.values())
        return weights if exact else self.own()

    def show(self, left: Collection[str]) -> None:
        """Write the common weights into the model, except in the parameters `left`."""
        if not self.shared:
            self.write(self.common, left)

    def bucket(self, values: Tensor, step: int) -> Bucket:
        """Wrap `values` [n] as the bucket that a scheme reduces."""
        return Bucket(self.key, values, step, self.layout)

    def from_names(self, values: Mapping[str, Tensor]) -> Tensor:
        """Copy values by parameter name into a vector [n]: the inverse of `by_name`."""
        flat = self.empty()
        for entry in self.layout:
            entry.span.of(flat).copy_(values[entry.name].flatten())
        return flat


class Weights:
    """The trained parameters of a model, by name, in the buckets of one or more fragments. `shared`: see WeightBucket.

    Raises ValueError if there are fewer parameters than fragments.
    """

    def __init__(
        self, trained: Mapping[str, nn.Parameter], bucket_mb: float, fragments: int = 1, shared: bool = False
    ) -> None:
        self.trained = trained
        self.fragments = [
            buckets_of(each, bucket_mb, f"{number}." if fragments > 1 else "", shared)
            for number, each in enumerate(fragments_of(trained, fragments))
        ]
        self.buckets = [bucket for fragment in self.fragments for bucket in fragment]
        self._watch()

    def _watch(self) -> None:
        # In the order of the buckets, as their digests come.
        held = [bucket for bucket in self.buckets if not bucket.shared]
        self.last_written = LastWritten({name: each for bucket in held for name, each in bucket.parameters.items()})

    def hold_common(self) -> bool:
        """Keep the common weights apart from here on, see WeightBucket; return whether that is new."""
        shared = [each for each in self.buckets if each.shared]
        for bucket in shared:
            bucket.hold_common()
        self._watch()
        return bool(shared)

    @property
    def elements(self) -> int:
        """The number of elements of all trained parameters."""
        return sum(each.numel() for each in self.trained.values())

    def note_written(self, digests: Sequence[Tensor | None] = ()) -> None:
        """Treat the model's present weights as written by us; `digests`: of the parameters of each bucket, if known."""
        known = [each for each in digests if each is not None]
        whole = bool(known) and len(known) == len(self.buckets)
        self.last_written.note((torch.cat(known) if len(known) > 1 else known[0]) if whole else None)

    def adopt(self, names: Collection[str]) -> None:
        """Make the model's present values of these parameters the common weights."""
        with torch.no_grad():
            for bucket in self.buckets:
                if not bucket.shared:
                    bucket.copy_own_(bucket.common, names)
                    bucket.copy_own_(bucket.start, names)  # nothing was learnt since
        self.note_written()

    def check_compared(self) -> None:
        """Raise RuntimeError if `compare_later` has seen values that torch did not count as written: the step has overwritten them."""
        if changed := self.last_written.compared():
            raise RuntimeError(
                f"{', '.join(changed[:3])} got other values through `.data`, which torch does not count, and the last step has overwritten "
                "them; on a GPU set weights by `copy_` under torch.no_grad(), or by load_state_dict"
            )

    def shows_common(self, name: str) -> bool:
        """Tell whether the model has the common weights of a parameter, in its type."""
        return self.shows(name, [each.common for each in self.buckets])

    def shows(self, name: str, values: Sequence[Tensor]) -> bool:
        """Tell whether the model has these values of a parameter, in its type; `values`: vectors of all buckets."""
        parameter = self.trained[name].detach()
        return torch.equal(parameter.reshape(-1), by_name(self.buckets, values)[name].to(parameter.dtype))

    def common(self) -> Iterable[tuple[str, Tensor]]:
        """Give the name and the common weights of each parameter, flat: views, or the parameters themselves."""
        for bucket in self.buckets:
            if bucket.shared:
                yield from ((name, each.detach().reshape(-1)) for name, each in bucket.parameters.items())
            else:
                yield from by_name([bucket], [bucket.common]).items()

    def saved(self, values: Iterable[Tensor]) -> dict[str, Tensor]:
        """Copy vectors of all buckets, flat, by parameter name."""
        return copied_by_name(self.buckets, values)

    def from_saved(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Make the vectors of all buckets from their state: the inverse of `saved`."""
        return [bucket.from_names(values) for bucket in self.buckets]

    def drift(self) -> float:
        """Compute the distance of the own weights from the common ones."""
        held = [each for each in self.buckets if not each.shared]
        return sum(float((each.own() - each.common).double().square().sum()) for each in held) ** 0.5


class LastWritten:
    """Digests of the bits that parameters held at the last `note`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._arriving: Arriving | None = None
        self.note()

    def note(self, digests: Tensor | None = None) -> None:
        """Note the present values of the parameters; `digests`: of these values, if known."""
        self._digests, self._versions = self._now() if digests is None else digests, self._versions_now()

    def changed(self) -> list[str]:
        """Name the parameters whose bits have changed; if there are any, also all others that were written to. A host sync.

        A parameter that was written to may have kept its bits on this rank and changed them on another.
        """
        if not self._parameters or torch.equal(now := self._now(), self._digests):
            return []
        other = (now != self._digests).tolist()
        written = map(int.__ne__, self._versions_now(), self._versions)
        return [name for name, *either in zip(self._parameters, other, written, strict=True) if any(either)]

    def was_written(self) -> bool:
        """Tell whether torch has counted a write to a parameter since, without reading the values."""
        return self._versions_now() != self._versions

    def compare_later(self) -> None:
        """Make the device compare the values before a step writes them, for `compared`; the host does not wait."""
        if self._parameters:
            self._arriving = Arriving(self._now() - self._digests)

    def compared(self) -> list[str]:
        """Name the parameters whose bits `compare_later` has seen changed, and forget them."""
        arriving, self._arriving = self._arriving, None
        differences = [] if arriving is None else arriving.read()
        return [name for name, other in zip(self._parameters, differences, strict=False) if other]

    def _now(self) -> Tensor:
        return kernels.digests(list(self._parameters.values())) if self._parameters else torch.empty(0)

    def _versions_now(self) -> list[int]:
        # Torch counts in-place changes of a tensor, but not those through its `data`.
        return [each._version for each in self._parameters.values()]


def by_name(buckets: Sequence[WeightBucket], values: Iterable[Tensor]) -> dict[str, Tensor]:
    """View vectors of these buckets, flat, by parameter name."""
    pairs = zip(buckets, values, strict=True)
    return {entry.name: entry.span.of(each) for bucket, each in pairs for entry in bucket.layout}


def copied_by_name(buckets: Sequence[WeightBucket], values: Iterable[Tensor]) -> dict[str, Tensor]:
    """Copy vectors of these buckets, flat, by parameter name."""
    return {name: each.clone() for name, each in by_name(buckets, values).items()}


def fragments_of(parameters: Mapping[str, nn.Parameter], count: int) -> list[dict[str, nn.Parameter]]:
    """Split the parameters, in order, into `count` non-empty fragments of about equal size.

    Raises ValueError if there are fewer parameters than fragments.
    """
    if not 1 <= count <= len(parameters):
        raise ValueError(f"fragments must be in [1, {len(parameters)}], the number of trained parameters, got {count}")
    share = sum(each.numel() for each in parameters.values()) / count
    dealt: list[dict[str, nn.Parameter]] = [{}]
    seen = 0
    for position, (name, parameter) in enumerate(parameters.items()):
        left = len(parameters) - position
        # A fragment ends where at least half of the next parameter would be too much, or each remaining fragment needs a parameter.
        full = seen + parameter.numel() / 2 > share * len(dealt)
        if dealt[-1] and len(dealt) < count and (full or left == count - len(dealt)):
            dealt.append({})
        dealt[-1][name] = parameter
        seen += parameter.numel()
    return dealt


def buckets_of(
    parameters: Mapping[str, nn.Parameter], bucket_mb: float, prefix: str = "", shared: bool = False
) -> list[WeightBucket]:
    """Put the parameters into buckets of one device and at most `bucket_mb` megabytes; a larger parameter gets a bucket to itself.

    16-bit weights share buckets with float32 ones, because their changes are summed and sent in float32.
    """
    parts: dict[tuple[str, torch.device], list[dict[str, nn.Parameter]]] = {}
    filled: dict[tuple[str, torch.device], int] = {}  # bytes of the last part
    for name, parameter in parameters.items():
        wide = _wide(parameter)
        kind = f"{prefix}{str(wide).removeprefix('torch.')}/{parameter.device.type}", parameter.device
        nbytes = parameter.numel() * wide.itemsize
        if kind not in parts or filled[kind] + nbytes > bucket_mb * _MEGABYTE:
            parts.setdefault(kind, []).append({})
            filled[kind] = 0
        parts[kind][-1][name] = parameter
        filled[kind] += nbytes
    made = defaultdict[str, Iterator[int]](count)  # by kind, because device numbers differ between ranks
    return [
        WeightBucket(f"{kind}/{next(made[kind])}", part, _wide(next(iter(part.values()))), shared)
        for (kind, _), members in parts.items()
        for part in members
    ]


def flat_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Copy the contents of tensors on one device as bytes, one after the other."""
    return torch.cat([each.detach().contiguous().reshape(-1).view(torch.uint8) for each in tensors])


def copy_bytes_(tensors: Sequence[Tensor], content: Tensor) -> None:
    """Write what `flat_bytes` returned into the tensors."""
    for each, part in zip(tensors, content.split([each.nbytes for each in tensors]), strict=True):
        each.detach().copy_(part.clone().view(each.dtype).view(each.shape))  # cloned: aligned for its type


def copy_from_first(tensors: Iterable[Tensor], comm: Comm) -> None:
    """Copy the values of these tensors from rank 0 to all ranks."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in tensors:
        by_device.setdefault(each.device, []).append(each)
    for on_one in by_device.values():
        copy_bytes_(on_one, broadcast(flat_bytes(on_one), comm))


def _wide(parameter: nn.Parameter) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)

"""What a scheme remembers of one model on one rank. A handle owns it, or whoever calls `Scheme.start`; a scheme has settings only."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync.core import Arriving, Bucket, Comm, Report, Rows
from sparsync.feedback import Accumulator, ByParameter, Vectors
from sparsync.kernels import operations as kernels
from sparsync.wire import Values, in_passes

Numbers = TypeVar("Numbers")
TABLES = ("shared", "own", "common", "schemes")  # the parts of a saved state that are no vectors


class Tables:
    """Numbers and tensors by key, all of them saved. See `State`."""

    def __init__(self) -> None:
        # Any: by bucket key, its shape and its numbers: a dataclass, or a dict that was loaded and not read since
        self._shared: dict[str, dict[str, dict[str, Any]]] = {}
        self._own: dict[str, dict[str, dict[str, Any]]] = {}
        self._common: dict[str, Any] = {}  # Any: by parameter name, numbers or tensors, or a ByParameter

    def shared_state(self, key: str, make: Callable[..., Numbers], bucket: Bucket, P: int) -> Numbers:
        """Return numbers of this bucket that all ranks have in common, for reading and writing: a dataclass that `make` makes at first.

        They start again whenever the bucket's layout or the number of ranks changes: partitions, counts and thresholds of other elements
        mean nothing.
        """
        return _of_bucket(self._shared.setdefault(key, {}), make, bucket, P)

    def own_state(self, key: str, make: Callable[..., Numbers], bucket: Bucket, P: int) -> Numbers:
        """Return numbers of this bucket that differ from rank to rank, as `shared_state` does. They stay after a failure."""
        return _of_bucket(self._own.setdefault(key, {}), make, bucket, P)

    def all_of(self, key: str, make: Callable[..., Numbers]) -> list[tuple[set[str], Numbers]]:
        """Return the `shared_state` or `own_state` of all buckets, each with the names of its bucket's parameters."""
        kept = {**self._own.get(key, {}), **self._shared.get(key, {})}.values()
        return [({name for name, _ in each["shape"][1:]}, _made(each, make)) for each in kept]

    def common(self, key: str) -> dict[str, Any]:  # Any: numbers or tensors
        """Return the numbers that all ranks have in common, by parameter name, for reading and writing. Ranks compare the numbers in it."""
        return self._common.setdefault(key, {})

    def common_vector(self, key: str, bucket: Bucket) -> Tensor:
        """Return a vector that all ranks have in common, [n], at least float32, for writing; zero for parameters not seen before."""
        known = self._common.get(key, {})
        if not isinstance(known, ByParameter):
            known = self._common[key] = ByParameter(known)
        return known.of(bucket, torch.promote_types(bucket.grad.dtype, torch.float32))

    def continue_from(self, other: "Tables") -> None:
        """Take over the numbers and tensors of `other`."""
        self._shared, self._own, self._common = other._shared, other._own, other._common

    def forget_shared(self) -> None:
        """Forget what all ranks have in common."""
        self._shared, self._common = {}, {}

    def text(self, bucket: str, names: Sequence[str]) -> str:
        """Return the state that all ranks have in common for the bucket with this key and these parameters, without tensors."""
        found = [f"{key}: {_fields(table[bucket])}" for key, table in self._shared.items() if bucket in table]
        for key, values in self._common.items():
            if isinstance(values, dict):
                # Where a name is not known, nothing is said: a state that was loaded says what one that was not does. Floating-point
                # numbers may differ in their last bits between processors.
                known = [values[name] for name in names if name in values]
                found += [f"{key}: {each}" for each in known if isinstance(each, int)]
        return ", ".join(found)

    def tables(self) -> dict[str, Any]:
        """Return all of it, copied, without what is empty."""
        by_bucket = {
            part: {
                key: {name: {"shape": kept["shape"], "state": _fields(kept)} for name, kept in table.items()}
                for key, table in tables.items()
            }
            for part, tables in (("shared", self._shared), ("own", self._own))
        }
        common = {key: each.by_name if isinstance(each, ByParameter) else each for key, each in self._common.items()}
        return deepcopy({part: found for part, found in {**by_bucket, "common": common}.items() if found})

    def load_tables(self, tables: Mapping[str, Any]) -> None:
        """Continue from what `tables` returned."""
        self._shared, self._own, self._common = (
            deepcopy(dict(tables.get(part, {}))) for part in ("shared", "own", "common")
        )


def _of_bucket(table: dict[str, dict[str, Any]], make: Callable[..., Numbers], bucket: Bucket, P: int) -> Numbers:
    shape = [P, *([entry.name, len(entry.span)] for entry in bucket.layout)]
    kept = table.get(bucket.key)
    if kept is None or kept["shape"] != shape:
        kept = table[bucket.key] = {"shape": shape, "state": make()}
    return _made(kept, make)


def _made(kept: dict[str, Any], make: Callable[..., Numbers]) -> Numbers:
    if isinstance(kept["state"], dict):
        kept["state"] = make(**kept["state"])
    return kept["state"]


def _fields(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a dataclass by name."""
    return kept["state"] if isinstance(kept["state"], dict) else vars(kept["state"])


class State(Tables):
    """The memory of `scheme` on one rank, and what calls the scheme with it. `Scheme.start` makes it.

    A scheme keeps four kinds of things in it, and all of them are saved:

    - `vector`: what this rank holds back, by parameter name. It follows learning rates and clipping, is redistributed to other
      numbers of ranks, and stays after a failure. A wrapper and the schemes inside it share these, because each parameter belongs to one
      of them.
    - `shared_state`: numbers of a bucket that all ranks have in common. Ranks compare them before each bucket, and they start again after
      a failure.
    - `common` and `common_vector`: the same by parameter name. Vectors and other tensors are not compared.
    - `own_state`: numbers of a bucket that differ between ranks.
    """

    def __init__(
        self, scheme: Any, vectors: Vectors | None = None
    ) -> None:  # Any: a Scheme, or its reduce-scatter form
        super().__init__()
        self.scheme = scheme
        self.name: str = scheme.name
        self.vectors = Vectors() if vectors is None else vectors
        self.inner: dict[str, State] = {key: each.start(self.vectors) for key, each in scheme.inner.items()}
        # What `rollback` does for the last step of a bucket, by key, if it is anything else than adding what was written to the residual.
        self.undo: dict[str, Callable[[Bucket], None]] = {}
        self._stays = 1.0
        self._hints: dict[str, float] = {}
        if scheme.has_residual:
            self.vectors.by_kind("residual")

    @property
    def settings(self) -> str:
        """What must be the same on every rank: all settings of the scheme."""
        return repr(self.scheme)

    @property
    def has_residual(self) -> bool:
        """Whether anything is held back from one step to a later one."""
        return self.scheme.has_residual

    @property
    def interleaves(self) -> bool:
        """Whether a bucket may be reduced while another one waits for other ranks."""
        return self.scheme.interleaves

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        """Replace `bucket.grad` [n] by the scheme's estimate of the mean gradient. See `Scheme.reduce`."""
        return self.scheme.reduce(self, bucket, comm)

    def send_all(self, bucket: Bucket, comm: Comm) -> Report:
        """Reduce a bucket, and leave nothing behind. See `Scheme.send_all`."""
        return self.scheme.send_all(self, bucket, comm)

    def rollback(self, bucket: Bucket) -> None:
        """Add what `reduce` wrote to `bucket.grad` to the residual again, on all ranks, because the step will not be applied."""
        for key, part in self.scheme.parts(bucket).items():
            self.inner[key].rollback(part)
        if bucket.skip is not None:
            bucket.grad.masked_fill_(bucket.skip != 0, 0.0)  # then no residual has lost anything
        if (undo := self.undo.pop(bucket.key, None)) is not None:
            undo(bucket)
        elif self.has_residual and not self.inner:
            self.residual(bucket).add_(bucket.grad)

    def vector(self, kind: str, bucket: Bucket) -> Tensor:
        """Return this rank's vector of a kind for the parameters of a bucket, [n], for writing; zero for parameters not seen before.

        At least float32, or bfloat16 where the scheme's `residuals` says so. Raises ValueError when a parameter's size has changed.
        """
        dtype = torch.promote_types(bucket.grad.dtype, torch.float32)
        if dtype == torch.float32 and getattr(self.scheme, "residuals", "float32") == "bfloat16":
            dtype = torch.bfloat16
        return self.vectors.by_kind(kind).of(bucket, dtype)

    def residual(self, bucket: Bucket) -> Tensor:
        """Return this rank's residual of a bucket, [n], for writing."""
        return self.vector("residual", bucket)

    def accumulate(self, bucket: Bucket) -> Accumulator:
        """Return the sum of a bucket's residual, decayed, and gradient."""
        return Accumulator(bucket, self.residual(bucket), self._hints, self.decay)

    @property
    def decay(self) -> float:
        """The share of the residual that joins the next gradient: the scheme's own setting, or else what `forget` was given."""
        own = getattr(self.scheme, "decay", 1.0)
        return own if own != 1.0 else self._stays

    def forget(self, decay: float) -> bool:
        """Let only the share `decay` of the residual join the next gradient; return whether it does: a scheme's own setting counts more."""
        takes = self.scheme.may_forget and getattr(self.scheme, "decay", 1.0) == 1.0
        self._stays = decay if takes else 1.0
        return takes

    def unsent(self, bucket: Bucket, comm: Comm) -> Tensor | None:
        """Return this rank's share of what is held back of `bucket`, [n], for reading only; None where nothing is.

        In units of the gradient, for each element. Of what this rank has not sent of its own gradients, its share is all; of a sum over m
        ranks that waits here for them, an m-th. So with m = 1 for its own, the residuals of all ranks add up to what m * share does. No
        rank's gradient waits in two places: over the ranks, m - 1 adds up to at most P - 1. `bucket` gives key, type and layout;
        `bucket.grad` is not read.
        """
        vector, rows = self.unsent_in_rows(bucket, comm) or (None, None)
        if vector is None or rows is None:
            return vector
        share = vector.clone()
        kernels.divide_rows_(share, rows, comm.size)
        return share

    def unsent_in_rows(self, bucket: Bucket, comm: Comm) -> tuple[Tensor, Rows | None] | None:
        """Return a vector, [n], and rows of it: `unsent` is the vector, divided by the number of ranks in these rows. Spares a copy."""
        if not self.inner:
            return self.scheme.unsent(self, bucket, comm)
        found, places = None, {entry.name: entry.span for entry in bucket.layout}
        for key, part in self.scheme.parts(bucket).items():
            if (own := self.inner[key].unsent(part, comm)) is not None:
                found = torch.zeros_like(bucket.grad, dtype=own.dtype) if found is None else found
                for entry in part.layout:
                    places[entry.name].of(found).copy_(entry.span.of(own))
        return None if found is None else (found, None)

    def whole_form(self, bucket: Bucket) -> tuple[tuple[Values, Values], Tensor] | None:
        """Return the formats, up and down, and the residual, [n], of a bucket that passes over all of it send; None where none do."""
        values = self.scheme.whole_values
        return None if values is None or self.decay != 1.0 else in_passes(values, self.residual(bucket))

    def weigh(self, factors: Mapping[str, float]) -> None:
        """Keep of the step since `vectors.hold`, for each named parameter, its factor in [0, 1]: only that share was applied."""
        self.vectors.weigh(self.weighed(factors))

    def weighed(self, factors: Mapping[str, float]) -> Mapping[str, float]:
        """Return `factors` without the parameters of schemes that count every step whole."""
        for each in self.inner.values():
            factors = each.weighed(factors)
        return factors

    def rescale(self, factors: Mapping[str, float]) -> None:
        """Multiply the vectors of each named parameter by its factor, because the learning rate or the loss scale has changed."""
        for each in tree(self):
            each.scheme.rescaled(each, factors)
        self.vectors.rescale(factors)

    def shared_text(self, bucket: Bucket) -> str:
        """Return, as text, the state that must agree across ranks before `bucket` is reduced; ranks that differ get an error."""
        return _text(self, bucket.key, [entry.name for entry in bucket.layout])

    def reset_shared_state(self) -> None:
        """Forget thresholds, partitions and whatever else must agree across ranks, but no residual: after a failure it may differ."""
        for each in tree(self):
            each.forget_shared()

    def followed_by(self, scheme: Any) -> Self:  # Any: a Scheme
        """Return the state of `scheme` that goes on with this one's vectors, and with the rest of it where the classes are the same.

        Raises ValueError where `scheme` would not send what is held back.
        """
        after = scheme.start(self.vectors)
        before, now = tree(self), tree(after)
        same = [(type(each.scheme), list(each.inner)) for each in before] == [
            (type(each.scheme), list(each.inner)) for each in now
        ]
        if same:
            takes = all(new.has_residual or not old.has_residual for new, old in zip(now, before, strict=True))
        else:
            takes = not any(each.scheme.has_momentum for each in before + now)
            takes = takes and all(each.has_residual for each in innermost(after))
        if not takes and self.vectors.hold_anything:
            raise ValueError(
                f"{type(scheme).__name__} cannot take over what {type(self.scheme).__name__} holds back; assign TopK(density=1.0) to "
                'handle.scheme and train one step, which sends all of it; then handle.switch(scheme, residual="drop") forgets what is left'
            )
        for new, old in zip(now, before, strict=True) if same else ():
            new.continue_from(old)
        self.vectors.lay_out_again()  # in the precision of `scheme`
        return after

    def state_dict(
        self,
    ) -> dict[str, Any]:  # Any: nested dicts of tensors, numbers and strings, as weights_only loads them
        """Return this rank's state, copied. Residuals stand under "residual", flat, by parameter name."""
        return {**self.vectors.state_dict(), **_tables(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned. Raises ValueError for a state with a residual that the scheme would never send."""
        vectors = {kind: by_name for kind, by_name in state.items() if kind not in TABLES}
        if any(vectors.values()) and not self.has_residual:
            raise ValueError(
                f"this state has a residual, which {self.scheme} would never send; load it into the scheme that saved it"
            )
        _load_tables(self, state)
        self.vectors.load_state_dict(vectors)
        for each in tree(self):
            each.undo.clear()
            if each.has_residual:
                self.vectors.by_kind("residual")


def overflowed(report: Report, grad: Tensor) -> bool:
    """Return whether `grad`, as it was written on all ranks, holds NaN or Inf; the report's "overflow" counts where it has one."""
    known = report.details.get("overflow")
    # A host sync where the report does not say.
    return not kernels.all_finite(grad) if known is None else bool(known)


def tree(state: State) -> list[State]:
    """Return `state`, and the states of all schemes inside."""
    return [state, *(found for each in state.inner.values() for found in tree(each))]


def innermost(state: State) -> list[State]:
    """Return the states of the schemes that have none inside."""
    return [each for each in tree(state) if not each.inner]


def _tables(state: State) -> dict[str, Any]:
    inner = {key: _tables(each) for key, each in state.inner.items()}
    return {**state.tables(), **({"schemes": inner} if inner else {})}


def _load_tables(state: State, saved: Mapping[str, Any]) -> None:
    inner = saved.get("schemes", {})
    if inner.keys() != state.inner.keys():
        raise ValueError(
            f"this state is of schemes for {sorted(inner)}, and {state.name} has {sorted(state.inner)}; use the same"
        )
    state.load_tables(saved)
    for key, each in state.inner.items():
        _load_tables(each, inner[key])


def _text(state: State, bucket: str, names: Sequence[str]) -> str:
    inner = [_text(each, f"{bucket}/{key}", names) for key, each in state.inner.items()]
    return ", ".join(filter(None, [state.text(bucket, names), *inner]))


class Rollback:
    """Tracks the buckets that a step has written, and rolls them back when one is non-finite, because a loss scaler then skips the step.

    A bucket with NaN or Inf has them on every rank, and its scheme has left its residual alone. The other buckets of the step have sent
    from their residuals what nobody will apply: each rank adds the mean that was written to its residual again, P times in all. All
    ranks see the same buckets and do the same, so no message is needed. With `waits`, what a device has found is read and rolled back in
    `settle`, one step later, when the gradient is not there any more.
    """

    def __init__(self, waits: bool = False) -> None:
        self._waits = waits
        self._step: int | None = None
        # With a flag that tells whether the bucket is non-finite, if that is not known yet.
        self._written: list[tuple[Any, Bucket, Arriving | None]] = []
        self._skipped = False

    def reduced(self, scheme: Any, bucket: Bucket, report: Report) -> bool:
        """Note a bucket that `scheme` has reduced; roll back what this step has written if it is to be skipped, and return whether it is.

        Call it in the same order on all ranks, before any gradient of the step is changed.
        """
        if bucket.step != self._step:
            self.settle()
            self._step, self._written, self._skipped = bucket.step, [], False
        flag, all_wait = report.details.get("overflow"), all(each is not None for *_, each in self._written)
        if self._waits and isinstance(flag, Arriving) and all_wait and not self._skipped:
            self._written.append((scheme, Bucket(bucket.key, bucket.grad.new_empty(0), bucket.step), flag))
            return False
        if overflowed(report, bucket.grad):
            self._skipped = True
        elif scheme.has_residual:
            self._written.append((scheme, bucket, None))
        return self._roll_back()

    def settle(self) -> bool:
        """Roll back what the last step has written if a device has found any of it non-finite since; return whether it has."""
        return any(each is not None for *_, each in self._written) and self._roll_back()

    def end_step(self) -> None:
        """End the step: the next bucket belongs to another one, even of the same number."""
        self._step = None
        self._written = [each for each in self._written if each[2] is not None]

    def _roll_back(self) -> bool:
        """Roll back what is written if the step is non-finite; return whether it is. Waits for flags."""
        self._skipped |= any(bool(flag) for *_, flag in self._written)
        written = [(scheme, bucket) for scheme, bucket, flag in self._written if not flag]
        self._written = [] if self._skipped else [(*each, None) for each in written]
        for scheme, bucket in written if self._skipped else ():
            scheme.rollback(bucket)
        return self._skipped

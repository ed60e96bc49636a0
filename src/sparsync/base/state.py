"""The state of a scheme for one model on one rank. A handle, or the caller of `Scheme.start`, owns it; a scheme has only settings."""

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
TABLES = ("shared", "own", "common", "schemes")  # the parts of a saved state that are not vectors


class Tables:
    """Numbers and tensors by key, all of them saved. See `State`."""

    def __init__(self) -> None:
        # Any: by bucket key, its shape and its numbers: a dataclass, or a loaded dict that nobody has read yet
        self._shared: dict[str, dict[str, dict[str, Any]]] = {}
        self._own: dict[str, dict[str, dict[str, Any]]] = {}
        self._common: dict[str, Any] = {}  # Any: by parameter name, numbers or tensors, or a ByParameter

    def shared_state(self, key: str, make: Callable[..., Numbers], bucket: Bucket, P: int) -> Numbers:
        """Return the numbers of this bucket that all ranks share, for reading and writing: a dataclass that `make` creates.

        They are created anew when the bucket's layout or the number of ranks changes, because partitions, counts and thresholds of other
        elements mean nothing.
        """
        return _of_bucket(self._shared.setdefault(key, {}), make, bucket, P)

    def own_state(self, key: str, make: Callable[..., Numbers], bucket: Bucket, P: int) -> Numbers:
        """Return the numbers of this bucket that differ between ranks, as `shared_state` does. They survive a failure."""
        return _of_bucket(self._own.setdefault(key, {}), make, bucket, P)

    def all_of(self, key: str, make: Callable[..., Numbers]) -> list[tuple[set[str], Numbers]]:
        """Return the `shared_state` or `own_state` of all buckets, with the parameter names of the bucket."""
        buckets = {**self._own.get(key, {}), **self._shared.get(key, {})}.values()
        return [({name for name, _ in kept["shape"][1:]}, _made(kept, make)) for kept in buckets]

    def common(self, key: str) -> dict[str, Any]:  # Any: numbers or tensors
        """Return the numbers that all ranks share, by parameter name, for reading and writing. Ranks compare them."""
        return self._common.setdefault(key, {})

    def common_vector(self, key: str, bucket: Bucket) -> Tensor:
        """Return a vector that all ranks share, [n], at least float32, for writing; zero for new parameters."""
        known = self._common.get(key, {})
        if not isinstance(known, ByParameter):
            known = self._common[key] = ByParameter(known)
        return known.of(bucket, torch.promote_types(bucket.grad.dtype, torch.float32))

    def text(self, bucket: str, names: Sequence[str]) -> str:
        """Format the state that all ranks share for the bucket with this key and these parameters, without tensors."""
        lines = [f"{key}: {_fields(table[bucket])}" for key, table in self._shared.items() if bucket in table]
        for key, values in self._common.items():
            if isinstance(values, dict):
                # Unknown names are skipped, so that a loaded and a fresh state give the same text. Only integers are compared:
                # the last bits of floating-point numbers may differ between processors.
                known = [values[name] for name in names if name in values]
                lines += [f"{key}: {number}" for number in known if isinstance(number, int)]
        return ", ".join(lines)

    def tables(self) -> dict[str, Any]:
        """Return a copy of all tables that are not empty."""
        by_bucket = {
            part: {
                key: {name: {"shape": kept["shape"], "state": _fields(kept)} for name, kept in table.items()}
                for key, table in tables.items()
            }
            for part, tables in (("shared", self._shared), ("own", self._own))
        }
        common = {key: kept.by_name if isinstance(kept, ByParameter) else kept for key, kept in self._common.items()}
        return deepcopy({part: table for part, table in {**by_bucket, "common": common}.items() if table})

    def load_tables(self, tables: Mapping[str, Any]) -> None:
        """Load a result of `tables`."""
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
    """The memory of `scheme` on one rank, with which integrations call the scheme. `Scheme.start` creates it.

    A scheme keeps four kinds of state in it, all of them saved:

    - `vector`: what this rank holds back, by parameter name. It follows learning rates and clipping, is redistributed when the
      number of ranks changes, and survives a failure. A wrapper and the schemes inside it share the vectors, because a parameter belongs to
      one of them only.
    - `shared_state`: numbers of a bucket that all ranks share. Ranks compare them before reducing the bucket, and reset them after a
      failure.
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
        self.inner: dict[str, State] = {key: inner.start(self.vectors) for key, inner in scheme.inner.items()}
        # How `rollback` undoes the last step of a bucket, by key, unless it just adds the written mean to the residual.
        self.undo: dict[str, Callable[[Bucket], None]] = {}
        self._stays = 1.0
        self._hints: dict[str, float] = {}
        if scheme.has_residual:
            self.vectors.by_kind("residual")

    @property
    def settings(self) -> str:
        """The settings of the scheme, which must be the same on every rank."""
        return repr(self.scheme)

    @property
    def has_residual(self) -> bool:
        """Whether a step may hold anything back for a later one."""
        return self.scheme.has_residual

    @property
    def interleaves(self) -> bool:
        """Whether a bucket may be reduced while another one waits for other ranks."""
        return self.scheme.interleaves and all(inner.interleaves for inner in self.inner.values())

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        """Replace `bucket.grad` [n] by the scheme's estimate of the mean gradient. See `Scheme.reduce`."""
        return self.scheme.reduce(self, bucket, comm)

    def send_all(self, bucket: Bucket, comm: Comm) -> Report:
        """Reduce a bucket and its whole residual. See `Scheme.send_all`."""
        return self.scheme.send_all(self, bucket, comm)

    def rollback(self, bucket: Bucket) -> None:
        """Add the mean in `bucket.grad` to the residual again, on all ranks, because the step will not be applied."""
        for key, part in self.scheme.parts(bucket).items():
            self.inner[key].rollback(part)
        if bucket.skip is not None:
            bucket.grad.masked_fill_(bucket.skip != 0, 0.0)  # then no residual has lost anything
        if (undo := self.undo.pop(bucket.key, None)) is not None:
            undo(bucket)
        elif self.has_residual and not self.inner:
            self.residual(bucket).add_(bucket.grad)

    def vector(self, kind: str, bucket: Bucket) -> Tensor:
        """Return this rank's vector of a kind for the parameters of a bucket, [n], for writing; zero for new parameters.

        At least float32, or bfloat16 if the scheme's `residuals` says so. Raises ValueError if a parameter's size has changed.
        """
        dtype = torch.promote_types(bucket.grad.dtype, torch.float32)
        if dtype == torch.float32 and getattr(self.scheme, "residuals", "float32") == "bfloat16":
            dtype = torch.bfloat16
        return self.vectors.by_kind(kind).of(bucket, dtype)

    def residual(self, bucket: Bucket) -> Tensor:
        """Return this rank's residual of a bucket, [n], for writing."""
        return self.vector("residual", bucket)

    def accumulate(self, bucket: Bucket) -> Accumulator:
        """Add a bucket's decayed residual and gradient."""
        return Accumulator(bucket, self.residual(bucket), self._hints, self.decay)

    @property
    def decay(self) -> float:
        """The share of the residual that joins the next gradient: the scheme's setting, or else the argument of `forget`."""
        setting = getattr(self.scheme, "decay", 1.0)
        return setting if setting != 1.0 else self._stays

    def forget(self, decay: float) -> bool:
        """Let only the share `decay` of the residual join the next gradient. Return False if the scheme overrides it."""
        takes = self.scheme.may_forget and getattr(self.scheme, "decay", 1.0) == 1.0
        self._stays = decay if takes else 1.0
        return takes

    def unsent(self, bucket: Bucket, comm: Comm) -> Tensor | None:
        """Return this rank's share of the residuals of `bucket`, [n], for reading only; None if nothing is held back.

        In units of the gradient. The share is all of the rank's local gradients that it has not sent, and 1/m of a sum over m
        ranks that waits here. So the residuals of all ranks add up to the sum of m * share, with m = 1 for local gradients. No
        rank's gradient waits in two places: summed over the ranks, m - 1 is at most P - 1. `bucket` gives key, type and layout;
        `bucket.grad` is not read.
        """
        vector, rows = self.unsent_in_rows(bucket, comm) or (None, None)
        if vector is None or rows is None:
            return vector
        share = vector.clone()
        kernels.divide_rows_(share, rows, comm.size)
        return share

    def unsent_in_rows(self, bucket: Bucket, comm: Comm) -> tuple[Tensor, Rows | None] | None:
        """Return a vector, [n], and rows of it: dividing these rows by the number of ranks gives `unsent`. Avoids a copy."""
        if not self.inner:
            return self.scheme.unsent(self, bucket, comm)
        whole, places = None, {entry.name: entry.span for entry in bucket.layout}
        for key, part in self.scheme.parts(bucket).items():
            if (unsent := self.inner[key].unsent(part, comm)) is not None:
                whole = torch.zeros_like(bucket.grad, dtype=unsent.dtype) if whole is None else whole
                for entry in part.layout:
                    places[entry.name].of(whole).copy_(entry.span.of(unsent))
        return None if whole is None else (whole, None)

    def whole_form(self, bucket: Bucket) -> tuple[tuple[Values, Values], Tensor] | None:
        """Return the formats, up and down, and the residual, [n], of a bucket that kernels send in whole passes; None if they cannot."""
        values = self.scheme.whole_values
        return None if values is None or self.decay != 1.0 else in_passes(values, self.residual(bucket))

    def weigh(self, factors: Mapping[str, float]) -> None:
        """Scale the change since `vectors.hold` by the factor in [0, 1] of a parameter, because only that share of the step was applied."""
        self.vectors.weigh(self.weighed(factors))

    def weighed(self, factors: Mapping[str, float]) -> Mapping[str, float]:
        """Return `factors` without the parameters of schemes that count every step as applied in full."""
        for inner in self.inner.values():
            factors = inner.weighed(factors)
        return factors

    def rescale(self, factors: Mapping[str, float]) -> None:
        """Multiply the vectors of every named parameter by its factor, because the learning rate or the loss scale has changed."""
        for state in tree(self):
            state.scheme.rescaled(state, factors)
        self.vectors.rescale(factors)

    def shared_text(self, bucket: Bucket) -> str:
        """Format the state that must agree across ranks before `bucket` is reduced; ranks that differ raise an error."""
        return _text(self, bucket.key, [entry.name for entry in bucket.layout])

    def reset_shared_state(self) -> None:
        """Forget thresholds, partitions and all else that must agree across ranks but may differ after a failure; keep residuals."""
        for state in tree(self):
            state._shared, state._common = {}, {}

    def followed_by(self, scheme: Any) -> Self:  # Any: a Scheme
        """Create a state of `scheme` that takes over these vectors, and all other state if the classes are the same.

        Raises ValueError if `scheme` would not send what is held back.
        """
        after = scheme.start(self.vectors)
        before, now = tree(self), tree(after)
        kinds = [[(type(state.scheme), list(state.inner)) for state in states] for states in (before, now)]
        if same := kinds[0] == kinds[1]:
            takes = all(new.has_residual or not old.has_residual for new, old in zip(now, before, strict=True))
        else:
            takes = not any(state.scheme.has_momentum for state in before + now)
            takes = takes and all(state.has_residual for state in innermost(after))
        if not takes and self.vectors.hold_anything:
            raise ValueError(
                f"{type(scheme).__name__} cannot take over what {type(self.scheme).__name__} holds back; assign TopK(density=1.0) to "
                "handle.scheme and train one step, which sends all of it; then detach, and attach with the other scheme"
            )
        for new, old in zip(now, before, strict=True) if same else ():
            new._shared, new._own, new._common = old._shared, old._own, old._common
        self.vectors.lay_out_again()  # in the precision of `scheme`
        return after

    def state_dict(
        self,
    ) -> dict[str, Any]:  # Any: nested dicts of tensors, numbers and strings, as weights_only loads them
        """Return a copy of this rank's state. Residuals are under "residual", flat, by parameter name."""
        return {**self.vectors.state_dict(), **_tables(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`. Raises ValueError for a residual that the scheme would never send."""
        vectors = {kind: by_name for kind, by_name in state.items() if kind not in TABLES}
        if any(vectors.values()) and not self.has_residual:
            raise ValueError(
                f"this state has a residual, which {self.scheme} would never send; load it into the scheme that saved it"
            )
        _load_tables(self, state)
        self.vectors.load_state_dict(vectors)
        for part in tree(self):
            part.undo.clear()
            if part.has_residual:
                self.vectors.by_kind("residual")


def overflowed(report: Report, grad: Tensor) -> bool:
    """Return whether the written `grad` holds NaN or Inf: the report's "overflow", or else a look at `grad`."""
    known = report.details.get("overflow")
    # A host sync if the report does not say.
    return not kernels.all_finite(grad) if known is None else bool(known)


def tree(state: State) -> list[State]:
    """Return `state` and the states of all schemes inside."""
    return [state, *(part for inner in state.inner.values() for part in tree(inner))]


def innermost(state: State) -> list[State]:
    """Return the states of the schemes that have no schemes inside."""
    return [part for part in tree(state) if not part.inner]


def _tables(state: State) -> dict[str, Any]:
    inner = {key: _tables(part) for key, part in state.inner.items()}
    return {**state.tables(), **({"schemes": inner} if inner else {})}


def _load_tables(state: State, saved: Mapping[str, Any]) -> None:
    inner = saved.get("schemes", {})
    if inner.keys() != state.inner.keys():
        raise ValueError(
            f"this state is of schemes for {sorted(inner)}, and {state.name} has {sorted(state.inner)}; use the same"
        )
    state.load_tables(saved)
    for key, part in state.inner.items():
        _load_tables(part, inner[key])


def _text(state: State, bucket: str, names: Sequence[str]) -> str:
    inner = [_text(part, f"{bucket}/{key}", names) for key, part in state.inner.items()]
    return ", ".join(filter(None, [state.text(bucket, names), *inner]))


class Rollback:
    """Tracks the buckets that a step has written, and rolls them back when one is non-finite, because a loss scaler then skips the step.

    A bucket with NaN or Inf has them on every rank, and its scheme did not change its residual. The step's other buckets sent parts of
    their residuals that nobody will apply, so every rank adds the written mean to its residual again, P times in all. All
    ranks see the same buckets and do the same, so no message is needed. With `waits`, `settle` reads the device's result and rolls
    back one step later, when the gradient no longer exists.
    """

    def __init__(self, waits: bool = False) -> None:
        self._waits = waits
        self._step: int | None = None
        # The flag tells whether the bucket is non-finite, if that is not known yet.
        self._written: list[tuple[Any, Bucket, Arriving | None]] = []
        self._skipped = False

    def reduced(self, scheme: Any, bucket: Bucket, report: Report) -> bool:
        """Record a bucket that `scheme` has reduced. Roll the step back if it must be skipped, and return whether it must.

        Call it in the same order on all ranks, before any gradient of the step is changed.
        """
        if bucket.step != self._step:
            self.settle()
            self._step, self._written, self._skipped = bucket.step, [], False
        flag, all_wait = report.details.get("overflow"), all(other is not None for *_, other in self._written)
        if self._waits and isinstance(flag, Arriving) and all_wait and not self._skipped:
            self._written.append((scheme, Bucket(bucket.key, bucket.grad.new_empty(0), bucket.step), flag))
            return False
        if overflowed(report, bucket.grad):
            self._skipped = True
        elif scheme.has_residual:
            self._written.append((scheme, bucket, None))
        return self._roll_back()

    def settle(self) -> bool:
        """Roll the last step back if the device has reported a non-finite bucket since; return whether it has."""
        return any(flag is not None for *_, flag in self._written) and self._roll_back()

    def end_step(self) -> None:
        """End the step: the next bucket belongs to another step, even if that has the same number."""
        self._step = None
        self._written = [entry for entry in self._written if entry[2] is not None]

    def _roll_back(self) -> bool:
        """Roll the step back if it is non-finite; return whether it is. Waits for flags."""
        self._skipped |= any(bool(flag) for *_, flag in self._written)
        written = [(scheme, bucket) for scheme, bucket, flag in self._written if not flag]
        self._written = [] if self._skipped else [(scheme, bucket, None) for scheme, bucket in written]
        for scheme, bucket in written if self._skipped else ():
            scheme.rollback(bucket)
        return self._skipped

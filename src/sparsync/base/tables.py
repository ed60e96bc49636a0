"""What a scheme remembers besides vectors of its own: numbers by bucket, and what all ranks have in common by parameter name."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsync.core import Bucket
from sparsync.feedback import ByParameter

Numbers = TypeVar("Numbers")


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
        """Return what all ranks have in common, by parameter name, for reading and writing. Ranks compare the numbers in it."""
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
        """Return what all ranks have in common of the bucket with this key and these parameters, without tensors."""
        found = [f"{key}: {_fields(table[bucket])}" for key, table in self._shared.items() if bucket in table]
        for key, values in self._common.items():
            if isinstance(values, dict):
                found += [f"{key}: {each}" for name in names if not isinstance(each := values.get(name), Tensor)]
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

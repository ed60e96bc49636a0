"""Schemes by name: ours, those of installed packages, and any class or constructor that can be imported or loaded from a file.

An installed package gives its schemes as entry points of the group "sparsync.schemes". Nothing here imports torch before a scheme is
looked at.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sparsync.base.locate import installed, locate

if TYPE_CHECKING:
    from sparsync.base.scheme import Scheme

# name -> (where its constructor lives, a description in a line)
_OURS: dict[str, tuple[str, str]] = {
    "dense": ("sparsync.schemes.dense:Dense", "every element, in the gradient's own precision"),
    "bf16": ("sparsync.schemes.dense:Dense.bf16", "every element, in 16 bits on the wire"),
    "topk": ("sparsync.schemes.topk_allgather:TopK", "each rank's largest elements, sent to all ranks"),
    "two_shot": (
        "sparsync.schemes.two_shot:TwoShot",
        "the largest elements, or all, in few bits and two exchanges; owners of regions keep what they do not send",
    ),
    "skip_reduce": (
        "sparsync.schemes.skip_reduce:SkipReduce",
        "a ring all-reduce that leaves out some of its reduce-scatter steps",
    ),
    "auto_protect": (
        "sparsync.schemes.auto_protect:AutoProtect.skip_reduce",
        "skip_reduce that measures which parameters it must not skip",
    ),
    "micro": (
        "sparsync.schemes.micro:MiCRO",
        "exclusive partitions that rotate over the ranks; exactly the asked number of elements is summed",
    ),
    "exdyna": (
        "sparsync.schemes.exdyna:ExDyna",
        "as micro, with partitions that change size until they hold equally much",
    ),
    "oktopk": (
        "sparsync.schemes.oktopk:OkTopk",
        "the k largest sums over ranks; traffic does not grow with their number",
    ),
    "powersgd": (
        "sparsync.schemes.powersgd:PowerSGD",
        "each matrix as the product of two thin ones, by power iteration with warm start (arXiv 1905.13727)",
    ),
    "quantized": (
        "sparsync.schemes.quantized:Quantized",
        "every element in 8 bits or fewer, with error feedback (arXiv 1901.09847)",
    ),
    "int4": ("sparsync.schemes.quantized:Quantized.int4", "every element in 4 bits, with error feedback"),
    "sparse_loco": (
        "sparsync.schemes.sparse_loco:SparseLoCo",
        "the largest elements of each tile of 64 x 64, in 2 bits, with a residual that decays (arXiv 2508.15706)",
    ),
    "demo": (
        "sparsync.schemes.demo:DeMo",
        "the largest cosine components of each tile of 64 x 64 of a momentum that each rank keeps (arXiv 2411.19870)",
    ),
    "onebit_adam": (
        "sparsync.schemes.onebit_adam:OneBitAdam",
        "Adam with frozen second moments and a momentum in 1 bit, for plain SGD to apply (arXiv 2102.02888)",
    ),
    "dgc": (
        "sparsync.schemes.dgc:DGC",
        "topk of a momentum that each rank accumulates, for plain SGD to apply (arXiv 1712.01887)",
    ),
    "random_k": (
        "sparsync.schemes.random_k:RandomK",
        "the same random elements on all ranks, without positions (arXiv 1809.07599)",
    ),
    "topk_union": (
        "sparsync.schemes.topk_union:TopKUnion",
        "all ranks' values at the union of their largest elements (the top-k baseline of arXiv 2310.00967)",
    ),
    "hard_threshold": (
        "sparsync.schemes.hard_threshold:HardThreshold",
        "what reaches a threshold that never changes (arXiv 2108.00951)",
    ),
    "gaussiank": (
        "sparsync.schemes.gaussiank:GaussianK",
        "as topk, by the threshold of a normal distribution (arXiv 1911.08772)",
    ),
    "sidco": (
        "sparsync.schemes.sidco:SIDCo",
        "as topk, by the threshold of an exponential, gamma or Pareto distribution (arXiv 2101.10761)",
    ),
    "cltk": (
        "sparsync.schemes.cltk:CLTk",
        "CLT-k of ScaleCom: one rank in turn chooses the positions for all (arXiv 2104.11125)",
    ),
    "gtopk": (
        "sparsync.schemes.gtopk:GTopK",
        "gTop-k: selections merged pairwise in a tree, k elements in the end (arXiv 1901.04359)",
    ),
    "spardl": (
        "sparsync.schemes.spardl:SparDL",
        "SparDL: a sparse reduce-scatter and all-gather in 2 log2 P rounds (arXiv 2304.00737)",
    ),
    "topk_dsa": (
        "sparsync.schemes.topk_dsa:TopKDSA",
        "SparCML: topk's sums by owners of regions, gathered dense where they fill up (arXiv 1802.08021)",
    ),
    "deft": (
        "sparsync.schemes.deft:DEFT",
        "DEFT: layers are dealt to the ranks, each selects in its own for all (arXiv 2307.03500)",
    ),
    "ring_pruning": (
        "sparsync.schemes.skip_reduce:SkipReduce.ring_pruning",
        "the thesis's Skip-Reduce: always the same steps are left out",
    ),
    "random_pruning": (
        "sparsync.schemes.random_pruning:RandomPruning",
        "each element loses some ranks; saves no traffic, for comparison",
    ),
}
_PUBLISHED = ".published"


def names() -> list[str]:
    """Return the names of our schemes, then those that installed packages bring."""
    return [*_OURS, *(name for name in installed("scheme") if name not in _OURS)]


def describe(name: str) -> str:
    """Return what the scheme called `name` is, in a line. Raises ValueError for an unknown name."""
    if name in _OURS:
        return _OURS[name][1]
    return installed("scheme")[_known(name)]


def settings(name: str) -> dict[str, Any]:  # Any: whatever a setting defaults to
    """Return the settings `get(name, ...)` takes, with their defaults."""
    return {key: parameter.default for key, parameter in inspect.signature(_constructor(name)).parameters.items()}


def get(name: str, **config: Any) -> "Scheme":  # Any: the settings of the scheme, checked by its constructor
    """Return a new scheme, e.g. `get("topk", density=0.01)`.

    `name` is one of `names()`, "NAME.published" for the authors' setting of one of ours, "package.module:Class" or
    "path/to/file.py:Class". Raises ValueError for an unknown name or setting, TypeError for a class that is no Scheme.
    """
    check_settings(name, config)
    from sparsync.base.scheme import Scheme

    scheme = _constructor(name)(**config)
    if not isinstance(scheme, Scheme):
        raise TypeError(
            f"{name} makes a {type(scheme).__name__}, which is no sparsync.Scheme; subclass sparsync.Scheme"
        )
    return scheme


def check_settings(name: str, keys: Iterable[str]) -> None:
    """Raise ValueError for an unknown scheme, and for a key that is none of its settings."""
    known = list(settings(name))
    for key in keys:
        if key not in known:
            raise ValueError(
                f"scheme {name!r} has no setting {key!r}; it has {', '.join(known) or 'none'}{_nearest(key, known)}"
            )


def without_value(key: str, text: str) -> str:
    """Return the message for a setting that has no value in the text of a scheme."""
    return f"the setting {key!r} has no value in {text!r}; write {key}=VALUE, or leave it out"


def _constructor(name: str) -> Callable[..., Any]:  # Any: a Scheme, if it is one
    if ":" in name or name.endswith(".py"):
        try:
            return locate(name, "scheme")
        except ValueError as error:
            raise ValueError(_no_class(name, error)) from error.__cause__
    base = name.removesuffix(_PUBLISHED)
    if base not in _OURS:
        return locate(installed("scheme")[_known(name)], "scheme")
    where = _OURS[base][0]
    found = locate(where, "scheme")
    # A named constructor, such as Dense.bf16, is its own published setting.
    if base == name or "." in where.partition(":")[2]:
        return found
    if not hasattr(found, "published"):
        raise ValueError(f"scheme {base!r} has no published setting, because it is none of a paper's; use {base!r}")
    return found.published


def _no_class(text: str, error: ValueError) -> str:
    """Return what is wrong with a text in which `error` found no class: for "topk:density", that a setting has no value."""
    name, _, rest = text.partition(":")
    if name.removesuffix(_PUBLISHED) not in names():
        return str(error)
    if (key := rest.partition(":")[0]) in settings(name):
        return without_value(key, text)
    return f"settings of the scheme {name!r} are written {name}:KEY=VALUE, got {text!r}; as a class: {error}"


def _known(name: str) -> str:
    base, dot, setting = name.partition(".")
    if base in _OURS and dot and f".{setting}" != _PUBLISHED:
        raise ValueError(f"a scheme has the settings {base!r} and '{base}.published', got {name!r}")
    if name not in names():
        raise ValueError(
            f"unknown scheme {name!r}; there are {', '.join(names())}{_nearest(name, names())}; "
            "others are given as package.module:Class or as path/to/file.py:Class"
        )
    return name


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

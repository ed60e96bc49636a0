"""Set-ups as TOML files: a job, a network and the schemes to compare, each figure with its source. Imports no torch.

title = "..."
[job]                           # what one rank does in a step without communication
elements = 133547324            # parameters
itemsize = 4                    # bytes of a gradient's element
ranks = 256
forward_s = 0.06
backward_s = 0.12
optimizer_s = 0.0
bucket_mb = 25                  # of DDP's buckets; 0: one bucket
overlap = true                  # reduce buckets during the backward pass
samples = 8                     # of a rank in a step
unit = "sequences"
[network]
gbit_per_s = 25                 # of a link between nodes
efficiency = 0.8                # the share of it that payload gets
latency_us = 25
per_message_us = 0
ranks_per_node = 4
links_per_node = 1
inside_gbit_per_s = 100         # needed with several ranks on a node
inside_latency_us = 3
all_reduce = "best"             # "ring" | "tree" | "best"
rings = ["all_gather"]          # other exchanges that go round a ring, as NCCL's
[memory]
gb_per_s = 500                  # of a rank, for passes over its gradient
[[scheme]]
label = "Ok-Topk"               # the first scheme is the one that the others are compared with
name = "oktopk"                 # of `sparsync schemes`
settings = { density = 0.01 }
every = 1                       # steps between exchanges of weights; with fragments = and delay = as in local steps
[sources]
"job.elements" = "section 5, table 2"      # of each figure above: where it is from, or "assumed: why"
"""

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import tomllib

Section = TypeVar("Section")
ASSUMED = "assumed"

# What a figure may be, by its name in any section. Every number is finite and at most LARGEST besides.
LARGEST = 1e15
ABOVE_ZERO = frozenset({"forward_s", "backward_s", "samples", "gbit_per_s", "efficiency"})
AT_LEAST_ONE = frozenset(
    {"elements", "ranks", "ranks_per_node", "links_per_node", "oversubscription", "every", "fragments"}
)  # all others: at least 0
AT_MOST: Mapping[str, int | float] = {"efficiency": 1, "ranks": 10**6}
ONE_OF: Mapping[str, tuple[object, ...]] = {"itemsize": (2, 4, 8), "all_reduce": ("ring", "tree", "best")}
RINGS = ("send_recv", "all_gather", "all_to_all")
BUCKETS = 10**6


@dataclass(frozen=True)
class Job:
    """What one rank does in a step."""

    elements: int
    ranks: int
    forward_s: float
    backward_s: float
    itemsize: int = 4
    optimizer_s: float = 0.0
    bucket_mb: float = 25.0
    overlap: bool = True
    samples: float = 1.0
    unit: str = "samples"

    @property
    def compute_s(self) -> float:
        """The seconds of a step without communication."""
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True)
class NetworkSettings:
    """The links of a set-up, in the units that people write."""

    gbit_per_s: float
    efficiency: float = 1.0
    latency_us: float = 0.0
    per_message_us: float = 0.0
    ranks_per_node: int = 1
    links_per_node: int = 1
    inside_gbit_per_s: float = 0.0
    inside_latency_us: float = 0.0
    down_gbit_per_s: float = 0.0  # 0: as upwards
    oversubscription: float = 1.0
    ranks_per_leaf: int = 0  # of a fat tree; 0: one switch
    all_reduce: str = "ring"
    rings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A scheme, and how often it runs."""

    label: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: checked by the scheme's constructor
    every: int = 1
    fragments: int = 1
    delay: int = 0


@dataclass(frozen=True)
class SetUp:
    """A set-up, and where its figures are from: `sources["job.elements"]`."""

    name: str
    title: str
    job: Job
    network: NetworkSettings
    schemes: tuple[Entry, ...]
    memory_gb_per_s: float = 0.0  # 0: passes over memory take no time
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def assumed(self) -> list[str]:
        """The figures without a published source."""
        return [key for key, source in self.sources.items() if source.startswith(ASSUMED)]


def names() -> list[str]:
    """Return the names of the set-ups that come with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def read(name: str) -> SetUp:
    """Return the set-up called `name`, or in the file of that name. Raises ValueError that says what is wrong with it."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"there is no file {name}; give a name of `sparsync simulate --list`, or write the file")
        try:
            return parse(path.read_text("utf-8"), path.stem)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {name}: {error}; it must be TOML in UTF-8") from None
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(names())}, and files FILE.toml{hint}")
    return parse(_folder().joinpath(f"{name}.toml").read_text("utf-8"), name)


def parse(text: str, name: str) -> SetUp:
    """Return the set-up in `text`. Raises ValueError for what does not belong there, is missing, cannot be or has no source."""
    try:
        content = tomllib.loads(text)
    except ValueError as error:  # of TOML, and of whole numbers with thousands of digits
        raise ValueError(f"set-up {name!r} is no TOML: {error}") from None
    known = {"title", "job", "network", "memory", "scheme", "sources"}
    for key in content:
        if key not in known:
            raise ValueError(f"set-up {name!r} has no section {key!r}; it has {', '.join(sorted(known))}")
    title, schemes = content.get("title", name), content.get("scheme", [])
    if not isinstance(title, str):
        raise ValueError(f"title of set-up {name!r} must be a text, got {title!r}")
    if not isinstance(schemes, list) or not schemes:
        raise ValueError(f"set-up {name!r} has no [[scheme]]; give at least the one to compare with")
    job = _section(Job, content.get("job", {}), f"[job] of set-up {name!r}")
    network = _section(NetworkSettings, content.get("network", {}), f"[network] of set-up {name!r}")
    memory = _section(_Memory, content.get("memory", {}), f"[memory] of set-up {name!r}")
    entries = tuple(_section(Entry, each, f"[[scheme]] of set-up {name!r}") for each in schemes)
    _check_together(job, network, entries, name)
    given = [f"{section}.{key}" for section in ("job", "network", "memory") for key in content.get(section, {})]
    given += [f"{entry.label}.{key}" for entry in entries for key in entry.settings]
    sources = _table(content.get("sources", {}), f"[sources] of set-up {name!r}")
    for key in given:
        if not isinstance(sources.get(key), str) or not sources[key].strip():
            raise ValueError(f'set-up {name!r}: [sources] must say where {key} is from, or "{ASSUMED}: why"')
    for key in sources:
        if key not in given:
            raise ValueError(
                f"set-up {name!r}: [sources] names {key}, which is not there; there are {', '.join(given)}"
            )
    return SetUp(name, title, job, network, entries, memory.gb_per_s, sources)


def check(name: str, value: int | float, what: str) -> None:
    """Raise ValueError where `value` cannot be the figure of this name, such as "ranks"; the message calls it `what`."""
    most = AT_MOST.get(name, LARGEST)
    if name in ABOVE_ZERO:
        fits, least = 0 < value <= most, "above 0"
    else:
        one = int(name in AT_LEAST_ONE)
        fits, least = one <= value <= most, f"at least {one}"
    if not fits:
        raise ValueError(f"{what} must be {least} and at most {most:,g}, got {value!r}")


@dataclass(frozen=True)
class _Memory:
    gb_per_s: float = 0.0


def _check_together(job: Job, network: NetworkSettings, entries: tuple[Entry, ...], name: str) -> None:
    """Raise ValueError where figures that could each be do not go together."""
    if job.bucket_mb and job.elements * job.itemsize > BUCKETS * job.bucket_mb * 2**20:
        raise ValueError(
            f"[job] of set-up {name!r}: bucket_mb = {job.bucket_mb:g} makes over {BUCKETS:,} buckets; raise it"
        )
    if network.ranks_per_node > 1 and not network.inside_gbit_per_s:
        raise ValueError(
            f"[network] of set-up {name!r} has {network.ranks_per_node} ranks on a node; give inside_gbit_per_s, their link"
        )
    if network.ranks_per_leaf and network.ranks_per_leaf <= network.ranks_per_node:
        raise ValueError(
            f"[network] of set-up {name!r}: ranks_per_leaf must be more than the {network.ranks_per_node} of a node, "
            f"or 0 for one switch, got {network.ranks_per_leaf}"
        )
    labels = [entry.label for entry in entries]
    for entry in entries:
        where = f"[[scheme]] {entry.label!r} of set-up {name!r}"
        if labels.count(entry.label) > 1:
            raise ValueError(f"{where} is there {labels.count(entry.label)} times; give each a label of its own")
        if entry.every == 1 and (entry.fragments > 1 or entry.delay):
            raise ValueError(f"{where}: fragments and delay are of exchanges every few steps; give every above 1")
        if entry.delay * entry.fragments > entry.every:
            between = entry.every / entry.fragments
            raise ValueError(
                f"{where}: delay must be in [0, {between:g}], the steps between two fragments, got {entry.delay}"
            )


def _section(kind: type[Section], content: object, where: str) -> Section:
    """Return the dataclass with this content, whole numbers as floats where it has floats, and lists as tuples."""
    table = _table(content, where)
    allowed = {each.name: each for each in fields(kind)}  # pyright: ignore[reportArgumentType]
    for key in table:
        if key not in allowed:
            near = difflib.get_close_matches(key, list(allowed), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{where} has no setting {key!r}; it has {', '.join(allowed)}{hint}")
    for key, each in allowed.items():
        if key not in table and each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{where} needs {key}")
    return kind(**{key: _figure(key, allowed[key].type, value, f"{where}: {key}") for key, value in table.items()})


def _table(content: object, where: str) -> dict[str, Any]:  # Any: what TOML holds
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be a table of settings, got {content!r}")
    return content


def _figure(key: str, wanted: Any, value: Any, what: str) -> Any:  # Any: what a field and TOML hold
    """Return the value as the field has it. Raises ValueError for another type, and for a value that the figure cannot have."""
    if key == "rings":
        if not isinstance(value, list) or not all(each in RINGS for each in value):
            raise ValueError(f"{what} must be a list of {', '.join(RINGS)}, got {value!r}")
        return tuple(value)
    if key == "settings":
        return _table(value, what)
    if type(value) is not wanted and not (wanted is float and type(value) is int):
        raise ValueError(f"{what} must be of type {wanted.__name__}, got {value!r}")
    if key in ONE_OF and value not in ONE_OF[key]:
        raise ValueError(f"{what} must be one of {', '.join(map(str, ONE_OF[key]))}, got {value!r}")
    if key == "label" and not str(value).strip():
        raise ValueError(f"{what} must not be empty")
    if wanted in (int, float):
        check(key, value, what)
    return wanted(value)


def _folder() -> Any:  # Any: a Traversable, whose place in the standard library differs between versions of Python
    return files("sparsync").joinpath("predict", "presets")

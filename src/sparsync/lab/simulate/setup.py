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
        return parse(path.read_text("utf-8"), path.stem)
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(names())}, and files FILE.toml{hint}")
    return parse(_folder().joinpath(f"{name}.toml").read_text("utf-8"), name)


def parse(text: str, name: str) -> SetUp:
    """Return the set-up in `text`. Raises ValueError for what does not belong there, is missing or has no source."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"set-up {name!r} is no TOML: {error}") from None
    known = {"title", "job", "network", "memory", "scheme", "sources"}
    for key in content:
        if key not in known:
            raise ValueError(f"set-up {name!r} has no section {key!r}; it has {', '.join(sorted(known))}")
    job = _section(Job, content.get("job", {}), f"[job] of set-up {name!r}")
    network = _section(NetworkSettings, content.get("network", {}), f"[network] of set-up {name!r}")
    schemes = tuple(_section(Entry, each, f"[[scheme]] of set-up {name!r}") for each in content.get("scheme", []))
    memory = content.get("memory", {})
    if set(memory) - {"gb_per_s"}:
        raise ValueError(f"[memory] of set-up {name!r} has gb_per_s, got {', '.join(memory)}")
    if not schemes:
        raise ValueError(f"set-up {name!r} has no [[scheme]]; give at least the one to compare with")
    if network.ranks_per_node > 1 and not network.inside_gbit_per_s:
        raise ValueError(
            f"[network] of set-up {name!r} has {network.ranks_per_node} ranks on a node; give inside_gbit_per_s, their link"
        )
    sources = content.get("sources", {})
    given = [f"{section}.{key}" for section in ("job", "network", "memory") for key in content.get(section, {})]
    given += [f"{entry.label}.{key}" for entry in schemes for key in entry.settings]
    for key in given:
        if not sources.get(key):
            raise ValueError(f'set-up {name!r}: [sources] must say where {key} is from, or "{ASSUMED}: why"')
    for key in sources:
        if key not in given:
            raise ValueError(
                f"set-up {name!r}: [sources] names {key}, which is not there; there are {', '.join(given)}"
            )
    return SetUp(name, content.get("title", name), job, network, schemes, float(memory.get("gb_per_s", 0.0)), sources)


def _section(kind: type[Section], content: Mapping[str, Any], where: str) -> Section:  # Any: what TOML holds
    """Return the dataclass with this content, whole numbers as floats where it has floats, and lists as tuples."""
    allowed = {each.name: each for each in fields(kind)}  # pyright: ignore[reportArgumentType]
    for key in content:
        if key not in allowed:
            near = difflib.get_close_matches(key, list(allowed), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{where} has no setting {key!r}; it has {', '.join(allowed)}{hint}")
    for key, each in allowed.items():
        if key not in content and each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{where} needs {key}")
    values = {key: _as_typed(allowed[key].type, value, f"{where}: {key}") for key, value in content.items()}
    return kind(**values)


def _as_typed(wanted: Any, value: Any, what: str) -> Any:  # Any: what a field and TOML hold
    if isinstance(value, list):
        return tuple(value)
    if wanted is float and type(value) is int:
        return float(value)
    if wanted in (int, float, str, bool) and type(value) is not wanted:
        raise ValueError(f"{what} must be of type {wanted.__name__}, got {value!r}")
    return value


def _folder() -> Any:  # Any: a Traversable, whose place in the standard library differs between versions of Python
    return files("sparsync").joinpath("predict", "presets")

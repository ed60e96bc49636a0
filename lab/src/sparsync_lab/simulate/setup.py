"""Set-ups as TOML files: a job, a network and the schemes to compare, with the source of each figure. The fields' annotations give the
allowed figures. Does not import torch.

title = "..."
[job]                           # one rank's step without communication
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
efficiency = 0.8                # share of it available to payload
latency_us = 25
ranks_per_node = 4
links_per_node = 1
inside_gbit_per_s = 100         # needed with several ranks on a node
inside_latency_us = 3
all_reduce = "best"             # "ring" | "tree" | "best"
rings = ["all_gather"]          # other exchanges that use a ring, as NCCL's
[memory]
gb_per_s = 500                  # of a rank, for passes over its gradient
[[scheme]]
label = "Ok-Topk"               # the others are compared with the first scheme
name = "exact_oktopk"           # of `sparsync schemes`; a set-up names no code
settings = { density = 0.01 }
every = 1                       # steps between exchanges of weights; then also fragments = and delay =, as in local steps
[sources]
"job.elements" = "section 5, table 2"      # the source of each figure above, or "assumed: why"
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len

from sparsync.base import registry
from sparsync.base.registry import nearest
from sparsync_lab.checked import Checked, checked
from sparsync_lab.toml import tomllib

ASSUMED = "assumed"
LARGEST = 1e15

Count = Annotated[int, Ge(1), Le(LARGEST)]
Figure = Annotated[float, Ge(0), Le(LARGEST)]
Positive = Annotated[float, Gt(0), Le(LARGEST)]
Ranks = Annotated[int, Ge(1), Le(10**5)]  # as in a plan
Ring = Literal["send_recv", "all_gather", "all_to_all"]


@dataclass(frozen=True)
class Job(Checked):
    """One rank's step without communication."""

    elements: Count
    ranks: Ranks
    forward_s: Positive
    backward_s: Positive
    itemsize: Literal[2, 4, 8] = 4
    optimizer_s: Figure = 0.0
    bucket_mb: Figure = 25.0
    overlap: bool = True
    samples: Positive = 1.0
    unit: str = "samples"

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication."""
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True)
class NetworkSettings(Checked):
    """The links of a set-up, in customary units."""

    gbit_per_s: Positive
    efficiency: Annotated[float, Gt(0), Le(1)] = 1.0
    latency_us: Figure = 0.0
    ranks_per_node: Count = 1
    links_per_node: Count = 1
    inside_gbit_per_s: Figure = 0.0
    inside_latency_us: Figure = 0.0
    all_reduce: Literal["ring", "tree", "best"] = "ring"
    rings: tuple[Ring, ...] = ()


@dataclass(frozen=True)
class Entry(Checked):
    """A scheme, and how often it exchanges."""

    label: Annotated[str, Len(1)]
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: checked by the scheme's constructor
    every: Count = 1
    fragments: Count = 1
    delay: Annotated[int, Ge(0), Le(LARGEST)] = 0


@dataclass(frozen=True)
class SetUpMemory(Checked):
    """The memory of a rank."""

    gb_per_s: Figure = 0.0  # 0: passes over memory take no time


@dataclass(frozen=True)
class SetUp(Checked):
    """A set-up, with the source of each figure: `sources["job.elements"]`."""

    title: str
    job: Job
    network: NetworkSettings
    scheme: Annotated[tuple[Entry, ...], Len(1)]
    memory: SetUpMemory = SetUpMemory()
    sources: Mapping[str, str] = field(default_factory=dict)
    name: str = ""

    @property
    def assumed(self) -> list[str]:
        """The figures without a published source."""
        return [key for key, source in self.sources.items() if source.startswith(ASSUMED)]


def names() -> list[str]:
    """List the package's set-ups."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def read(name: str) -> SetUp:
    """Read the set-up called `name`, or from the file of that name. Raises ValueError that says what is wrong with it."""
    if name.endswith(".toml"):
        path = Path(name)
        try:
            return parse(path.read_text("utf-8"), path.stem)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"cannot read {name}: {error}; give a TOML file, or a name of `sparsync simulate --list`"
            ) from None
    if name not in names():
        hint = nearest(name, names())
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(names())}, and files FILE.toml{hint}")
    return parse(_folder().joinpath(f"{name}.toml").read_text("utf-8"), name)


def parse(text: str, name: str) -> SetUp:
    """Parse a set-up. Raises ValueError for wrong or missing figures, and for those without a source."""
    where = f"set-up {name!r}: "
    try:
        content = tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}it is not TOML: {error}") from None
    found = checked(SetUp, {"title": name} | content | {"name": name}, where)
    _check_together(found, where)
    given = [f"{section}.{key}" for section in ("job", "network", "memory") for key in content.get(section, {})]
    given += [f"{entry.label}.{key}" for entry in found.scheme for key in entry.settings]
    for key in given:
        if not found.sources.get(key, "").strip():
            raise ValueError(f'{where}[sources] must say where {key} is from, or "{ASSUMED}: why"')
    for key in found.sources:
        if key not in given:
            raise ValueError(f"{where}[sources] names {key}, which is not there; there are {', '.join(given)}")
    return found


def _check_together(found: SetUp, where: str) -> None:
    """Raise ValueError if figures contradict each other."""
    network, labels = found.network, [entry.label for entry in found.scheme]
    if network.ranks_per_node > 1 and not network.inside_gbit_per_s:
        raise ValueError(
            f"{where}network has {network.ranks_per_node} ranks on a node; give inside_gbit_per_s, their link"
        )
    for entry in found.scheme:
        own = f"{where}[[scheme]] {entry.label!r}"
        registry.check_names_no_code(entry.name, own)
        if labels.count(entry.label) > 1:
            raise ValueError(f"{own} is there {labels.count(entry.label)} times; give each another label")
        if entry.every == 1 and (entry.fragments > 1 or entry.delay):
            raise ValueError(f"{own}: fragments and delay need exchanges every few steps; give every above 1")
        if entry.delay * entry.fragments > entry.every:
            between = entry.every / entry.fragments
            raise ValueError(
                f"{own}: delay must be in [0, {between:g}], the steps between fragments, got {entry.delay}"
            )


def _folder() -> Any:  # Any: a Traversable, whose module depends on the version of Python
    return files("sparsync_lab").joinpath("simulate/presets")

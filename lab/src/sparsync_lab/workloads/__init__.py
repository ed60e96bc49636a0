"""Find the lab's training jobs by name, module or file. Importing this loads neither torch nor data, so listing names is fast."""

import inspect
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsync.base.registry import installed, locate, nearest
from sparsync_lab.workloads.job_errors import naming

if TYPE_CHECKING:
    from sparsync_lab.workloads.base import Workload

Option = int | float | str | bool


@dataclass(frozen=True)
class WorkloadEntry:
    """A workload of the lab: its class as "module:Class", a one-line summary, and options that override the class's defaults."""

    spec: str
    summary: str
    options: Mapping[str, Option] = field(default_factory=dict)


WORKLOADS: dict[str, WorkloadEntry] = {
    "shakespeare": WorkloadEntry(
        "sparsync_lab.workloads.shakespeare:Shakespeare",
        "word-level LSTM language model on Shakespeare's works, 5.66 M parameters, perplexity",
    ),
    "shakespeare-small": WorkloadEntry(
        "sparsync_lab.workloads.shakespeare:Shakespeare",
        "the same with 2,000 words and width 192, 1.07 M parameters: minutes on two cores",
        {"vocabulary": 2_000, "width": 192},
    ),
    "gpt": WorkloadEntry(
        "sparsync_lab.workloads.gpt:Gpt",
        "character-level transformer on Shakespeare's works, 1.01 M parameters, AdamW, perplexity",
    ),
    "gpt-tiny": WorkloadEntry(
        "sparsync_lab.workloads.gpt:Gpt",
        "the same with width 64, 2 layers and context 32, 0.11 M parameters: seconds",
        {"width": 64, "layers": 2, "context": 32},
    ),
    "gpt-muon": WorkloadEntry(
        "sparsync_lab.workloads.gpt:Gpt",
        "gpt with Muon for the matrices of its blocks and AdamW for the rest",
        {"optimizer_name": "muon"},
    ),
    "gpt-muon-tiny": WorkloadEntry(
        "sparsync_lab.workloads.gpt:Gpt",
        "gpt-tiny with Muon for the matrices of its blocks and AdamW for the rest: a minute",
        {"optimizer_name": "muon", "width": 64, "layers": 2, "context": 32},
    ),
    "words": WorkloadEntry(
        "sparsync_lab.workloads.gpt:Words",
        "word-level transformer on Shakespeare's works, 0.37 M parameters, most of them in its embedding: a minute",
    ),
    "code": WorkloadEntry(
        "sparsync_lab.workloads.byte_level:Code",
        "byte-level transformer on the C source of Linux, 1.03 M parameters, AdamW, bits per byte",
    ),
    "code-10m": WorkloadEntry(
        "sparsync_lab.workloads.byte_level:Code",
        "code with width 384, 6 layers and context 128, 10.8 M parameters: a second a step on one core",
        {"width": 384, "layers": 6, "heads": 6, "context": 128, "batch_size": 8, "windows": 256, "learning_rate": 7e-4},
    ),
    "bible": WorkloadEntry(
        "sparsync_lab.workloads.bible:Bible",
        "held out: word-level model in the form of Llama on a Bible in modern English, 1.10 M parameters, AdamW, perplexity",
    ),
    "bible-10m": WorkloadEntry(
        "sparsync_lab.workloads.bible:Bible",
        "the same with 8,000 words, width 288 and 6 layers, 10.6 M parameters",
        {"vocabulary": 8_000, "width": 288, "layers": 6, "heads": 6, "learning_rate": 1e-3},
    ),
    "sympy": WorkloadEntry(
        "sparsync_lab.workloads.python_source:PythonSource",
        "held out: byte-level gated convolutions on the Python source of SymPy, 0.95 M parameters, AdamW, bits per byte",
    ),
    "sympy-10m": WorkloadEntry(
        "sparsync_lab.workloads.python_source:PythonSource",
        "the same with width 384, 10 layers and context 128, 10.4 M parameters",
        {"width": 384, "layers": 10, "context": 128, "batch_size": 8, "learning_rate": 7e-4},
    ),
    "sympy-110m": WorkloadEntry(
        "sparsync_lab.workloads.python_source:PythonSource",
        "the same with width 1024, 15 layers and context 1024, 110 M parameters, 16,384 bytes a step: for a GPU",
        {"width": 1024, "layers": 15, "context": 1024, "batch_size": 16, "windows": 64, "learning_rate": 4e-4},
    ),
    "movielens": WorkloadEntry(
        "sparsync_lab.workloads.movielens:MovieLens",
        "recommender NeuMF on MovieLens-100K, 1.52 M parameters, hit rate at 10",
    ),
    "movielens-small": WorkloadEntry(
        "sparsync_lab.workloads.movielens:MovieLens",
        "the same with width 32, 0.17 M parameters: seconds",
        {"width": 32, "learning_rate": 2e-3},
    ),
}


def summaries() -> dict[str, str]:
    """Summarise each workload in a line, by name: the lab's, then those of installed packages."""
    others = {name: f"installed, {spec}" for name, spec in installed("workload").items() if name not in WORKLOADS}
    return {name: entry.summary for name, entry in WORKLOADS.items()} | others


MAY_BE_ZERO = ("weight_decay", "momentum", "warmup")  # options of the lab's jobs; other numbers are above 0


def get(name: str, **options: Option) -> "Workload":
    """Make a workload with `options` in place of its defaults; the lab's jobs touch no data before their `prepare`.

    `name` is one of `summaries`, "package.module:Class" or "path/to/file.py:Class". An option given as text is converted to the type
    of its default. Raises ValueError for an unknown name or option, with the nearest known one, for a value that the workload
    refuses, and for a class that lacks a method. A class that is no subclass of `Workload` needs `model`, `batch` and `loss`, and is
    wrapped: see `sparsync_lab.workloads.plain`.
    """
    known = summaries()
    if not (":" in name or name.endswith(".py") or name in known):
        raise ValueError(
            f"unknown workload {name!r}; there are {', '.join(known)}, and others are given as package.module:Class or "
            f"path/to/file.py:Class{nearest(name, known)}"
        )
    entry = WORKLOADS.get(name)
    kind = locate(entry.spec if entry else name, "workload")
    plain = import_module("sparsync_lab.workloads.plain")
    base = import_module("sparsync_lab.workloads.base")
    is_workload = inspect.isclass(kind) and issubclass(kind, base.Workload)
    if not is_workload:
        plain.check_class(kind, name)
    defaults = _defaults(kind)
    for option in options:
        if option not in defaults:
            has = ", ".join(defaults) or "none"
            raise ValueError(f"workload {name!r} has no option {option!r}; it has {has}{nearest(option, defaults)}")
    given = {option: _converted(option, value, defaults[option]) for option, value in options.items()}
    for option, value in given.items() if entry else ():
        least = 0 if option in MAY_BE_ZERO else math.nextafter(0, 1)
        if isinstance(value, int | float) and not value >= least:
            raise ValueError(f"{option} must be {'0 or above' if least == 0 else 'above 0'}, got {value}")
    made = _made(kind, name, {**(entry.options if entry else {}), **given})
    return made if is_workload else plain.adapted(made, name)


def write_new(path: Path) -> str:
    """Write the template job `MyJob` to a new file, and return the command that compares schemes on it.

    Raises ValueError if the file exists or its name does not end in .py, and RuntimeError if writing fails.
    """
    if path.suffix != ".py":
        raise ValueError(f"--new takes the name of a file that ends in .py, got {path}")
    text = Path(__file__).with_name("starting_point.py").read_text("utf-8")
    text = text.replace("my_job.py:MyJob", shlex.quote(f"{path}:MyJob"))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"{path} exists and is not overwritten; give another name, or move it") from None
    except OSError as error:
        raise RuntimeError(
            f"cannot write {path}: {error}; choose a folder that exists and can be written to"
        ) from error
    _, _, rest = text.partition("\nRun: ")
    return rest[: rest.index("\nIt ")]


def _made(kind: type, name: str, options: Mapping[str, Option]) -> Any:  # Any: an object of that class
    with naming(kind, "__init__"):
        try:
            return kind(**options)
        except (TypeError, ValueError) as error:
            refused = error
    if isinstance(refused, ValueError):
        raise refused
    raise ValueError(
        f"workload {name!r} cannot be made: {refused}; give its options by --option KEY=VALUE"
    ) from refused


def _defaults(kind: Callable[..., object]) -> dict[str, Any]:  # Any: defaults of any type
    return {
        name: parameter.default
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _converted(option: str, value: Option, default: Any) -> Any:  # Any: the type of the default
    """Convert text to the type of `default`, and whole numbers to floats; other values must have its type."""
    kind = type(default)
    if kind not in (int, float, str, bool):  # no default, or one that does not reveal the type
        return value
    if kind is bool and value in ("true", "false"):
        return value == "true"
    if kind is not bool and (isinstance(value, str) or (kind is float and type(value) is int)):
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"option {option} takes {kind.__name__}, such as {default!r}, got {value!r}") from None
    if type(value) is not kind:
        raise ValueError(f"option {option} takes {kind.__name__}, such as {default!r}, got {value!r}")
    return value

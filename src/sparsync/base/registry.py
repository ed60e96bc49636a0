"""Schemes by name: ours, those of installed packages, and any class or constructor that can be imported or loaded from a file.

An installed package gives its schemes as entry points of the group "sparsync.schemes". `locate` finds any class by such a name, its module
or its file; third parties add workloads this way too. Nothing here imports torch before a scheme is looked at.
"""

import ast
import difflib
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsync.base.scheme import Scheme

_OURS = {  # name -> where its constructor lives
    "dense": "sparsync.schemes.dense:Dense",
    "bf16": "sparsync.schemes.dense:Dense.bf16",
    "topk": "sparsync.schemes.topk_allgather:TopK",
    "two_shot": "sparsync.schemes.two_shot:TwoShot",
    "in_turn": "sparsync.schemes.in_turn:InTurn",
    "skip_reduce": "sparsync.schemes.skip_reduce:SkipReduce",
    "auto_protect": "sparsync.schemes.auto_protect:AutoProtect.skip_reduce",
    "exact_micro": "sparsync.schemes.exact_micro:ExactMiCRO",
    "exact_exdyna": "sparsync.schemes.exact_exdyna:ExactExDyna",
    "exact_oktopk": "sparsync.schemes.exact_oktopk:ExactOkTopk",
    "micro": "sparsync.schemes.micro:MiCRO",
    "exdyna": "sparsync.schemes.exdyna:ExDyna",
    "oktopk": "sparsync.schemes.oktopk:OkTopk",
    "quantized": "sparsync.schemes.quantized:Quantized",
    "int4": "sparsync.schemes.quantized:Quantized.int4",
    "ring_pruning": "sparsync.schemes.skip_reduce:SkipReduce.ring_pruning",
}


def names() -> list[str]:
    """Return the names of our schemes, then those that installed packages bring."""
    return [*_OURS, *(name for name in installed("scheme") if name not in _OURS)]


def describe(name: str) -> str:
    """Return the first line of the docstring of the scheme called `name`, which is not executed. Raises ValueError for an unknown name."""
    return summary(where(name))


def where(name: str) -> str:
    """Return the "package.module:Class" or "path/to/file.py:Class" of a scheme that `get` takes. Raises ValueError for an unknown name."""
    if _names_code(name):
        return name
    return _OURS[name] if name in _OURS else installed("scheme")[_known(name)]


def settings(name: str) -> dict[str, Any]:  # Any: whatever a setting defaults to
    """Return the settings `get(name, ...)` takes, with their defaults."""
    return {key: parameter.default for key, parameter in inspect.signature(_constructor(name)).parameters.items()}


def get(name: str, **config: Any) -> "Scheme":  # Any: the settings of the scheme, checked by its constructor
    """Return a new scheme, e.g. `get("topk", density=0.01)`.

    `name` is one of `names()`, "package.module:Class" or "path/to/file.py:Class", whose module or file is executed. Raises ValueError for
    an unknown name or setting, and for anything but the class or constructor of a Scheme, which is not called.
    """
    check_settings(name, config)
    from sparsync.base.scheme import Scheme

    scheme = _constructor(name)(**config)
    if not isinstance(scheme, Scheme):
        raise TypeError(f"{name} makes a {type(scheme).__name__}, which is no sparsync.Scheme; return one")
    return scheme


def check_names_no_code(name: str, where: str) -> None:
    """Raise ValueError for a name that would execute a module or a file, for names that do not come from the user's own command line.

    Installed packages are left: their metadata, not the name, says what is imported. `where` says in the error where the name stands.
    """
    if _names_code(name):
        refused = f"{where} takes names of `sparsync schemes` only, got {name!r}: it must not say which code runs"
        cure = (
            'give the class on the command line or in Python, or install it with an entry point of "sparsync.schemes"'
        )
        raise ValueError(_no_class(name, ValueError(f"{refused}; {cure}")))


def check_settings(name: str, keys: Iterable[str]) -> None:
    """Raise ValueError for an unknown scheme, and for a key that is none of its settings."""
    known = list(settings(name))
    for key in keys:
        if key not in known:
            raise ValueError(
                f"scheme {name!r} has no setting {key!r}; it has {', '.join(known) or 'none'}{nearest(key, known)}"
            )


def without_value(key: str, text: str) -> str:
    """Return the message for a setting that has no value in the text of a scheme."""
    return f"the setting {key!r} has no value in {text!r}; write {key}=VALUE, or leave it out"


def _constructor(name: str) -> Callable[..., Any]:  # Any: a Scheme, if it is one
    if _names_code(name):
        try:
            return _checked(locate(name, "scheme"), name)
        except ValueError as error:
            raise ValueError(_no_class(name, error)) from error.__cause__
    return _checked(locate(where(name), "scheme"), name)


def _names_code(name: str) -> bool:
    """Return whether `name` is that of a class in a module or a file, which is executed to look it up."""
    return ":" in name or name.endswith(".py")


def _checked(found: Any, name: str) -> Callable[..., Any]:  # Any: what a module has under a name
    """Return `found` if it is a Scheme's class or a constructor that is a class method of one; nothing else may be called."""
    from sparsync.base.scheme import Scheme

    owner = getattr(found, "__self__", found)
    if not (isinstance(owner, type) and issubclass(owner, Scheme)):
        raise ValueError(f"{name!r} is {found!r}, which is no sparsync.Scheme; name a class that subclasses it")
    return found


def _no_class(text: str, error: ValueError) -> str:
    """Return the message for a text in which `error` found no class: for "topk:density", that a setting has no value."""
    name, _, rest = text.partition(":")
    if name not in names():
        return str(error)
    if (key := rest.partition(":")[0]) in settings(name):
        return without_value(key, text)
    return f"settings of the scheme {name!r} are written {name}:KEY=VALUE, got {text!r}; as a class: {error}"


def _known(name: str) -> str:
    known = names()
    if name not in known:
        raise ValueError(
            f"unknown scheme {name!r}; there are {', '.join(known)}, and others are given as package.module:Class or "
            f"path/to/file.py:Class{nearest(name, known)}"
        )
    return name


def locate(spec: str, kind: str) -> Any:  # Any: the class, or one of its constructors
    """Return the class that `spec` names: "package.module:Class", "path/to/file.py:Class", or the name of an installed entry point.

    `kind` is what is looked for, such as "scheme": it stands in messages, and entry points are those of the group "sparsync.schemes".
    Behind the colon a dotted name may stand, such as "Class.bf16". A file is executed once in a process. Raises ValueError
    when there is none or when its module fails to import.
    """
    where, colon, name = spec.rpartition(":")
    if not colon and spec.endswith(".py"):
        classes = _classes(_file_module(spec, kind))
        raise ValueError(
            f"{kind} {spec!r} is a file, and one of its classes is needed; write {spec}:CLASS; classes defined there are: {classes}"
        )
    if not colon:
        where, name = _entry_point(spec, kind)
    if not where or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"a {kind} is given by its name, as package.module:Class or as path/to/file.py:Class, got {spec!r}"
        )
    found: Any = _file_module(where, kind) if where.endswith(".py") else _module(where, kind)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{kind} {spec!r}: {where} has no {name!r}; classes defined there are: {_classes(found)}")
        found = getattr(found, part)
    return found


def installed(kind: str) -> dict[str, str]:
    """Return the "package.module:Class" of each installed entry point of the group "sparsync.<kind>s" by its name, sorted by name.

    Nothing is imported. The packages are looked through once for each `sys.path`, which takes milliseconds. Raises ValueError when two
    packages give the same name to different classes.
    """
    found: dict[str, str] = {}
    for point in _points(f"sparsync.{kind}s", tuple(sys.path)):
        if found.setdefault(point.name, point.value) != point.value:
            raise ValueError(
                f"two installed packages have a {kind} {point.name!r}: {found[point.name]} and {point.value}; "
                f"give one of these instead of the name, or uninstall one package"
            )
    return found


@lru_cache(maxsize=8)
def _points(group: str, path: tuple[str, ...]) -> list[EntryPoint]:
    """Return the entry points of a group that are found on `path`, which is `sys.path`, sorted by name."""
    return sorted(entry_points(group=group), key=lambda point: point.name)


def summary(spec: str) -> str:
    """Return the first line of the docstring of "package.module:Class", read from its source; `spec` where that has none.

    Only the packages above the module are imported, so that listing what is installed is quick.
    """
    where, _, name = spec.partition("[")[0].partition(":")
    try:
        found = find_spec(where.strip())
        node: Any = ast.parse(Path(str(found and found.origin)).read_text(encoding="utf-8"))
        for part in name.strip().split("."):
            node = next(each for each in node.body if getattr(each, "name", None) == part)
        text = ast.get_docstring(node)
    except Exception:  # whatever is wrong with the package is told when it is asked for
        return spec
    return text.partition("\n")[0].removesuffix(".") if text else spec


def _entry_point(name: str, kind: str) -> tuple[str, str]:
    known = installed(kind)
    if name not in known:
        raise ValueError(
            f"unknown {kind} {name!r}; installed packages have: {', '.join(known) or 'none'}; "
            "others are given as package.module:Class or as path/to/file.py:Class"
        )
    where, _, attribute = known[name].partition(":")
    return where.strip(), attribute.partition("[")[0].strip()


def _module(name: str, kind: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name != missing and not name.startswith(f"{missing}."):
            raise ValueError(_failed(name, kind, error)) from error
        raise ValueError(
            f"no module {missing!r} for the {kind} in {name}; install its package, set PYTHONPATH, or give path/to/file.py:Class"
        ) from None
    except (Exception, SystemExit) as error:
        raise ValueError(_failed(name, kind, error)) from error


def _file_module(where: str, kind: str) -> ModuleType:
    try:
        path = Path(where).expanduser().resolve()
        found = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # names that no file can have, and ~ of nobody
        raise ValueError(f"no file {where!r} for the {kind}: {error}") from error
    if not found:
        raise ValueError(f"no file {where} for the {kind}, looked for {path}; check the path")
    # Without dots, and the same in every process, so that objects of its classes can be pickled.
    name = f"{path.stem.replace('.', '_')}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # there are both for a file that ends in .py
    module = sys.modules[name] = module_from_spec(spec)  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(_failed(where, kind, error)) from error
    return module


def _failed(where: str, kind: str, error: BaseException) -> str:
    line = error.__traceback__
    while line is not None and line.tb_next is not None:
        line = line.tb_next
    at = (
        f" ({line.tb_frame.f_code.co_filename}, line {line.tb_lineno})"
        if line is not None and not isinstance(error, SyntaxError)
        else ""
    )
    return f"{where} fails when it is imported for a {kind}: {type(error).__name__}: {error}{at}"


def _classes(owner: object) -> str:
    """Return the names of the classes that `owner` itself defines."""
    home, members = getattr(owner, "__name__", None), getattr(owner, "__dict__", {})
    found = [key for key, value in members.items() if isinstance(value, type) and value.__module__ == home]
    return ", ".join(sorted(found)) or "none"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known word closest to `word`; empty when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

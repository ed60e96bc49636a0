"""Schemes by name: built-in ones, entry points of installed packages, and classes from any module or file.

An installed package registers its schemes as entry points of the group "sparsync.schemes". `locate` resolves such a name, a module or a
file to a class; third parties add workloads this way too. This module does not import torch before it loads a scheme.
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
    """List the names of the built-in schemes, then those of installed packages."""
    return [*_OURS, *(name for name in installed("scheme") if name not in _OURS)]


def describe(name: str) -> str:
    """Summarise the scheme `name` by the first line of its docstring, without executing it. Raises ValueError for an unknown name."""
    return summary(where(name))


def where(name: str) -> str:
    """Resolve the name of a scheme to "package.module:Class" or "path/to/file.py:Class". Raises ValueError for an unknown name."""
    if _names_code(name):
        return name
    return _OURS[name] if name in _OURS else installed("scheme")[_known(name)]


def settings(name: str) -> dict[str, Any]:  # Any: whatever a setting defaults to
    """Return the settings of `get(name, ...)` with their defaults."""
    return {key: parameter.default for key, parameter in inspect.signature(_constructor(name)).parameters.items()}


def get(name: str, **config: Any) -> "Scheme":  # Any: the settings of the scheme, checked by its constructor
    """Create a scheme, e.g. `get("topk", density=0.01)`.

    `name` is one of `names()`, "package.module:Class" or "path/to/file.py:Class"; the module or file is executed. Raises ValueError for
    an unknown name or setting, and for anything but the class or constructor of a Scheme, without calling it.
    """
    check_settings(name, config)
    from sparsync.base.scheme import Scheme

    scheme = _constructor(name)(**config)
    if not isinstance(scheme, Scheme):
        raise TypeError(f"{name} makes a {type(scheme).__name__}, not a sparsync.Scheme; return one")
    return scheme


def check_names_no_code(name: str, where: str) -> None:
    """Raise ValueError for a name that would execute a module or a file. Use it on names from outside the user's command line.

    Names from installed packages pass: their metadata, not the name, says what is imported. `where` tells the error where the name stands.
    """
    if _names_code(name):
        refused = f"{where} takes names of `sparsync schemes` only, got {name!r}: it must not say which code runs"
        fix = 'give the class on the command line or in Python, or install it with an entry point of "sparsync.schemes"'
        raise ValueError(_no_class(name, ValueError(f"{refused}; {fix}")))


def check_settings(name: str, keys: Iterable[str]) -> None:
    """Raise ValueError for an unknown scheme or an unknown setting."""
    known = list(settings(name))
    for key in keys:
        if key not in known:
            raise ValueError(
                f"scheme {name!r} has no setting {key!r}; it has {', '.join(known) or 'none'}{nearest(key, known)}"
            )


def without_value(key: str, text: str) -> str:
    """Word the error for a setting without a value in the text of a scheme."""
    return f"the setting {key!r} has no value in {text!r}; write {key}=VALUE, or leave it out"


def _constructor(name: str) -> Callable[..., Any]:  # Any: a Scheme, if it is one
    if _names_code(name):
        try:
            return _checked(locate(name, "scheme"), name)
        except ValueError as error:
            raise ValueError(_no_class(name, error)) from error.__cause__
    return _checked(locate(where(name), "scheme"), name)


def _names_code(name: str) -> bool:
    """Return whether `name` refers to a module or a file, which is executed to look it up."""
    return ":" in name or name.endswith(".py")


def _checked(constructor: Any, name: str) -> Callable[..., Any]:  # Any: any attribute of a module
    """Return `constructor` if it is a Scheme class or a class method of one. Raises ValueError otherwise."""
    from sparsync.base.scheme import Scheme

    owner = getattr(constructor, "__self__", constructor)
    if not (isinstance(owner, type) and issubclass(owner, Scheme)):
        raise ValueError(f"{name!r} is {constructor!r}, not a sparsync.Scheme; name a class that subclasses it")
    return constructor


def _no_class(text: str, error: ValueError) -> str:
    """Word the error for a text that names no class; for "topk:density" it says that the setting has no value."""
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
            f"unknown scheme {name!r}; known are {', '.join(known)}; give others as package.module:Class or "
            f"path/to/file.py:Class{nearest(name, known)}"
        )
    return name


def locate(spec: str, kind: str) -> Any:  # Any: the class, or one of its constructors
    """Resolve `spec` to a class: "package.module:Class", "path/to/file.py:Class", or the name of an installed entry point.

    `kind`, such as "scheme", stands in messages and selects the group of entry points, "sparsync.schemes".
    The name after the colon may be dotted, such as "Class.bf16". A file is executed once per process. Raises ValueError
    if the class does not exist or its module fails to import.
    """
    where, colon, name = spec.rpartition(":")
    if not colon and spec.endswith(".py"):
        classes = _classes(_file_module(spec, kind))
        raise ValueError(
            f"{kind} {spec!r} is a file; name one of its classes as {spec}:CLASS; classes defined there are: {classes}"
        )
    if not colon:
        where, name = _entry_point(spec, kind)
    if not where or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"a {kind} is given by its name, as package.module:Class or as path/to/file.py:Class, got {spec!r}"
        )
    target: Any = _file_module(where, kind) if where.endswith(".py") else _module(where, kind)
    for part in name.split("."):
        if not hasattr(target, part):
            raise ValueError(f"{kind} {spec!r}: {where} has no {name!r}; classes defined there are: {_classes(target)}")
        target = getattr(target, part)
    return target


def installed(kind: str) -> dict[str, str]:
    """Map the names of the installed entry points of the group "sparsync.<kind>s" to "package.module:Class", sorted by name.

    Imports nothing, and scans the packages once per `sys.path`, which takes milliseconds. Raises ValueError when two
    packages give the same name to different classes.
    """
    classes: dict[str, str] = {}
    for point in _points(f"sparsync.{kind}s", tuple(sys.path)):
        if classes.setdefault(point.name, point.value) != point.value:
            raise ValueError(
                f"two installed packages have a {kind} {point.name!r}: {classes[point.name]} and {point.value}; "
                f"give one of these instead of the name, or uninstall one package"
            )
    return classes


@lru_cache(maxsize=8)
def _points(group: str, path: tuple[str, ...]) -> list[EntryPoint]:
    """Return the entry points of a group, sorted by name. `path` is `sys.path`, the key of the cache."""
    return sorted(entry_points(group=group), key=lambda point: point.name)


def summary(spec: str) -> str:
    """Read the first line of the docstring of "package.module:Class" from its source; return `spec` if there is none.

    Imports only the packages above the module, so that listing is quick.
    """
    where, _, name = spec.partition("[")[0].partition(":")
    try:
        module = find_spec(where.strip())
        node: Any = ast.parse(Path(str(module and module.origin)).read_text(encoding="utf-8"))
        for part in name.strip().split("."):
            node = next(child for child in node.body if getattr(child, "name", None) == part)
        text = ast.get_docstring(node)
    except Exception:  # `get` reports a broken package
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
        exists = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a name that no file can have, or ~ of an unknown user
        raise ValueError(f"no file {where!r} for the {kind}: {error}") from error
    if not exists:
        raise ValueError(f"no file {where} for the {kind}, looked for {path}; check the path")
    # Without dots, and the same in every process, so that objects of its classes can be pickled.
    name = f"{path.stem.replace('.', '_')}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # both exist for a file that ends in .py
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
    """List the classes that `owner` itself defines."""
    home, members = getattr(owner, "__name__", None), getattr(owner, "__dict__", {})
    classes = [key for key, value in members.items() if isinstance(value, type) and value.__module__ == home]
    return ", ".join(sorted(classes)) or "none"


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest the known word closest to `word`, as "; did you mean ...?"; empty if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

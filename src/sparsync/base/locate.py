"""Find a class by its name in an installed package, by its module, or by its file; third parties add schemes and workloads this way.

Needs the standard library alone, so that listing names is quick. What the class must look like is checked by the caller.
"""

import hashlib
import sys
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


def locate(spec: str, kind: str) -> Any:  # Any: the class, or one of its constructors
    """Return what `spec` names: "package.module:Class", "path/to/file.py:Class", or the name of an installed entry point.

    `kind` is what is looked for, such as "scheme": it stands in messages, and entry points are those of the group "sparsync.schemes".
    Behind the colon a dotted name may stand, such as "Class.published". A file is executed once in a process. Raises ValueError
    when there is no such thing or when its module fails to import.
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

    Nothing is imported. Raises ValueError when two packages give the same name to different classes.
    """
    found: dict[str, str] = {}
    for point in sorted(entry_points(group=f"sparsync.{kind}s"), key=lambda point: point.name):
        if found.setdefault(point.name, point.value) != point.value:
            raise ValueError(
                f"two installed packages have a {kind} {point.name!r}: {found[point.name]} and {point.value}; "
                f"give one of these instead of the name, or uninstall one package"
            )
    return found


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
    path = Path(where).expanduser().resolve()
    if not path.is_file():
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
    return ", ".join(sorted(key for key, value in vars(owner).items() if _is_own_class(value, owner))) or "none"


def _is_own_class(value: object, owner: object) -> bool:
    return isinstance(value, type) and value.__module__ == getattr(owner, "__name__", None)

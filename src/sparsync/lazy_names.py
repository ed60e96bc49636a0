"""Public names of a package that are loaded when they are first used; its `__init__.pyi` is the one list of them.

Type checkers read the stub too.
"""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

_LINE = re.compile(r"^from (\S+) import (\w+) as \w+$", re.MULTILINE)


def lazy_names(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package from the stub beside its `__init__.py`, which is `file`.

    The stub has a line for each name, such as `from sparsync.schemes.dense import Dense as Dense`. A name may be a module.
    """
    stub = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    home = {name: module for module, name in _LINE.findall(stub)}

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(home))}")
        found = vars(import_module(home[name]))
        return found[name] if name in found else import_module(f"{home[name]}.{name}")

    return load, lambda: sorted(home), list(home)

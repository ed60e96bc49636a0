"""Sphinx makes the pages and the API reference with this: `make docs`. It needs no network."""

import inspect
import re
from dataclasses import fields, is_dataclass

import sparsync

project = "sparsync"
release = version = sparsync.__version__
copyright = "the authors of sparsync, Apache-2.0"

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_parser"]
html_theme = "furo"
html_title = f"sparsync {version}"
html_copy_source = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Links that lead out of docs/ are for readers of the repository; tests/test_docs.py checks them.
suppress_warnings = ["myst.xref_missing"]

autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
default_role = "literal"

_LIST_ITEM = re.compile(r"\s*(-|\d+\.) ")
_COLUMNS = re.compile(r"\S {3,}\S")


def setup(app: object) -> None:
    """Register what docstrings pass through; Sphinx calls it."""
    app.connect("autodoc-process-docstring", _as_restructured_text)  # pyright: ignore[reportAttributeAccessIssue]


def _as_restructured_text(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Rewrite a docstring, which is plain text with `names` in backquotes, lists, columns and indented code, in place."""
    text: list[str] = []
    for paragraph in "\n".join(lines).split("\n\n"):
        if paragraph.startswith("    "):
            text += ["::", "", *paragraph.splitlines(), ""]
        elif _COLUMNS.search(paragraph):
            text += ["::", "", *(f"    {line}" for line in paragraph.splitlines()), ""]
        else:
            text += [*_lists_apart(paragraph.splitlines()), ""]
    if inspect.isclass(obj) and is_dataclass(obj):
        text += [f":param {field}: {_outside_of_names(comment)}" for field, comment in _comments(obj).items()]
    lines[:] = text


def _lists_apart(paragraph: list[str]) -> list[str]:
    """Return the lines with an empty one where a list begins and where it ends."""
    text: list[str] = []
    for line in paragraph:
        before = text[-1] if text else ""
        in_list = bool(_LIST_ITEM.match(before) or before.startswith("  "))
        if before and in_list != bool(_LIST_ITEM.match(line) or line.startswith("  ")):
            text.append("")
        text.append(_outside_of_names(line))
    return text


def _outside_of_names(line: str) -> str:
    """Escape what reStructuredText would take for its own outside of backquotes."""
    parts = line.split("`")
    return "`".join(part if i % 2 else re.sub(r"([*|\\_])", r"\\\1", part) for i, part in enumerate(parts))


def _comments(dataclass: type) -> dict[str, str]:
    """Return the comment on or above the line of each field of a dataclass and of those it inherits."""
    found: dict[str, str] = {}
    for kind in reversed([each for each in dataclass.__mro__ if is_dataclass(each)]):
        above: list[str] = []
        for line in inspect.getsource(kind).splitlines():
            if line.startswith("    # "):
                above.append(line.removeprefix("    # "))
                continue
            if match := re.match(r"    (\w+): [^#]*(?:  # (.*))?$", line):
                comment = " ".join([*above, match[2] or ""]).strip()
                if comment:
                    found[match[1]] = comment
            above = []
    public = {field.name for field in fields(dataclass) if field.init and not field.name.startswith("_")}
    return {name: comment for name, comment in found.items() if name in public}

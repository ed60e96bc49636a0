"""Files of typed records: pydantic checks what TOML or JSON holds against the annotations of a dataclass. Here is how its errors read."""

import json
import reprlib
import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sparsync.base.registry import nearest

Made = TypeVar("Made")
_ALLOWED = {  # by pydantic's type of error
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "dict_type": "a table",
    "dataclass_type": "a table",
    "literal_error": "{expected}",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:,g}",
    "too_short": "at least {min_length} of them",
    "string_too_short": "at least {min_length} letter long",
}


class Checked:
    """Base of dataclasses that are read from files: no other types than the annotated ones, no unknown names, only finite numbers."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def checked(kind: "type[Made] | Any", content: object, where: str = "") -> Made:
    """Return the `kind` that `content` describes, values as JSON and TOML have them. `where` stands before the names in errors.

    Raises ValueError that names the place, what stands there and what may.
    """
    try:
        text = json.dumps(content, default=_no_text)
    except (ValueError, RecursionError) as error:  # of a number with thousands of digits, and of endless nesting
        raise ValueError(f"{where.rstrip(':. ') or 'the file'} cannot be read: {error}") from None
    try:
        return _adapter(kind).validate_json(text)
    except ValidationError as error:
        # A wrong name comes first: what is missing is often what was meant.
        first = min(error.errors(), key=lambda each: each["type"] != "unexpected_keyword_argument")
    *outer, last = first["loc"] or ("",)
    place, around = (f"{where}{_path(loc)}".rstrip(":. ") or "the file" for loc in (first["loc"], outer))
    match first["type"]:
        case "json_invalid":
            raise ValueError(f"{where.rstrip(':. ') or 'the file'} is nested too deeply")
        case "missing":
            raise ValueError(f"{around} needs {last}")
        case "unexpected_keyword_argument":
            known = [each.name for each in fields(_kind_at(kind, outer))]
            raise ValueError(f"{around} has no {last!r}; it has {', '.join(known)}{nearest(str(last), known)}")
        case "value_error":
            raise first.get("ctx", {})["error"]
        case name:
            allowed = _ALLOWED.get(name, first["msg"]).format(**first.get("ctx", {}))
            raise ValueError(f"{place} must be {allowed}, got {reprlib.repr(first['input'])}")


def _no_text(value: object) -> dict[str, str]:
    """Return what stands for a value that JSON has not, such as a date: nothing that a text or a number is."""
    return {type(value).__name__: str(value)}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # Any: whatever can be annotated
    return TypeAdapter(kind, config=None if is_dataclass(kind) else Checked.__pydantic_config__)


def _path(loc: Sequence[int | str]) -> str:
    """Return a place as a person writes it: backward.bucket[0].elements."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in loc).removeprefix(".")


def _kind_at(kind: Any, loc: Sequence[int | str]) -> Any:  # Any: a dataclass
    """Return the dataclass at a place inside of another one."""
    for each in loc:
        if isinstance(each, str):
            kind = next(field.type for field in fields(kind) if field.name == each)
        while inner := get_args(kind):  # of X | None, tuple[X, ...] and Annotated[X, ...]
            kind = next(part for part in inner if part is not types.NoneType)
    return kind

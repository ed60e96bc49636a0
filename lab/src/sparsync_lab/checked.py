"""Typed records read from TOML or JSON: pydantic checks the content against a dataclass's annotations."""

import json
import reprlib
from dataclasses import is_dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

Made = TypeVar("Made")


class Checked:
    """Base of dataclasses read from files: exact types, no unknown fields, only finite numbers."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def checked(kind: "type[Made] | Any", content: object, where: str = "") -> Made:
    """Convert `content`, as JSON or TOML gives it, to a `kind`. `where` precedes the field names in errors.

    Raises ValueError that names the field, the problem and the value.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(content, default=str))
    except ValidationError as error:
        # Report an unknown name first: it often explains a missing one.
        first = min(error.errors(), key=lambda each: each["type"] != "unexpected_keyword_argument")
    if first["type"] == "value_error":  # of the dataclass itself
        raise first.get("ctx", {})["error"]
    place = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"]).removeprefix(".")
    raise ValueError(f"{where}{place or 'the file'}: {first['msg']}, got {reprlib.repr(first['input'])}")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # Any: whatever can be annotated
    return TypeAdapter(kind, config=None if is_dataclass(kind) else Checked.__pydantic_config__)

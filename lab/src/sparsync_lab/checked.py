"""Files of typed records: pydantic checks what TOML or JSON holds against the annotations of a dataclass."""

import json
import reprlib
from dataclasses import is_dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

Made = TypeVar("Made")


class Checked:
    """Base of dataclasses that are read from files: no other types than the annotated ones, no unknown names, only finite numbers."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def checked(kind: "type[Made] | Any", content: object, where: str = "") -> Made:
    """Return the `kind` that `content` describes, values as JSON and TOML have them. `where` stands before the names in errors.

    Raises ValueError that names the place, what is wrong with it and what stands there.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(content, default=_no_text))
    except (ValidationError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise ValueError(f"{where}nested too deeply") from None
        # A wrong name comes first: what is missing is often what was meant.
        first = min(error.errors(), key=lambda each: each["type"] != "unexpected_keyword_argument")
    if first["type"] == "value_error":  # of the dataclass itself
        raise first.get("ctx", {})["error"]
    place = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"]).removeprefix(".")
    raise ValueError(f"{where}{place or 'the file'}: {first['msg']}, got {reprlib.repr(first['input'])}")


def _no_text(value: object) -> dict[str, str]:
    """Stand in for a value that JSON does not have, such as a date, by something that is neither text nor number."""
    return {type(value).__name__: str(value)}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # Any: whatever can be annotated
    return TypeAdapter(kind, config=None if is_dataclass(kind) else Checked.__pydantic_config__)

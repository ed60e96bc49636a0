"""Schemes as a text: "topk", "two_shot:density=0.05:values=sign", "package.module:Class:key=value", "path/to/file.py:Class".

A prefix gives the steps around a scheme, "steps(keep=0.5)/" or "local_steps(every=4)/". The commands, the environment variable
SPARSYNC_SCHEME and `sparsync.schemes.from_text` take such texts. The variable takes names only, because the module or file of a class is
executed. This module does not import torch before it makes a scheme.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsync.base import registry
from sparsync.recipes import PUBLISHED

if TYPE_CHECKING:
    from sparsync.base.scheme import Scheme

VARIABLE = "SPARSYNC_SCHEME"
# Set by `sparsync launch --scheme`. VARIABLE may name a class if both have the same text.
COMMAND_LINE = "SPARSYNC_SCHEME_OF_COMMAND_LINE"
NOTE = "SPARSYNC_SCHEME_NOTE"  # a file of `sparsync launch` for one rank, which records the text that a script read from VARIABLE
# The prefixes of a scheme, and the classes that attach takes for them.
STEPS = {"local_steps": "LocalSteps", "steps": "Steps"}

_AROUND = re.compile(rf"({'|'.join(STEPS)})(?:\(([^()]*)\))?/(.*)")  # the steps, their settings, and the scheme
_BEGINS_AS_STEPS = re.compile(rf"({'|'.join(STEPS)})\b(?![:.])")  # not a module or file of that name
_SETTING = re.compile(r":(?=[A-Za-z_]\w*=)")  # the colon before a key=value; other colons belong to the name


def from_text(text: str) -> "Scheme":
    """Create a scheme from a text such as "two_shot:density=0.05:values=sign": a name, and the settings that differ from the defaults.

    The name is one that `sparsync.schemes.get` takes: the module or file of a class is executed. A value is a number, true, false or a
    text; "+" joins several, as in "skip_reduce:protect=*.bias+norm.*". Raises ValueError for an unknown name or setting, suggesting the
    nearest; for a setting that the scheme refuses; and for a text that means more than a scheme, such as a recipe or steps around a
    scheme. Raises TypeError for anything but a text.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"sparsync.schemes.from_text takes a text such as 'topk:density=0.01', got {text!r}; a scheme needs no call"
        )
    if around := taken_apart(text)[0]:
        meant = f", which is {PUBLISHED[text][0]}," if text in PUBLISHED else ""
        raise ValueError(
            f"{text!r}{meant} is a scheme and the steps around it, and only a scheme is asked for; pass the one behind the slash to "
            f"sparsync.attach(model, scheme, optimizer=optimizer, exchange=sparsync.{STEPS[around]}(...))"
        )
    return scheme_of(text)


def scheme_of(text: str) -> "Scheme":
    """Create a scheme from a text that names one scheme and no steps."""
    if "," in text:
        raise ValueError(f"one scheme is asked for, got {text!r}; name one, and join several values of a setting by +")
    return made(*parsed(text), text)


def text_of_environment() -> str:
    """Read the environment variable SPARSYNC_SCHEME; "" if it is not set.

    It names a scheme of `sparsync.schemes.names()`. A class is allowed only from `sparsync launch --scheme`, which sets
    SPARSYNC_SCHEME_OF_COMMAND_LINE to the same text; otherwise it raises ValueError, naming the variable. If SPARSYNC_SCHEME_NOTE is the
    path of an existing file, the text is written to it, so that `sparsync launch` learns that the script uses its scheme.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if note := os.environ.get(NOTE):
        with suppress(OSError), Path(note).open("r+") as file:  # r+ creates no file: it is gone after the launch
            file.write(f"{text}\n")
    if text != os.environ.get(COMMAND_LINE):
        with of_variable(text):
            registry.check_names_no_code(parsed(taken_apart(text)[2])[0], "the environment")
    return text


@contextmanager
def of_variable(text: str) -> Iterator[None]:
    """Prefix ValueErrors with the variable and its text."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text}: {error}") from error


def taken_apart(text: str, published: Mapping[str, tuple[str, str]] = PUBLISHED) -> tuple[str, dict[str, Any], str]:
    """Split a text into the steps (a key of STEPS or ""), their settings, and the text of the scheme. Looks nothing up.

    `published`: recipes by name, which stand for such texts. Raises ValueError for steps without a scheme.
    """
    text = published[text][0] if text in published else text
    if match := _AROUND.fullmatch(text):
        steps, settings, inner = match.groups()
        return steps, by_key(filter(None, (settings or "").split(":")), text), inner
    if _BEGINS_AS_STEPS.match(text):
        raise ValueError(
            f"steps are written as local_steps(every=4:keep=0.5)/SCHEME:KEY=VALUE or steps(keep=0.5)/SCHEME, got {text!r}"
        )
    return "", {}, text


def parsed(text: str) -> tuple[str, dict[str, Any]]:  # Any: as `_value`
    """Parse "NAME:key=value:key=value" into name and settings. Looks neither up.

    Raises ValueError for a repeated setting and for one without a value.
    """
    name, *settings = _SETTING.split(text)
    return name, by_key(settings, text)


def by_key(settings: Iterable[str], text: str) -> dict[str, Any]:  # Any: as `_value`
    """Parse settings "key=value" into a dict. Raises ValueError, naming `text`, for a repeated key and for a key without a value."""
    values: dict[str, Any] = {}
    for written in settings:
        key, value = setting(written)
        if key in values:
            raise ValueError(f"the setting {key!r} stands twice in {text!r}; leave one out")
        if value in ("", [""]):
            raise ValueError(registry.without_value(key, text))
        values[key] = value
    return values


def made(name: str, config: dict[str, Any], text: str = "") -> "Scheme":  # Any: the fields of the scheme's own config
    """Create a scheme from a name and settings. `text`: what the user wrote, for errors.

    Raises ValueError for any setting that the scheme refuses.
    """
    text = text or ":".join([name, *(f"{key}={_written(value)}" for key, value in config.items())])
    registry.check_settings(name, config)
    for value in config.values():
        _, colon, key = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        if colon and key in registry.settings(name):  # "topk:values=int4:density"
            raise ValueError(registry.without_value(key, text))
    try:
        return registry.get(name, **config)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"scheme {text!r} cannot be made: {error}; see `sparsync schemes {name}`") from error


def setting(text: str) -> tuple[str, Any]:  # Any: as `_value`
    """Parse "key=value" into key and value."""
    key, _, written = text.partition("=")
    value = _value(written)
    return key, [value] if key == "protect" and isinstance(value, str) else value


def _written(value: Any) -> str:  # Any: as `_value`
    """Format a value as in a text."""
    if isinstance(value, list | tuple):
        return "+".join(map(_written, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(text: str) -> Any:  # Any: a list, bool, int, float or str, by its form
    if "+" in text:
        return [item for item in text.split("+") if item]
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

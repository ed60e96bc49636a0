"""Schemes as a text: "topk", "two_shot:density=0.05:values=sign", "package.module:Class:key=value", "path/to/file.py:Class".

In front of a scheme may stand the steps around it, "steps(keep=0.5)/" or "local_steps(every=4)/". The commands take such texts, the
environment variable SPARSYNC_SCHEME has one, and `sparsync.schemes.from_text` makes a scheme of one. The module or file of a class is
executed, so the variable takes names only. Nothing here imports torch before a scheme is made.
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
COMMAND_LINE = "SPARSYNC_SCHEME_OF_COMMAND_LINE"  # by `sparsync launch --scheme`: where VARIABLE has the same text, it may name a class
NOTE = "SPARSYNC_SCHEME_NOTE"  # a file that `sparsync launch` has made for a rank: what reads VARIABLE writes its text there
# What may stand around a scheme, and what attach takes for it. adamw_steps is the older name of steps.
STEPS = {"local_steps": "LocalSteps", "steps": "Steps", "adamw_steps": "Steps"}
LISTS = ("protect", "dense")  # settings that are lists even when one value is given

_AROUND = re.compile(rf"({'|'.join(STEPS)})(?:\(([^()]*)\))?/(.*)")  # what, its settings, and the scheme
_BEGINS_AS_STEPS = re.compile(rf"({'|'.join(STEPS)})\b(?![:.])")  # and no module or file of that name
_SETTING = re.compile(r":(?=[A-Za-z_]\w*=)")  # the colon before a key=value; other colons belong to the name


def from_text(text: str) -> "Scheme":
    """Return a new scheme of a text such as "two_shot:density=0.05:values=sign": a name, and settings where they are not the defaults.

    The name is one that `sparsync.schemes.get` takes: the module or file of a class is executed. A value is a number, true, false or a
    text; several are joined by "+", as in "skip_reduce:protect=*.bias+norm.*". Raises ValueError for an unknown name or setting,
    suggesting the nearest, for a setting that the scheme refuses, and for what stands for more than a scheme: a recipe, or steps around a
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
    """Return a new scheme of the text of one scheme."""
    if "," in text:
        raise ValueError(f"one scheme is asked for, got {text!r}; name one, and join several values of a setting by +")
    return made(*parsed(text), text)


def text_of_environment() -> str:
    """Return the text in the environment variable SPARSYNC_SCHEME; "" where it is not set.

    It names schemes of `sparsync.schemes.names()`. A class is taken only from `sparsync launch --scheme`, which sets
    SPARSYNC_SCHEME_OF_COMMAND_LINE to the same text. Where SPARSYNC_SCHEME_NOTE has the path of a file that is there, the text is written
    into it: so `sparsync launch` learns that a script takes its scheme. Raises ValueError for a class, naming the variable.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if note := os.environ.get(NOTE):
        with suppress(OSError), Path(note).open("r+") as file:  # r+ makes no file: it is gone when the launch is over
            file.write(f"{text}\n")
    if text != os.environ.get(COMMAND_LINE):
        with of_variable(text):
            registry.check_names_no_code(parsed(taken_apart(text)[2])[0], "the environment")
    return text


@contextmanager
def of_variable(text: str) -> Iterator[None]:
    """Have ValueErrors name the variable that has this text."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text}: {error}") from error


def taken_apart(text: str, published: Mapping[str, tuple[str, str]] = PUBLISHED) -> tuple[str, dict[str, Any], str]:
    """Return the steps around a scheme, one of STEPS or "", their settings, and the text of the scheme. Nothing is looked up.

    `published`: names that stand for such texts. Raises ValueError for steps without a scheme.
    """
    text = published[text][0] if text in published else text
    if found := _AROUND.fullmatch(text):
        steps, settings, inner = found.groups()
        return steps, by_key((each for each in (settings or "").split(":") if each), text), inner
    if _BEGINS_AS_STEPS.match(text):
        raise ValueError(
            f"steps are written as local_steps(every=4:keep=0.5)/SCHEME:KEY=VALUE or steps(keep=0.5)/SCHEME, got {text!r}"
        )
    return "", {}, text


def parsed(text: str) -> tuple[str, dict[str, Any]]:  # Any: as `_value`
    """Return the name and the settings of "NAME:key=value:key=value". Neither is looked up.

    Raises ValueError for a setting that stands there twice, and for one without a value.
    """
    name, *settings = _SETTING.split(text)
    return name, by_key(settings, text)


def by_key(settings: Iterable[str], text: str) -> dict[str, Any]:  # Any: as `_value`
    """Return the values of settings "key=value" by key. Raises ValueError, naming `text`, where a key is there twice or has no value."""
    values: dict[str, Any] = {}
    for each in settings:
        key, value = setting(each)
        if key in values:
            raise ValueError(f"the setting {key!r} stands twice in {text!r}; leave one out")
        if value in ("", [""]):
            raise ValueError(registry.without_value(key, text))
        values[key] = value
    return values


def made(name: str, config: dict[str, Any], text: str = "") -> "Scheme":  # Any: the fields of the scheme's own config
    """Return a new scheme of a name and settings. `text`: as it was given, for errors.

    Raises ValueError for settings that it does not take, of whatever type they are.
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
    """Return key and value of "key=value"."""
    key, _, written = text.partition("=")
    value = _value(written)
    return key, [value] if key in LISTS and isinstance(value, str) else value


def _written(value: Any) -> str:  # Any: as `_value`
    """Return a value as it stands in a text."""
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

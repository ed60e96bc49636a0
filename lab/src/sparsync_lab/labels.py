"""Short names of methods for tables, pictures and progress: "topk:density=0.01:values=sign" becomes "topk 1 % signs"."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsync.base.scheme_text import parsed, taken_apart

_ALWAYS = ("density", "density_down", "values", "values_down")  # shown without their key, in this order


@dataclass(frozen=True)
class _Parts:
    """The parts of a label."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: as in a scheme's text
    steps: str = ""  # local_steps or steps, if it wraps the scheme
    around: Mapping[str, Any] = field(default_factory=dict)  # settings of those steps


def short_labels(labels: Sequence[str]) -> dict[str, str]:
    """Shorten the labels of one table; the names stay distinct.

    A name has the density and the value type if given, and other settings if they differ between labels of the same scheme; a class loses
    its module or file. A label whose short name would not be unique is not shortened.
    """
    parts = {label: _parts(label) for label in labels}
    every = list(parts.values())
    names = {label: _name(each, every) for label, each in parts.items()}
    taken = list(names.values())
    return {label: name if taken.count(name) == 1 else label for label, name in names.items()}


def _parts(label: str) -> _Parts:
    try:
        steps, settings, scheme = taken_apart(label, published={})
        return _Parts(*parsed(scheme), steps, settings)
    except ValueError:  # not a label of --schemes
        return _Parts(label)


def _name(own: _Parts, every: Sequence[_Parts]) -> str:
    similar = [each for each in every if (each.steps, each.name) == (own.steps, own.name)]
    always = {key: text for key in _ALWAYS if (text := _always(key, own.settings)) is not None}
    others = [
        _written(key, value)
        for key, value in own.settings.items()
        if key not in always and len({repr(each.settings.get(key)) for each in similar}) > 1
    ]
    several = any(key.endswith("_down") for key in always)
    words = [
        own.name if own.name.startswith("bits=") else own.name.rpartition(":")[2] or own.name,
        *([", ".join(always.values())] if several else always.values()),
        *others,
    ]
    neighbours = [each for each in every if each.steps == own.steps]
    shown = [
        _written(key, value)
        for key, value in own.around.items()
        if len({repr(each.around.get(key)) for each in neighbours}) > 1
    ]
    brackets = f"({', '.join(shown)})" if shown else ""
    return (f"{own.steps}{brackets}/" if own.steps else "") + " ".join(words)


def _always(key: str, settings: Mapping[str, Any]) -> str | None:  # Any: as in a scheme's text
    """Format a setting such as "3 % up", "12 % down" or "signs"; None if it is absent or has another type."""
    if key not in settings:
        return None
    value, (name, _, down) = settings[key], key.partition("_")
    if name == "values":
        text = "signs" if value == "sign" else str(value)
    elif isinstance(value, str):
        return None
    else:
        text = f"{100 * value:.4g} %"
    both = down or f"{name}_down" in settings
    return f"{text} {down or 'up'}" if both else text


def _written(key: str, value: Any) -> str:  # Any: as in a scheme's text
    text = "+".join(map(str, value)) if isinstance(value, list) else f"{value}"
    return f"{key}={text.lower() if isinstance(value, bool) else text}"

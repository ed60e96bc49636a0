"""How the annotations of the package are executed in tests: shapes by jaxtyping, everything else by beartype."""

from collections.abc import Callable
from functools import partial
from inspect import isclass
from typing import Any, Self, get_args  # Any: decorators take and return anything

from beartype import beartype
from jaxtyping import AbstractArray, jaxtyped

# DDP reads the annotations of a hook and wants its own classes in them, and `attach` tells a wrong model itself, with a TypeError.
UNCHECKED = frozenset({"sparsync.integrations.ddp"})


def executed(thing: Any = None, *, typechecker: object = None) -> Any:
    """Stands in for `jaxtyping.jaxtyped` under its import hook: the function or class, checking what its annotations say.

    HACK: jaxtyped binds the arguments of every call anew to compare shapes, which makes small functions without any shape 10 times
    slower; so only what mentions a shape pays for that, and the rest is checked by beartype alone. Price: a dataclass without shapes
    is not checked when it is made, only where a function takes or returns it.
    """
    if thing is None:
        return partial(executed, typechecker=typechecker)
    if thing.__module__ in UNCHECKED:
        return thing
    if any(_has_shape(hint) for hint in getattr(thing, "__annotations__", {}).values()):
        return jaxtyped(thing, typechecker=checked)
    return thing if isclass(thing) else checked(thing)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, checking its arguments and its result against its annotations.

    HACK: beartype understands `Self` only where it decorates a whole class, and here it gets one method at a time; and a name in quotes,
    which a class needs for itself, it looks up at every call, which takes longer than the call. So these two go unchecked.
    """
    hints = getattr(function, "__annotations__", {})
    function.__annotations__ = {
        name: hint for name, hint in hints.items() if hint is not Self and not isinstance(hint, str)
    }
    return beartype(function)


def _has_shape(hint: object) -> bool:
    return (isclass(hint) and issubclass(hint, AbstractArray)) or any(_has_shape(part) for part in get_args(hint))

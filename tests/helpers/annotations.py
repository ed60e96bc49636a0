"""The annotations of the package are executed with `pytest --annotations`: shapes by jaxtyping, everything else by beartype.

Checking every call takes half of the time of many tests, so each function checks its first calls and some of the others. A function inside
another is decorated each time the outer one runs, which takes longer than most calls; so of it the first definitions and some of the others
are decorated.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from inspect import isclass
from types import CodeType
from typing import Any, get_args  # Any: decorators take and return anything

from beartype import beartype
from jaxtyping import AbstractArray, jaxtyped
from typing_extensions import Self

# DDP reads the annotations of a hook and wants its own classes in them, and `attach` refuses a wrong model itself, with a TypeError.
UNCHECKED = frozenset({"sparsync.attached.ddp"})

FIRST_CALLS = 50
FIRST_DEFINITIONS = 5
ONE_IN = 200  # of the calls and definitions after the first ones
definitions: Counter[CodeType] = Counter()  # of each function inside another


def executed(thing: Any = None, *, typechecker: object = None) -> Any:
    """Return the function or class with its annotations checked; stands in for `jaxtyping.jaxtyped` under its import hook.

    HACK: jaxtyped binds the arguments of every call again to compare shapes, which makes small functions without any shape 10 times
    slower; so only what mentions a shape pays for that, and the rest is checked by beartype alone. Price: a dataclass without shapes
    is not checked when it is made, only where a function takes or returns it.
    """
    if thing is None:
        return partial(executed, typechecker=typechecker)
    hints = getattr(thing, "__annotations__", {}).values()
    # Triton compiles a kernel from its source, which a wrapper would hide.
    if (
        thing.__module__ in UNCHECKED
        or not hints
        or any(getattr(hint, "__name__", "") == "constexpr" for hint in hints)
    ):
        return thing
    if not isclass(thing) and "<locals>" in thing.__qualname__:
        definitions[thing.__code__] += 1
        number = definitions[thing.__code__]
        if number > FIRST_DEFINITIONS and number % ONE_IN:
            return thing
    if any(_has_shape(hint) for hint in hints):
        if not isclass(thing):
            return sometimes(lambda: jaxtyped(thing, typechecker=checked), thing)
        plain = thing.__init__
        with_shapes = jaxtyped(thing, typechecker=checked)
        with_init = with_shapes.__init__
        with_shapes.__init__ = sometimes(lambda: with_init, plain)
        return with_shapes
    return thing if isclass(thing) else sometimes(lambda: checked(thing), thing)


def sometimes(make: Callable[[], Callable[..., Any]], without: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that checks its first calls and some of the others.

    `make` makes the function with the checks at the first call, because that takes longer than most functions, and many are never called.
    """
    calls, with_checks = 0, None

    @wraps(without)
    def call(*args: Any, **named: Any) -> Any:
        nonlocal calls, with_checks
        calls += 1
        if calls > FIRST_CALLS and calls % ONE_IN:
            return without(*args, **named)
        if with_checks is None:
            with_checks = make()
        return with_checks(*args, **named)

    return call


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, checking its arguments and its result against its annotations.

    HACK: beartype understands `Self` only where it decorates a whole class, and here it gets one method at a time; and a name in quotes,
    which a class needs for itself, it looks up at every call, which takes longer than the call; and a protocol can be checked only where
    it is declared as checkable. So these three go unchecked.
    """
    hints = getattr(function, "__annotations__", {})
    function.__annotations__ = {name: hint for name, hint in hints.items() if _can_be_checked(hint)}
    return beartype(function)


def _can_be_checked(hint: object) -> bool:
    if hint is Self or isinstance(hint, str):
        return False
    return not getattr(hint, "_is_protocol", False) or getattr(hint, "_is_runtime_protocol", False)


def _has_shape(hint: object) -> bool:
    return (isclass(hint) and issubclass(hint, AbstractArray)) or any(_has_shape(part) for part in get_args(hint))

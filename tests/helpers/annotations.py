"""Execute the package's annotations with `pytest --annotations`: shapes by jaxtyping, everything else by beartype.

Checking every call takes half of the time of many tests, so only the first calls of a function and some later ones are checked. A nested
function is decorated each time the outer one runs, which takes longer than most calls, so only its first definitions and some later ones
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

# DDP reads a hook's annotations and requires its own classes in them, and `attach` itself refuses a wrong model with a TypeError.
UNCHECKED = frozenset({"sparsync.attached.ddp"})

FIRST_CALLS = 50
FIRST_DEFINITIONS = 5
ONE_IN = 200  # of later calls and definitions
definitions: Counter[CodeType] = Counter()  # of each nested function


def executed(thing: Any = None, *, typechecker: object = None) -> Any:
    """Check the annotations of a function or class; replaces `jaxtyping.jaxtyped` under its import hook.

    HACK: jaxtyped binds the arguments of every call again to compare shapes, which makes small functions without shapes 10 times slower.
    So only annotations that mention a shape use it, and the rest uses beartype alone. Price: a dataclass without shapes is not checked
    when it is made, only when a function takes or returns it.
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
    """Wrap a function so that its first calls and some later ones are checked.

    `make` adds the checks at the first call, because that takes longer than most functions, and many are never called.
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
    """Make a function check its arguments and its result against its annotations.

    HACK: three kinds of annotations go unchecked. beartype understands `Self` only when it decorates a whole class, but here it gets single
    methods; it looks up a quoted name, which a class needs for itself, at every call, which takes longer than the call; and it can check
    only protocols that are declared as runtime-checkable.
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

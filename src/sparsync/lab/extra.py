"""The one sentence that is said when a package of the extra [lab] is missing."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lab_extra(package: str) -> Iterator[None]:
    """Imports inside this block that fail become a RuntimeError that says how to install `package`."""
    try:
        yield
    except ImportError as error:
        raise RuntimeError(
            f'cannot import {package} ({error}); tables, pages and pictures need it: pip install "sparsync[lab]"'
        ) from error

"""The error message for a missing package of the extra [lab]."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lab_extra(package: str) -> Iterator[None]:
    """Turn an import that fails inside this block into a RuntimeError that says how to install `package`."""
    try:
        yield
    except ImportError as error:
        raise RuntimeError(
            f'cannot import {package} ({error}); tables, pages and pictures need it: pip install "sparsync[lab]"'
        ) from error

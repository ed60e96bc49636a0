"""Communicators: over torch's process groups, inside one process for tests, and with counters. `__init__.pyi` lists them."""

from sparsync.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

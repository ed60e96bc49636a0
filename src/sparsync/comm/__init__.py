"""How ranks exchange messages: over process groups of torch, inside one process for tests, and counted. Listed in `__init__.pyi`."""

from sparsync.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

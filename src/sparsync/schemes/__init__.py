"""All schemes, one a file, loaded when first used, and how they are found by name. The names are listed in `__init__.pyi`."""

from sparsync.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

"""All schemes, one per file, and functions that look them up by name. `__init__.pyi` lists the names, which load when first used."""

from sparsync.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

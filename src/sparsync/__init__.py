"""Sparse and skipping gradient synchronisation for PyTorch: the public names, loaded when first used. They are listed in `__init__.pyi`."""

from sparsync.lazy_names import lazy_names

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

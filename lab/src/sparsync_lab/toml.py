"""The TOML parser: the standard library's, or on Python 3.10 its predecessor, the package `tomli`."""

import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]  # installed on Python 3.10 only

__all__ = ["tomllib"]

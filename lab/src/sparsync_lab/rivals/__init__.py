"""Published schemes to compare with, built from the library's parts; one per file.

The library finds them by name through the entry points "sparsync.schemes" in lab/pyproject.toml, as it does for any package. A listing
shows the first line of the class's docstring.
"""

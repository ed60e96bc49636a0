"""Published schemes to compare with, made of the library's parts; one a file.

The library does not know them. It finds them by name because lab/pyproject.toml has them as entry points of the group
"sparsync.schemes", as any package may. What the listing says of one is the first line of its class's docstring.
"""

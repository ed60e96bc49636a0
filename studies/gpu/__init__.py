"""What the library costs on a GPU: launches and waits counted on a CPU, times and memory measured where a GPU is."""

from collections.abc import Sequence
from importlib import import_module


def main(argv: Sequence[str]) -> None:
    """Run the study."""
    import_module("studies.gpu.command").main(argv)

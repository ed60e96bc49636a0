"""The library's cost on a GPU: launches and waits counted on a CPU, times and memory measured on a GPU."""

from studies.gpu.command import main as main

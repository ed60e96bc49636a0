"""What the library costs on a GPU: launches and waits counted on a CPU, times and memory measured where a GPU is."""

from studies.gpu.command import main as main

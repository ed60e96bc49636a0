"""Small made-up data sets in the form of Fashion-MNIST, for tests of whatever reads or trains on it."""

import gzip
import struct
from pathlib import Path

import torch

from sparsync_lab.workloads import fashion_images

TRAINING_IMAGES, TEST_IMAGES = 200, 260  # neither a multiple of a batch nor of a chunk


def idx_file(data: bytes, *shape: int) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data


def noise(count: int, seed: int) -> bytes:
    return bytes(torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def files(training: int = TRAINING_IMAGES, test: int = TEST_IMAGES) -> dict[str, bytes]:
    """Four IDX files of noise, every class as often as any other."""
    made = {}
    for (images, labels), count in ((fashion_images.TRAINING, training), (fashion_images.TEST, test)):
        made[images] = idx_file(noise(count * 784, seed=count), count, 28, 28)
        made[labels] = idx_file(bytes(number % 10 for number in range(count)), count)
    return made


def write(folder: Path, content: dict[str, bytes]) -> Path:
    for name, data in content.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(data))
    return folder

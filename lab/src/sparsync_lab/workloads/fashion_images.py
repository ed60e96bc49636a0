"""Fashion-MNIST (Zalando Research, MIT licence) as tensors: from the Debian package, a given folder, or the internet.

60,000 training and 10,000 test images of 28 x 28 grey pixels in ten classes; arXiv:1708.07747.
"""

import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from jaxtyping import Int, UInt8
from torch import Tensor

from sparsync_lab.workloads import idx
from sparsync_lab.workloads.networks import CLASSES, SIDE
from sparsync_lab.workloads.store import DataMissingError, cache_folder, cached, sha256

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
UPSTREAM = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
DOWNLOAD_TIMEOUT_S = 60  # without a byte
TRAINING = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
# Of the uncompressed files: Debian compresses them again, so the .gz differ from the ones upstream.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


@dataclass(frozen=True)
class Labelled:
    """Images and, for each, the number of its class."""

    images: UInt8[Tensor, "count 28 28"]
    classes: Int[Tensor, " count"]


@dataclass(frozen=True)
class Images:
    """The training and the test images, their source, and the digests of the uncompressed files."""

    training: Labelled
    test: Labelled
    source: str
    sha256: Mapping[str, str]


@lru_cache(maxsize=2)
def images(data: str) -> Images:
    """Return the data in folder `data`; where that is empty, of the Debian package, else of the cache, else from the internet.

    A given folder may hold other images of the same form, as the digests then show; all others must be Fashion-MNIST to the bit.
    Raises DataMissingError when the data cannot be found or fetched, ValueError when the files in a given folder are not of that form.
    """
    if data:
        files, source = from_folder(Path(data)), data
    elif DEBIAN_FOLDER.is_dir():
        files, source = _from_debian(), str(DEBIAN_FOLDER)
    else:
        files, source = from_internet(UPSTREAM, SHA256), UPSTREAM
    digests = {name: sha256(content) for name, content in files.items()}
    return Images(labelled(files, TRAINING), labelled(files, TEST), source, digests)


def from_folder(folder: Path) -> dict[str, bytes]:
    """Return the uncompressed content of the four files, which lie in `folder` compressed (name.gz) or not."""
    if not folder.is_dir():
        raise ValueError(f"--data must name a folder with the four files of Fashion-MNIST, {folder} is none")
    content = {}
    for name in SHA256:
        found = [path for path in (folder / f"{name}.gz", folder / name) if path.is_file()]
        if not found:
            raise ValueError(f"folder {folder} has no {name}.gz and no {name}; it must have {', '.join(SHA256)}")
        content[name] = idx.read(found[0])
    return content


def _from_debian() -> dict[str, bytes]:
    """Return the uncompressed content of the Debian package's four files, which must be Fashion-MNIST."""
    try:
        content = from_folder(DEBIAN_FOLDER)
        for name, digest in SHA256.items():
            _check(name, content[name], digest)
    except ValueError as error:
        raise DataMissingError(
            f"the installed Fashion-MNIST is damaged: {error}\n"
            "apt-get install --reinstall dataset-fashion-mnist, or name another place with --data FOLDER"
        ) from None
    return content


def from_internet(address: str, digests: Mapping[str, str]) -> dict[str, bytes]:
    """Return the uncompressed content of the files named in `digests`, from the cache or `address`, each checked by its SHA-256."""
    content = {}
    for name, digest in digests.items():
        packed = cached(
            cache_folder() / "fashion-mnist" / f"{name}.gz",
            lambda packed, name=name, digest=digest: _check(name, idx.unpacked(packed, name), digest),
            lambda name=name: _download(f"{address}/{name}.gz"),
        )
        content[name] = idx.unpacked(packed, name)
    return content


def labelled(files: Mapping[str, bytes], names: tuple[str, str]) -> Labelled:
    """Return the images and classes in the two files called `names`. Raises ValueError where they do not belong together."""
    pictures = idx.parse(files[names[0]], names[0], dimensions=3)
    classes = idx.parse(files[names[1]], names[1], dimensions=1).long()
    if pictures.shape[1:] != (SIDE, SIDE):
        raise ValueError(f"{names[0]} must hold images of {SIDE} x {SIDE}, got {tuple(pictures.shape[1:])}")
    if len(pictures) != len(classes) or not len(classes):
        raise ValueError(
            f"{names[0]} has {len(pictures)} images and {names[1]} {len(classes)} labels; they must be equally many, and some"
        )
    if int(classes.max()) >= CLASSES:
        raise ValueError(f"{names[1]} must hold labels below {CLASSES}, got {int(classes.max())}")
    return Labelled(pictures, classes)


def _check(name: str, content: bytes, digest: str) -> None:
    if sha256(content) != digest:
        raise ValueError(f"{name} has SHA-256 {sha256(content)}, expected {digest}")


def _download(address: str) -> bytes:
    try:
        with urllib.request.urlopen(address, timeout=DOWNLOAD_TIMEOUT_S) as answer:
            return answer.read()
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise DataMissingError(
            f"Fashion-MNIST is not on this machine, and {address} could not be fetched: {error}\n"
            "Any of these helps:\n"
            "  apt-get install dataset-fashion-mnist   (Debian and Ubuntu, 31 MB);\n"
            f"  --data FOLDER, with {', '.join(f'{name}.gz' for name in SHA256)};\n"
            "  internet, then try again (31 MB, once)."
        ) from None

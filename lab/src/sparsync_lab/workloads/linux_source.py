"""The C source of the Linux kernel as bytes: from Debian's package linux-source-6.1, or a given folder.

The .c and .h files outside drivers/, which is mostly tables of registers, are kept: 274 MB. About one file in 100, chosen by a hash of its
path, is held out. The package changes over time, so its digest is not pinned: the digest of the text identifies the version.
"""

import tarfile
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO
from urllib.parse import unquote

from sparsync_lab.progress import Progress
from sparsync_lab.workloads import byte_text
from sparsync_lab.workloads.byte_text import ByteText
from sparsync_lab.workloads.store import DataMissingError, cache_folder, output_of

PACKAGE = "linux-source-6.1"
INSTALLED = Path(f"/usr/src/{PACKAGE}.tar.xz")
PREPARED = f"{PACKAGE}.text"
SUFFIXES = (".c", ".h")
LEFT_OUT = "drivers/"
ONE_OF = 100  # one of so many files is held out


@lru_cache(maxsize=2)
def source_text(data: str) -> ByteText:
    """Read the C source below folder `data`, or from the prepared text file `data`; if `data` is empty, from the package.

    The package's text is prepared once, in the cache, from the installed package or one that apt-get fetches. Raises DataMissingError
    if it cannot be found or fetched, and ValueError if `data` does not fit.
    """
    if not data:
        return byte_text.prepared(cache_folder() / PREPARED, _found, ONE_OF)
    path = Path(data)
    if path.is_file():
        return byte_text.read(path)
    if not path.is_dir():
        raise ValueError(f"--data must name a folder with .c and .h files, or a prepared text, {path} is neither")
    files = {name: content for name, content in byte_text.folder_files(path, SUFFIXES).items() if _is_kept(name)}
    if not files:
        raise ValueError(f"folder {path} has no .c or .h file outside {LEFT_OUT}")
    return byte_text.split(files, data, ONE_OF)


def tar_files(packed: IO[bytes]) -> dict[str, bytes]:
    """Read the C source in a packed tar archive, by paths below the top folder."""
    found: dict[str, bytes] = {}
    shown = Progress("preparing the C source of Linux, once: files", announced=True)
    with tarfile.open(fileobj=packed, mode="r|xz") as archive:
        for member in archive:
            _, _, name = member.name.partition("/")
            if member.isfile() and _is_kept(name) and (file := archive.extractfile(member)):
                found[name] = file.read()
                shown.advance()
    return found


def _is_kept(name: str) -> bool:
    return name.endswith(SUFFIXES) and not name.startswith(LEFT_OUT)


def _found() -> tuple[dict[str, bytes], str]:
    """Read the files of the package, installed or fetched, and its name with its version."""
    try:
        if INSTALLED.is_file():
            with INSTALLED.open("rb") as packed:
                return tar_files(packed), f"{PACKAGE} {_installed_version()}"
        with TemporaryDirectory(prefix="sparsync-lab-") as folder:
            where = Path(folder)
            output_of(["apt-get", "download", "--quiet", PACKAGE], where)
            fetched = next(where.glob("*.deb"))
            output_of(["dpkg-deb", "--extract", fetched.name, "."], where)
            with (where / INSTALLED.relative_to("/")).open("rb") as packed:
                return tar_files(packed), f"{PACKAGE} {unquote(fetched.name.split('_')[1])}"
    except (RuntimeError, OSError) as error:
        raise DataMissingError(
            f"the C source of Linux is not available: {error}\n"
            "Any of these helps:\n"
            f"  apt-get install {PACKAGE}   (Debian 12, 139 MB);\n"
            f"  let apt-get reach a mirror of Debian 12, then try again (139 MB, once);\n"
            f"  put {PREPARED}, as another machine has it in its cache, into {cache_folder()};\n"
            "  --data FOLDER, with .c and .h files."
        ) from None


def _installed_version() -> str:
    try:
        return output_of(["dpkg-query", "--show", "--showformat=${Version}", PACKAGE], Path.cwd())
    except RuntimeError:
        return "of an unknown version"  # the digest of the text identifies it

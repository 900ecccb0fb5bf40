"""Tests of hf_xmc.parallel.stage_cache: pieces of work are found again; and of files that are whole or not there."""

import os

import numpy as np
import pytest
from scipy.sparse import csr_matrix, random
from small_problems import same_weights

from hf_xmc.features import Features
from hf_xmc.label_tree import LabelTree
from hf_xmc.parallel.process_group import ProcessGroup
from hf_xmc.parallel.stage_cache import NO_CACHE, Runtime, StageCache, digest
from hf_xmc.serialization import new_folder, remove_leftovers, staged_files
from hf_xmc.training.options import RankerArguments
from hf_xmc.training.ranker import train_ranker


class Interrupted(Exception):
    pass


class Squares:
    """Makes pieces, notes which, and ends early where it is told to."""

    def __init__(self, fail_at=None):
        self.made, self.fail_at = [], fail_at

    def __call__(self, indices):
        for index in indices:
            if index == self.fail_at:
                raise Interrupted
            self.made.append(index)
            yield {"values": np.full(index + 1, index**2), "names": np.array([index])}


def collect(work, make, key="a"):
    found = list(work.pieces("squares", 5, make, None if key is None else lambda: key))
    return {name: np.concatenate([piece[name] for piece in found]).tolist() for name in found[0]}


WHOLE = {"values": [0, 1, 1, 4, 4, 4, 9, 9, 9, 9, 16, 16, 16, 16, 16], "names": [0, 1, 2, 3, 4]}


def test_pieces_are_found_again(tmp_path):
    work = StageCache(ProcessGroup(), tmp_path / "work", keep=True)
    with pytest.raises(Interrupted):
        collect(work, Squares(fail_at=3))
    again = Squares()
    assert collect(work, again) == WHOLE and again.made == [3, 4]
    once_more = Squares()
    assert collect(work, once_more) == WHOLE and once_more.made == []
    changed = Squares()
    assert collect(work, changed, key="b") == WHOLE and changed.made == [0, 1, 2, 3, 4]
    assert work.is_begun
    work.finish()
    assert not work.is_begun and os.listdir(tmp_path) == []


@pytest.mark.parametrize("keep, key", [(False, "a"), (True, None)])
def test_pieces_that_are_not_kept(tmp_path, keep, key):
    work = StageCache(ProcessGroup(), tmp_path / "work", keep)
    for _ in range(2):
        make = Squares()
        assert collect(work, make, key) == WHOLE and make.made == [0, 1, 2, 3, 4]
    assert not work.is_begun


def test_a_damaged_piece_is_named(tmp_path):
    work = StageCache(ProcessGroup(), tmp_path / "work", keep=True)
    collect(work, Squares())
    (tmp_path / "work" / "squares" / "00002.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="00002.safetensors`"):
        collect(work, Squares())


@pytest.mark.parametrize("resume", [True, False])
def test_only_a_continuation_takes_what_is_there(tmp_path, resume):
    work = StageCache(ProcessGroup(), tmp_path / "work", keep=True)
    collect(work, Squares())
    work.start(resume)
    make = Squares()
    assert collect(work, make) == WHOLE and len(make.made) == (0 if resume else 5)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 20_000])
def test_rows_are_made_in_pieces(count):
    asked = []

    def make(start, stop):
        asked.append((start, stop))
        return {"rows": np.arange(start, stop)}

    assert np.array_equal(NO_CACHE.rows("numbers", count, make)["rows"], np.arange(count))
    assert [start for start, _ in asked[1:]] == [stop for _, stop in asked[:-1]]
    assert len(asked) <= 64 and all(stop - start >= 256 for start, stop in asked[:-1])


def test_a_digest_tells_content_and_borders_apart():
    one = np.arange(6)
    same = digest("a", one)
    assert same == digest("a", one.copy()) and len(same) == 32
    others = [digest("a", one[::-1]), digest("a", one[:3], one[3:]), digest("b", one), digest(one), digest("a")]
    assert len({same, digest("a", np.empty(0)), *others}) == 7


def test_an_interrupted_ranker_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_xmc.training.ranker.DOCUMENTS_PER_TASK", 64)
    generator = np.random.default_rng(0)
    features = Features(random(200, 30, 0.3, "csr", np.float32, generator), generator.random((200, 4), np.float32))
    targets = csr_matrix(generator.random((200, 40)) < 0.1, dtype=np.float32)
    tree = LabelTree.from_parents([np.zeros(8, np.int64), np.arange(40) // 5])
    whole = train_ranker(features, targets, tree, RankerArguments(), Runtime(1))
    work = StageCache(ProcessGroup(), tmp_path / "work", keep=True)

    def end_early(stage, done, total):
        if done > total // 2 and stage.endswith(f"{tree.depth}/{tree.depth}"):
            raise Interrupted

    with pytest.raises(Interrupted):
        train_ranker(features, targets, tree, RankerArguments(), Runtime(1, end_early, work))
    done = []
    again = train_ranker(features, targets, tree, RankerArguments(), Runtime(1, lambda *said: done.append(said), work))
    assert same_weights(again, whole)
    blocks = sum(len(range(0, int(size), 16)) for size in np.diff(tree.child_offsets[-1]))
    assert 0 < done[-1][2] < blocks  # of the last level only what was missing was trained
    other = RankerArguments(C=2.0)
    trained = [train_ranker(features, targets, tree, other, Runtime(1, cache=cache)) for cache in (work, NO_CACHE)]
    assert same_weights(*trained) and not same_weights(trained[0], whole)


# ---- Files that are whole or not there ----


def test_a_folder_appears_whole_and_replaces_what_was_there(tmp_path):
    folder = tmp_path / "folder"
    with new_folder(folder) as temporary:
        (tmp_path / temporary / "a").write_text("1")
        assert not folder.exists()
    with pytest.raises(Interrupted), new_folder(folder) as temporary:
        (tmp_path / temporary / "b").write_text("2")
        raise Interrupted
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(folder) == ["a"]
    (tmp_path / ".folder.partial").mkdir()
    (tmp_path / ".folder.partial" / "c").write_text("left by a killed process")
    with new_folder(folder) as temporary:
        (tmp_path / temporary / "b").write_text("2")
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(folder) == ["b"]


def test_staged_files_come_together(tmp_path, monkeypatch):
    folder, moved, replace = tmp_path / "new", [], os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: moved.append(target.name) or replace(source, target))
    with pytest.raises(Interrupted), staged_files(folder, last="config.json"):
        raise Interrupted
    assert not folder.exists()
    folder.mkdir()
    (folder / "own.txt").write_text("the user's")
    with staged_files(folder, last="config.json") as temporary:
        for name in ("config.json", "z"):
            (folder / temporary / name).write_text(name)
        (folder / temporary / "member").mkdir()
        assert sorted(os.listdir(folder)) == [".saving", "own.txt"]
    assert sorted(os.listdir(folder)) == ["config.json", "member", "own.txt", "z"]
    assert moved == ["member", "z", "config.json"]


def test_leftovers_go_and_nothing_else(tmp_path):
    kept = [".env.template", ".gitattributes", "notes.h6ehs0qz.partial"]
    for name in (".model.safetensors.h6ehs0qz.partial", *kept):
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == kept

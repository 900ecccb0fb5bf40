"""Arrays in one file or in several: where they are cut, what is left behind, what is noticed on reading."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from hf_xmc import XMCForTextClassification
from hf_xmc.serialization import index_name, load_sharded, save_sharded, save_tensors, sharded_files

NAME, KIND = "ranker.safetensors", "linear ranker"
TENSORS = {name: np.arange(size, dtype=np.int64) + size for name, size in (("a", 100), ("b", 300), ("c", 10))}


@pytest.mark.parametrize(
    "limit, files",
    [
        ("50GB", [["a", "b", "c"]]),
        (3280, [["a", "b", "c"]]),  # all of it, to the byte
        (3279, [["a", "b"], ["c"]]),
        ("1KB", [["b"], ["a", "c"]]),  # `b` alone is larger
    ],
)
def test_where_it_is_cut(tmp_path, limit, files):
    save_sharded(tmp_path, NAME, TENSORS, KIND, {"loss": "logistic"}, limit)
    found = sharded_files(tmp_path, NAME)
    assert sorted(os.listdir(tmp_path)) == found
    if len(files) == 1:
        assert found == [NAME]
    else:
        index = json.loads((tmp_path / index_name(NAME)).read_text())
        names = [f"ranker-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        assert index["weight_map"] == {key: names[i] for i, keys in enumerate(files) for key in keys}
        assert index["metadata"]["total_size"] == 3280
        assert found == [*names, index_name(NAME)]
    tensors, metadata = load_sharded(tmp_path, NAME, KIND)
    assert metadata["loss"] == "logistic" and tensors.keys() == TENSORS.keys()
    assert all(np.array_equal(tensors[key], TENSORS[key]) for key in TENSORS)


@pytest.mark.parametrize("before, after", [("1KB", "50GB"), ("50GB", "1KB"), ("1KB", 3279)])
def test_nothing_is_left_of_what_was_there(tmp_path, before, after):
    (tmp_path / "ranker_tree.safetensors").write_bytes(b"another part")
    save_sharded(tmp_path, NAME, TENSORS, KIND, max_shard_size=before)
    tensors, _ = load_sharded(tmp_path, NAME, KIND)
    save_sharded(tmp_path, NAME, {**TENSORS, "c": np.zeros(3)}, KIND, max_shard_size=after)
    assert np.array_equal(load_sharded(tmp_path, NAME, KIND)[0]["c"], np.zeros(3))
    assert (tmp_path / "ranker_tree.safetensors").exists()
    assert np.array_equal(tensors["b"], TENSORS["b"])  # what was mapped before stays readable
    index = tmp_path / index_name(NAME)
    used = {index.name, *json.loads(index.read_text())["weight_map"].values()} if index.exists() else {NAME}
    assert set(sharded_files(tmp_path, NAME)) == used and (NAME in used) == (after != "1KB")


def test_damage_is_named(tmp_path):
    save_sharded(tmp_path, NAME, TENSORS, KIND, {"tree": "x"}, "1KB")
    second = tmp_path / "ranker-00002-of-00002.safetensors"
    save_tensors(second, {"a": TENSORS["a"], "c": TENSORS["c"]}, KIND, {"tree": "y"})
    with pytest.raises(ValueError, match="files beside it are of different models"):
        load_sharded(tmp_path, NAME, KIND)
    save_tensors(second, {"a": TENSORS["a"], "other": TENSORS["c"]}, KIND, {"tree": "x"})
    with pytest.raises(ValueError, match="names arrays that its files lack: c"):
        load_sharded(tmp_path, NAME, KIND)
    second.unlink()
    with pytest.raises(FileNotFoundError, match=second.name):
        load_sharded(tmp_path, NAME, KIND)


def test_equal_content_makes_equal_files(tmp_path):
    for name in "xy":
        metadata = {key: "1" for key in ("zeta", "alpha", "beta", "gamma", "delta")}
        save_tensors(tmp_path / name, TENSORS, KIND, metadata)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    assert b'{"alpha":"1","beta":"1"' in (tmp_path / "x").read_bytes()[:200]


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux's list of mapped files")
def test_a_model_in_shards(model_folder, tmp_path):
    model = XMCForTextClassification.from_pretrained(model_folder)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = [name for name in sharded_files(tmp_path, NAME) if name.endswith(".safetensors")]
    assert len(shards) > 1 and NAME not in shards
    again = XMCForTextClassification.from_pretrained(tmp_path)
    assert again.predict(["topic07 topic31"]) == model.predict(["topic07 topic31"])
    mapped = Path("/proc/self/maps").read_text()
    assert all(str(tmp_path / name) in mapped for name in shards)

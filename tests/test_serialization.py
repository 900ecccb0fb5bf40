"""Tests of hf_xmc.serialization."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from pathlib import Path

import numpy as np
import pytest
from conftest import refused
from safetensors.numpy import save_file

from hf_xmc import XMCForTextClassification
from hf_xmc.serialization import (
    atomic_write,
    index_name,
    load_sharded,
    load_tensors,
    read_json,
    resolve_file,
    save_sharded,
    save_tensors,
    sharded_files,
    write_json,
)

TENSORS = {
    "numbers": np.arange(12, dtype=np.int64).reshape(3, 4),
    "bytes": np.arange(-3, 4, dtype=np.int8),
    "weights": np.linspace(-1, 1, 5, dtype=np.float32),
    "empty": np.empty((0, 24), dtype=np.int8),
}


def mapped_files(array: np.ndarray) -> str:
    """The line of the process's memory map in which an array lies."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return line
    return ""


def test_resolve_file_in_a_folder(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.json").write_text("{}")
    assert resolve_file(tmp_path / "part", "a.json") == str(tmp_path / "part" / "a.json")
    assert resolve_file(str(tmp_path), "a.json", subfolder="part") == str(tmp_path / "part" / "a.json")
    assert resolve_file(tmp_path, "a.json", required=False) is None


def test_resolve_file_names_what_is_missing_and_where(tmp_path):
    refused(f"{re.escape(str(tmp_path))}.*b.json", resolve_file, tmp_path, "b.json", error=FileNotFoundError)
    # A missing folder is not an id of the Hub.
    refused("nowhere", resolve_file, tmp_path / "nowhere", "config.json", error=FileNotFoundError)


def test_resolve_file_asks_the_hub_for_anything_that_is_no_folder(monkeypatch):
    seen = {}

    def cached_file(name, filename, **kwargs):
        seen.update(kwargs, name=name, filename=filename)
        return "/cache/a.json"

    monkeypatch.setattr("transformers.utils.cached_file", cached_file)
    assert resolve_file("someone/model", "a.json", revision="v1", token=None) == "/cache/a.json"
    assert seen["name"] == "someone/model" and seen["filename"] == "a.json" and seen["revision"] == "v1"
    assert "token" not in seen
    assert seen["_raise_exceptions_for_missing_entries"] is True
    resolve_file("someone/model", "a.json", required=False)
    assert seen["_raise_exceptions_for_missing_entries"] is False


def test_atomic_write_makes_folders_and_an_ordinary_file(tmp_path):
    path = tmp_path / "new" / "deeper" / "file.txt"
    with atomic_write(path) as temporary:
        assert not path.exists()
        Path(temporary).write_text("done")
    assert path.read_text() == "done"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert os.listdir(path.parent) == ["file.txt"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="in the middle"), atomic_write(path) as temporary:
        Path(temporary).write_text("half")
        raise RuntimeError("in the middle")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_json_round_trip(tmp_path):
    content = {"name": "tab\t newline\n ünïcode 漢字", "numbers": [1, 2.5, None]}
    write_json(tmp_path / "a.json", content)
    assert read_json(tmp_path / "a.json") == content
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"no": object()})
    assert read_json(tmp_path / "a.json") == content


@pytest.mark.parametrize("damaged", ["", '{"names": ["a', "\ud800"])
def test_damaged_json_is_named(tmp_path, damaged):
    path = tmp_path / "labels.json"
    path.write_bytes(damaged.encode("utf-8", "surrogatepass"))
    refused("labels.json", read_json, path)


def test_tensors_round_trip_bit_equal(tmp_path):
    save_tensors(tmp_path / "a.safetensors", TENSORS, "linear ranker", {"loss": "logistic"})
    tensors, metadata = load_tensors(tmp_path / "a.safetensors", "linear ranker")
    assert metadata == {"format": "pt", "hf_xmc": "linear ranker", "loss": "logistic"}
    assert tensors.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        assert tensors[name].dtype == array.dtype and tensors[name].shape == array.shape
        assert tensors[name].tobytes() == array.tobytes()


def test_arrays_that_are_not_contiguous_are_saved_right(tmp_path):
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    save_tensors(tmp_path / "a.safetensors", {"part": array.T[::2]}, "test")
    assert np.array_equal(load_tensors(tmp_path / "a.safetensors", "test")[0]["part"], array.T[::2])


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
def test_loaded_tensors_are_mapped_and_outlive_the_replacement_of_their_file(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"numbers": np.arange(100_000)}, "test")
    numbers = load_tensors(path, "test")[0]["numbers"]
    assert str(path) in mapped_files(numbers)
    save_tensors(path, {"numbers": np.zeros(5)}, "test")
    assert np.array_equal(numbers, np.arange(100_000))


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "pt", "hf_xmc": "linear ranker"}])
def test_other_kinds_of_safetensors(tmp_path, metadata):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata=metadata)
    refused("model.safetensors.*label tree", load_tensors, tmp_path / "model.safetensors", "label tree")


def test_missing_truncated_and_damaged_files(tmp_path):
    path = tmp_path / "a.safetensors"
    refused(path.name, load_tensors, path, "label tree", error=FileNotFoundError)
    save_tensors(path, TENSORS, "label tree")
    whole = path.read_bytes()
    truncated = [whole[:length] for length in (0, 5, 8, 40, len(whole) // 2, len(whole) - 1)]
    header = json.dumps({"x": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}).encode()
    for content in (*truncated, b"PK a zip file", b"\xff" * 100, struct.pack("<Q", len(header)) + header):
        path.write_bytes(content)
        refused(path.name, load_tensors, path, "label tree")


def test_failed_save_keeps_the_old_tensors(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, TENSORS, "test")
    with pytest.raises(TypeError):
        save_tensors(path, TENSORS, "test", {"depth": 3})  # type: ignore[dict-item]
    assert load_tensors(path, "test")[0].keys() == TENSORS.keys()
    assert os.listdir(tmp_path) == ["a.safetensors"]


# ---- Shards ----

NAME, KIND = "ranker.safetensors", "linear ranker"
SHARDED = {name: np.arange(size, dtype=np.int64) + size for name, size in (("a", 100), ("b", 300), ("c", 10))}


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
    save_sharded(tmp_path, NAME, SHARDED, KIND, {"loss": "logistic"}, limit)
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
    tensors, metadata, paths = load_sharded(tmp_path, NAME, KIND)
    assert metadata["loss"] == "logistic" and tensors.keys() == SHARDED.keys()
    assert all(np.array_equal(tensors[key], SHARDED[key]) for key in SHARDED)


@pytest.mark.parametrize("before, after", [("1KB", "50GB"), ("50GB", "1KB"), ("1KB", 3279)])
def test_nothing_is_left_of_what_was_there(tmp_path, before, after):
    (tmp_path / "ranker_tree.safetensors").write_bytes(b"another part")
    save_sharded(tmp_path, NAME, SHARDED, KIND, max_shard_size=before)
    tensors, _, _ = load_sharded(tmp_path, NAME, KIND)
    save_sharded(tmp_path, NAME, {**SHARDED, "c": np.zeros(3)}, KIND, max_shard_size=after)
    assert np.array_equal(load_sharded(tmp_path, NAME, KIND)[0]["c"], np.zeros(3))
    assert (tmp_path / "ranker_tree.safetensors").exists()
    assert np.array_equal(tensors["b"], SHARDED["b"])  # what was mapped before stays readable
    index = tmp_path / index_name(NAME)
    used = {index.name, *json.loads(index.read_text())["weight_map"].values()} if index.exists() else {NAME}
    assert set(sharded_files(tmp_path, NAME)) == used and (NAME in used) == (after != "1KB")


def test_damage_is_named(tmp_path):
    save_sharded(tmp_path, NAME, SHARDED, KIND, {"tree": "x"}, "1KB")
    second = tmp_path / "ranker-00002-of-00002.safetensors"
    save_tensors(second, {"a": SHARDED["a"], "c": SHARDED["c"]}, KIND, {"tree": "y"})
    refused("another model", load_sharded, tmp_path, NAME, KIND)
    save_tensors(second, {"a": SHARDED["a"], "other": SHARDED["c"]}, KIND, {"tree": "x"})
    refused("lack the arrays c", load_sharded, tmp_path, NAME, KIND)
    second.unlink()
    refused(second.name, load_sharded, tmp_path, NAME, KIND, error=FileNotFoundError)


def test_equal_content_makes_equal_files(tmp_path):
    for name in "xy":
        metadata = {key: "1" for key in ("zeta", "alpha", "beta", "gamma", "delta")}
        save_tensors(tmp_path / name, SHARDED, KIND, metadata)
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

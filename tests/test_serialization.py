"""Files: finding, writing whole or not at all, and the checks on reading."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hf_xmc.serialization import atomic_write, load_tensors, read_json, resolve_file, save_tensors, write_json

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
    with pytest.raises(FileNotFoundError, match=f"no `b.json` in the folder `{re.escape(str(tmp_path))}`"):
        resolve_file(tmp_path, "b.json")


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
    with pytest.raises(ValueError, match="labels.json` is not valid JSON .* save or download it again"):
        read_json(path)


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


def test_other_kind_of_file(tmp_path):
    save_tensors(tmp_path / "tree.safetensors", TENSORS, "label tree")
    with pytest.raises(ValueError, match="tree.safetensors` is not a linear ranker file of hf_xmc.*'label tree'"):
        load_tensors(tmp_path / "tree.safetensors", "linear ranker")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_foreign_safetensors(tmp_path, metadata):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata=metadata)
    with pytest.raises(
        ValueError, match="model.safetensors` is not a label tree file of hf_xmc: its header says None"
    ):
        load_tensors(tmp_path / "model.safetensors", "label tree")


def test_truncated_anywhere(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, TENSORS, "label tree")
    whole = path.read_bytes()
    for length in [0, 5, 8, 40, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="a.safetensors` cannot be read as safetensors .*truncated or foreign"):
            load_tensors(path, "label tree")


def test_not_safetensors_at_all(tmp_path):
    path = tmp_path / "a.safetensors"
    header = json.dumps({"x": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}).encode()
    for content in [b"PK\x03\x04 a zip file, perhaps", b"\xff" * 100, struct.pack("<Q", len(header)) + header]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="truncated or foreign"):
            load_tensors(path, "label tree")


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing.safetensors"):
        load_tensors(tmp_path / "nothing.safetensors", "label tree")


def test_failed_save_keeps_the_old_tensors(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, TENSORS, "test")
    with pytest.raises(TypeError):
        save_tensors(path, TENSORS, "test", {"depth": 3})  # type: ignore[dict-item]
    assert load_tensors(path, "test")[0].keys() == TENSORS.keys()
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_missing_folder_is_no_hub_id(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no folder `.*nowhere`, and a Hub id it cannot be"):
        resolve_file(tmp_path / "nowhere", "config.json")

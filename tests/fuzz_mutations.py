"""Random changes of the files of a model or dataset, see `fuzz_models.py`."""

from __future__ import annotations

import json
import math
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

# Numbers that break what is not checked.
NUMBERS = (0, 1, -1, 2, 7, 63, 127, 255, 1 << 16, (1 << 31) - 1, 1 << 31, -(1 << 31), (1 << 63) - 1, -(1 << 63), 10**9)
FLOATS = (0.0, -1.0, 1e-38, 1e30, 3e38, -3e38, float("inf"), float("-inf"), float("nan"))
VALUES = (
    *NUMBERS, *FLOATS, 10**30, None, True, "", "x", "../x", "/etc/passwd", "word", [], {}, [0], [-1], ["a"], {"a": 1},
)  # fmt: skip
# Name of a file beside the folder of a model, which a hostile model could open.
BAIT = "bait"
NAMES = (
    "../model", f"../{BAIT}", "..", "/etc", "/etc/passwd", "a/b", "", ".", "member-1/..", "C:\\x", "\0",
    "ranker.safetensors",
)  # fmt: skip


def flip_bytes(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        return "nothing"
    # Headers are a small part of a file, and the most interesting one.
    end = len(content) if rng.random() < 0.6 else min(len(content), 2000)
    places = [rng.randrange(end) for _ in range(rng.choice((1, 1, 2, 8, 64)))]
    for place in places:
        content[place] = rng.choice((rng.randrange(256), content[place] ^ (1 << rng.randrange(8)), 0, 255))
    path.write_bytes(content)
    return f"bytes {places[:4]}"


def truncate(path: Path, rng: random.Random) -> str:
    size = path.stat().st_size
    kept = rng.choice((0, 1, 8, size // 2, max(size - 1, 0), rng.randrange(size + 1)))
    content = path.read_bytes()[:kept]
    if rng.random() < 0.2:
        content += rng.randbytes(rng.choice((1, 8, 1000)))
    path.write_bytes(content)
    return f"cut to {kept} of {size}"


def _read_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def _write_safetensors(path: Path, header: dict[str, Any], body: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def edit_header(path: Path, rng: random.Random) -> str:
    """Changes metadata, a dtype, a shape or the offsets in the header of a safetensors file."""
    header, body = _read_safetensors(path)
    metadata = header.get("__metadata__", {})
    names = [name for name in header if name != "__metadata__"]
    what = rng.choice(("metadata", "metadata", "dtype", "shape", "rename", "offsets", "drop"))
    if what == "metadata" and metadata:
        key = rng.choice(sorted(metadata))
        metadata[key] = str(rng.choice((*VALUES, rng.randrange(10**6)))) if rng.random() < 0.9 else metadata.pop(key)
        return f"metadata {key}={metadata[key]!r:.30}"
    name = rng.choice(names)
    entry = header[name]
    if what == "dtype":
        entry["dtype"] = rng.choice(("I64", "I32", "U32", "F32", "F16", "BF16", "I8", "U8", "BOOL", "F64", "F8_E4M3"))
    elif what == "shape":
        shape = entry["shape"]
        entry["shape"] = rng.choice((shape[::-1], [1, *shape], [math.prod(shape)], [], [0], [-1], [1 << 62, 4]))
    elif what == "rename":
        other = rng.choice((rng.choice(names), name + "x", "x." + name, "embedding"))
        header[other] = header.pop(name)
    elif what == "offsets":
        entry["data_offsets"] = [rng.choice((0, *entry["data_offsets"], *NUMBERS)) for _ in range(2)]
    else:
        del header[name]
    _write_safetensors(path, header, body)
    return f"{what} of {name}"


def edit_values(path: Path, rng: random.Random) -> str:
    """Changes values of an array in a file that stays valid."""
    header, body = _read_safetensors(path)
    content = bytearray(body)
    name = rng.choice([name for name in header if name != "__metadata__"])
    begin, end = header[name]["data_offsets"]
    kinds = {"I64": "<i8", "I32": "<i4", "F32": "<f4", "F16": "<f2", "I8": "i1", "U8": "u1", "F64": "<f8"}
    dtype = np.dtype(kinds.get(header[name]["dtype"], "u1"))
    values = np.frombuffer(bytes(content[begin:end]), dtype).copy()
    if not len(values):
        return f"{name} is empty"
    if "records" in name and rng.random() < 0.7:  # numbers within bytes
        values = values.view(rng.choice(("<i4", "<f4")))
    for _ in range(rng.choice((1, 1, 1, 3, 20))):
        place = rng.choice((0, len(values) - 1, rng.randrange(len(values))))
        old = values[place]
        new = (
            rng.choice(FLOATS)
            if values.dtype.kind == "f"
            else rng.choice((*NUMBERS, int(old) + 1, int(old) - 1, int(old) * 2, int(values.max()), int(values.min())))
        )
        with np.errstate(all="ignore"):
            values[place] = (
                np.array(new, dtype=object).astype(np.int64).astype(values.dtype)
                if (values.dtype.kind != "f" and -(1 << 63) <= new < 1 << 63)
                else (new if values.dtype.kind == "f" else 0)
            )
    if rng.random() < 0.1:
        rng_np = np.random.default_rng(rng.randrange(1 << 32))
        values = rng_np.permutation(values)
    content[begin:end] = values.tobytes()
    _write_safetensors(path, header, bytes(content))
    return f"values of {name}"


def _places(content: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value in a JSON document, with a limit for long lists."""
    if isinstance(content, dict):
        items: Any = content.items()
    elif isinstance(content, list):
        items = enumerate(content[:50])
    else:
        return
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def edit_json(path: Path, rng: random.Random) -> str:
    """Changes, adds or removes a value of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if rng.random() < 0.03:
        path.write_text(rng.choice(("[" * 100000, "{}", "[]", "null", "1", '"x"', "NaN", '{"a":' * 5000)))
        return "another document"
    places = list(_places(content))
    # Top-level fields as often as all others.
    place = rng.choice([p for p in places if len(p) == 1] if rng.random() < 0.5 else places)
    owner = content
    for key in place[:-1]:
        owner = owner[key]
    old = owner[place[-1]]
    if "weight_map" in place or place[0] == "members":
        owner[place[-1]] = rng.choice((*NAMES, *VALUES, str(path.parents[1] / BAIT)))
    elif rng.random() < 0.15:
        del owner[place[-1]]
        path.write_text(json.dumps(content))
        return f"without {place}"
    elif isinstance(old, int) and rng.random() < 0.5:
        owner[place[-1]] = old + rng.choice((-1, 1, 10, 1000, 10**6, 10**8))
    else:
        owner[place[-1]] = rng.choice(VALUES)
    path.write_text(json.dumps(content))
    return f"{place[:3]}={owner[place[-1]]!r:.30}"


def edit_vocabulary(path: Path, rng: random.Random) -> str:
    """Changes the terms, and the checksum that goes with them."""
    lines = path.read_bytes().split(b"\n")
    what = rng.choice(("drop", "repeat", "garble", "long", "empty", "gap"))
    place = rng.randrange(max(len(lines) - 1, 1))
    if what == "drop":
        del lines[place]
    elif what == "repeat":
        lines[place] = lines[0]
    elif what == "garble":
        lines[place] = rng.randbytes(rng.choice((1, 4, 30))).replace(b"\n", b"")
    elif what == "long":
        lines[place] = b"word01 " * rng.choice((5, 1000))
    elif what == "empty":
        lines[place] = b""
    else:
        lines.insert(place, b"")
    content = b"\n".join(lines)
    path.write_bytes(content)
    tfidf = path.with_name("tfidf.safetensors")
    header, body = _read_safetensors(tfidf)
    header["__metadata__"]["vocabulary_crc32"] = str(zlib.crc32(content))
    _write_safetensors(tfidf, header, body)
    return what


def edit_lines(path: Path, rng: random.Random) -> str:
    """Drops, repeats, joins or exchanges lines of a text file, or words of them."""
    lines = path.read_bytes().split(b"\n")
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    what = rng.choice(("drop", "repeat", "join", "exchange", "words", "long"))
    if what == "drop":
        del lines[one]
    elif what == "repeat":
        lines.insert(other, lines[one])
    elif what == "join":
        lines[one : one + 2] = [b"".join(lines[one : one + 2])]
    elif what == "exchange":
        lines[one], lines[other] = lines[other], lines[one]
    elif what == "words":
        words, others = lines[one].split(b" "), lines[other].split(b" ")
        words[rng.randrange(len(words))] = rng.choice(others)
        lines[one] = b" ".join(words)
    else:
        lines[one] = lines[one] * rng.choice((2, 1000))
    path.write_bytes(b"\n".join(lines))
    return f"{what} {one} {other}"


def link_outside(path: Path, rng: random.Random) -> str:
    """Replaces a file by a link to a copy outside."""
    outside = path.parent.parent / f"outside-{path.name}"
    shutil.copyfile(path, outside)
    path.unlink()
    path.symlink_to(outside)
    return "link"


def replace_file(path: Path, rng: random.Random) -> str:
    """Replaces a file by another one of the folder, or removes it."""
    others = [other for other in path.parent.iterdir() if other.is_file() and other != path]
    other = rng.choice(others)
    path.unlink()
    if rng.random() < 0.7:
        shutil.copyfile(other, path)
    return f"replaced by {other.name}"


def mutations_of(path: Path, with_links: bool) -> list[Callable[[Path, random.Random], str]]:
    """The mutations that suit a file, the useful ones several times. Models may not have links, data may."""
    common = [flip_bytes, flip_bytes, truncate, replace_file, *([link_outside] if with_links else [])]
    if path.suffix == ".safetensors":
        return [*common, *[edit_header] * 4, *[edit_values] * 10]
    if path.suffix == ".json":
        return [*common, *[edit_json] * 8]
    if path.name == "tfidf_vocab.txt":
        return [*common, *[edit_vocabulary] * 4]
    if path.suffix in (".csv", ".jsonl", ".tsv", ".ttl", ".rdf"):
        return [*common, *[edit_lines] * 5]
    return common

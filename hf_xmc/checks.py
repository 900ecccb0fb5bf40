"""
Checks of the files of a model, which may come from a stranger.

The compiled loops trust the arrays that they follow. So each array is checked once when it is loaded, in loops that
are compiled and threaded themselves. A file that does not follow the format is an error that names file, array and
position.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from .kernels_check import first_beyond, first_descent, first_not_finite, first_outside
from .serialization import load_sharded, load_tensors, resolve_file
from .utils import available_cores

if TYPE_CHECKING:
    from .label_tree import LabelTree

# Weights beyond it, which no training gives, would overflow in float32 and make scores that are not numbers.
MAX_WEIGHT = 1e12
ADVICE = "Save or download it again."

# Elements that a thread checks at a time.
_PER_TASK = 1 << 20
_Number = TypeVar("_Number", int, float)


def first_fault(check: Callable[[int, int], int], size: int) -> int:
    """Returns the first position within `size` at which `check(begin, end)` finds a fault, or -1; threaded."""
    starts = range(0, size, _PER_TASK)
    if len(starts) <= 1:
        block = int(check(0, size))
    else:
        with ThreadPoolExecutor(available_cores()) as pool:
            found = pool.map(lambda start: int(check(start, min(start + _PER_TASK, size))), starts)
            block = next((position for position in found if position >= 0), -1)
    return block if block < 0 else next(i for i in range(block, size) if check(i, i + 1) >= 0)


class CheckedFile:
    """
    The arrays and settings of one part of a model. Its methods return them checked, or raise a `ValueError`.

    `path` is the file, or the file that the shards stand for; `paths` has the shard of each array.
    """

    def __init__(
        self,
        path: str,
        tensors: Mapping[str, np.ndarray],
        metadata: Mapping[str, str],
        paths: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self.tensors, self.metadata = path, tensors, metadata
        self._paths = paths or {}

    @classmethod
    def open(cls, name_or_path: str | os.PathLike, filename: str, kind: str, **hub_kwargs: Any) -> CheckedFile:
        """Opens one file; the arguments are those of [`load_sharded`]."""
        path = str(resolve_file(name_or_path, filename, **hub_kwargs))
        return cls(path, *load_tensors(path, kind))

    @classmethod
    def open_sharded(cls, name_or_path: str | os.PathLike, filename: str, kind: str, **hub_kwargs: Any) -> CheckedFile:
        """Opens a file or its shards; the arguments are those of [`load_sharded`]."""
        tensors, metadata, paths = load_sharded(name_or_path, filename, kind, **hub_kwargs)
        return cls(os.path.join(name_or_path, filename), tensors, metadata, paths)

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raises the error about an array or setting."""
        raise ValueError(f"`{self._paths.get(name, self.path)}` is damaged: `{name}` {problem}. {ADVICE}")

    def check_names(self, names: Collection[str]) -> None:
        """Raises if the file has other arrays as well."""
        for name in self.tensors:
            if name not in names:
                self.fail(name, f"is not one of {', '.join(names)}, the arrays of this version of hf_xmc")

    def check_tree(self, tree: LabelTree) -> None:
        """Raises if the file was saved with another tree."""
        if self.metadata.get("tree") != tree.digest():
            raise ValueError(
                f"`{self.path}` was trained on another tree than {tree}. Save or download all files again."
            )

    def array(self, name: str, dtype: Any, *shape: int | None) -> np.ndarray:
        """Returns an array of this dtype and shape; `None` stands for any length."""
        if name not in self.tensors:
            self.fail(name, "is missing")
        array = self.tensors[name]
        lengths_match = array.ndim == len(shape) and all(
            length is None or length == actual for length, actual in zip(shape, array.shape)
        )
        if array.dtype != dtype or not lengths_match:
            expected = ", ".join("any" if length is None else str(length) for length in shape)
            self.fail(name, f"is {array.dtype} {array.shape}, but must be {np.dtype(dtype)} ({expected})")
        # An array at an odd place of its file would be slow, and the loops would be compiled once more for it.
        return np.require(array, requirements=("C", "A"))

    def offsets(self, name: str, length: int | None, end: int | None) -> np.ndarray:
        """Returns int64 offsets that ascend from 0 to `end`."""
        array = self.array(name, np.int64, length)
        if not len(array) or array[0] != 0 or (end is not None and array[-1] != end):
            ends = f"{array[0]} and {array[-1]}" if len(array) else "nothing"
            self.fail(name, f"begins and ends with {ends}, but must with 0 and {'any number' if end is None else end}")
        at = first_fault(lambda begin, stop: first_descent(array, begin, stop), len(array))
        if at >= 0:
            self.fail(name, f"falls from {array[at - 1]} to {array[at]} at position {at}, but must not fall")
        return array

    def ids(self, name: str, dtype: Any, length: int | None, limit: int) -> np.ndarray:
        """Returns one-dimensional numbers from 0 to `limit` (exclusive)."""
        array = self.array(name, dtype, length)
        at = first_fault(lambda begin, end: first_outside(array, begin, end, limit), len(array))
        if at >= 0:
            self.fail(name, f"has {array[at]} at position {at}, which is outside 0..{limit - 1}")
        return array

    def weights(self, name: str, dtype: Any, *shape: int | None) -> np.ndarray:
        """Returns finite float32 or float16 numbers of an absolute value up to `MAX_WEIGHT`."""
        array = self.array(name, dtype, *shape)
        flat = array.reshape(-1)
        if array.dtype == np.float16:
            bits = flat.view(np.uint16)
            at = first_fault(lambda begin, end: first_not_finite(bits, begin, end), len(flat))
        else:
            bound = np.float32(MAX_WEIGHT)
            at = first_fault(lambda begin, end: first_beyond(flat, begin, end, bound), len(flat))
        if at >= 0:
            place = ", ".join(str(int(index)) for index in np.unravel_index(at, array.shape))
            self.fail(name, f"has {flat[at]} at position {place}; it must be finite and not above {MAX_WEIGHT:g}")
        return array

    def number(self, name: str, low: _Number, high: _Number, default: _Number | None = None) -> _Number:
        """Returns a number of the metadata, an integer if `low` is one, that is within `low..high`."""
        text = self.metadata.get(name, default)
        try:
            value = type(low)(text)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            self.fail(name, f"is {text!r:.80}, which is not a number")
        if not low <= value <= high:
            self.fail(name, f"is {value}, which is outside {low}..{high}")
        return value

    def choice(self, name: str, choices: Any) -> str:
        """Returns a text of the metadata that is one of `choices`."""
        text = self.metadata.get(name)
        if text not in choices:
            self.fail(name, f"is {text!r:.80}, which is not one of {', '.join(choices)}")
        return text  # type: ignore[return-value]

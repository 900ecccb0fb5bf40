"""Arrays beside memory that cannot be read or written: a step beyond them ends the process with SIGSEGV."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PROT_NONE = 0


def beside_guard(array: np.ndarray, edge: str, writable: bool = True) -> np.ndarray:
    """
    Returns a copy of an array in pages of its own, which are not freed before the process ends.

    Args:
        array (`np.ndarray`):
            The array.
        edge (`str`):
            Whether its first (`"begin"`) or last byte (`"end"`) is at the border of the pages that can be used.
        writable (`bool`, *optional*, defaults to `True`):
            Whether writing into its pages is allowed; otherwise it ends the process, too.
    """
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    start = _libc.mmap(None, size + 2 * page, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert start not in (None, ctypes.c_void_p(-1).value)
    inner = start + page
    if size:
        assert _libc.mprotect(inner, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    first = inner if edge == "begin" else inner + size - array.nbytes
    copy = np.frombuffer((ctypes.c_byte * array.nbytes).from_address(first), array.dtype).reshape(array.shape)
    copy[...] = array
    if size and not writable:
        assert _libc.mprotect(inner, size, mmap.PROT_READ) == 0
    return copy

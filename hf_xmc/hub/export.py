"""Self-contained copies of models: with the code that loads them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ..remote_code import add_code
from ..serialization import new_folder
from .published_files import check_saved_model, publishable_files


def export_model(folder: str | os.PathLike, output: str | os.PathLike) -> list[str]:
    """
    Copies a saved model into a new folder, with the code that loads it where this package is not installed.

    Args:
        folder (`str` or `os.PathLike`):
            Folder of a saved model.
        output (`str` or `os.PathLike`):
            Folder to make; an existing one must be empty.

    Returns:
        `list[str]`: the files of the copy.
    """
    folder, output = Path(folder), Path(output)
    check_saved_model(folder)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"`{output}` exists and is not empty. Choose another folder for the copy.")
    with new_folder(output) as temporary:
        for name in publishable_files(folder):
            copy = Path(temporary, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, copy)
        add_code(temporary)
    return publishable_files(output)

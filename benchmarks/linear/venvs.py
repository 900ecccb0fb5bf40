"""One virtual environment per system, made on first use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

LOCATION = "HF_XMC_BENCH_VENVS"
# XR-Linear and the TF-IDF of libpecos import without its transformer half, so torch and transformers stay out.
RECIPES: dict[str, list[list[str]]] = {
    "pecos": [["--no-deps", "libpecos==1.2.8"], ["numpy<2", "scipy<1.14", "scikit-learn"]],
    "omikuji": [["omikuji==0.5.2", "numpy", "scipy"]],
    "napkinxc": [["napkinxc==0.7.2", "numpy", "scipy"]],
}


def venvs_folder() -> Path:
    """Folder of the environments: `HF_XMC_BENCH_VENVS`, or ``benchmarks/.venvs``."""
    default = Path(__file__).resolve().parents[1] / ".venvs"
    return Path(os.environ.get(LOCATION) or default)


def python_of(name: str) -> Path:
    """Interpreter of a system's environment, which is made if it is not there; hf_xmc runs in the present one."""
    if name == "hf-xmc":
        return Path(sys.executable)
    folder = venvs_folder() / name
    marker = folder / "complete"
    if not marker.is_file():
        _make(name, folder)
        marker.touch()
    return folder / "bin" / "python"


def freeze(name: str) -> list[str]:
    """Packages of an environment with their versions."""
    command = [str(python_of(name)), "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def _make(name: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    ignore = folder.parent / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")
    subprocess.run([_base_python(), "-m", "venv", "--clear", str(folder)], check=True)
    for packages in RECIPES[name]:
        subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *packages], check=True)


def _base_python() -> str:
    # The peers have wheels up to Python 3.12 ; hf_xmc itself runs on newer ones too.
    if sys.version_info < (3, 13):
        return sys.executable
    for version in ("3.12", "3.11", "3.10"):
        found = shutil.which(f"python{version}")
        if found:
            return found
    raise FileNotFoundError(
        "libpecos and omikuji have no wheels for Python 3.13 or newer: install Python 3.10, 3.11 or 3.12."
    )

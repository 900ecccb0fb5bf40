"""Papers of the methods."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Method → its name as its authors write it, and the key of its paper in `citations.bib`.
METHODS = {
    "xr-transformer": ("XR-Transformer", "zhang2021fast"),
    "x-transformer": ("X-Transformer", "chang2020taming"),
    "lightxml": ("LightXML", "jiang2021lightxml"),
    "aplc-xlnet": ("APLC-XLNet", "ye2020pretrained"),
    "xr-linear": ("XR-Linear", "yu2022pecos"),
    "parabel": ("Parabel", "prabhu2018parabel"),
    "bonsai": ("Bonsai", "khandagale2020bonsai"),
    "knn": ("k nearest neighbours", "cover1967nearest"),
    "dismec": ("DiSMEC", "babbar2017dismec"),
}


@dataclass(frozen=True)
class Paper:
    """
    The publication to cite for a method.

    Args:
        name (`str`): Name of the method as its authors write it.
        bibtex (`str`): BibTeX entry.
    """

    name: str
    bibtex: str


def paper_of(method: str | None) -> Paper | None:
    """Returns the paper of a method or of a variant such as `xr-transformer-ensemble`; `None` if it has no paper."""
    matching = [name for name in METHODS if method == name or (method or "").startswith(f"{name}-")]
    if not matching:
        return None
    name, key = METHODS[max(matching, key=len)]
    return Paper(name, _entries()[key])


@cache
def _entries() -> dict[str, str]:
    """Returns the entries of the BibTeX file by key."""
    text = Path(__file__).with_name("citations.bib").read_text(encoding="utf-8")
    return {match[1]: match[0] for match in re.finditer(r"^@\w+\{(\w+),.*?^\}$", text, re.MULTILINE | re.DOTALL)}

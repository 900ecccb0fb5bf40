"""
Writes the measured results into the table of recipes/README.md.

Run the recipes first (each leaves `test_results.json` and `training_record.json` beside its model), then::

    python scripts/update_recipe_results.py models
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "recipes" / "README.md"
ROW = re.compile(r"^\| `(?P<data>[\w-]+)/(?P<method>[\w-]+)` \| (?P<command>`[^`]+`) \|.*$", re.M)


def main(models: Path) -> None:
    """Replaces the rows whose recipe has a result in `models`; the others stay as they are."""

    def row(match: re.Match[str]) -> str:
        folder = models / f"{match['data']}-{match['method']}"
        files = folder / "test_results.json", folder / "training_record.json"
        if not all(file.is_file() for file in files):
            return match[0]
        results, record = (json.loads(file.read_text(encoding="utf-8")) for file in files)
        percent = {name: f"{100 * value:.2f}" for name, value in results["metrics"].items()}
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) / 1e6
        cells = [
            f"`{match['data']}/{match['method']}`",
            match["command"],
            " / ".join(percent[f"P@{k}"] for k in (1, 3, 5)),
            percent["nDCG@5"],
            percent["PSP@5"],
            f"{record['seconds']:.0f} s",
            f"{size:.0f} MB",
        ]
        return f"| {' | '.join(cells)} |"

    text = README.read_text(encoding="utf-8")
    README.write_text(ROW.sub(row, text), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))

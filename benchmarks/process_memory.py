"""
Peak memory of each process of a command: all that is mapped, and what no other process shares.

`python -m benchmarks.process_memory -- torchrun --nproc_per_node 2 -m hf_xmc train ...` runs the command, looks at the
Python processes below it four times a second (Linux only) and prints a table at the end.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def children(process: int) -> list[int]:
    """The processes below one, at any depth."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *children(int(child))]
    return found


def memory(process: int) -> dict[str, int]:
    """Bytes of a process: resident, its part of what is shared, and private."""
    sizes = dict.fromkeys(("Rss", "Pss", "Private_Clean", "Private_Dirty"), 0)
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        name = line.split(":")[0]
        if name in sizes:
            sizes[name] = int(line.split()[1]) * 1024
    return {
        "resident": sizes["Rss"],
        "share": sizes["Pss"],
        "private": sizes["Private_Clean"] + sizes["Private_Dirty"],
    }


def main() -> None:
    """Runs the command and prints the table."""
    command = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    if not command:
        raise SystemExit(__doc__)
    peaks: dict[int, dict[str, int]] = {}
    with subprocess.Popen(command) as run:
        while run.poll() is None:
            for process in [run.pid, *children(run.pid)]:
                try:
                    now = memory(process)
                except OSError:  # it has just ended
                    continue
                peak = peaks.setdefault(process, dict.fromkeys(now, 0))
                peaks[process] = {name: max(peak[name], now[name]) for name in now}
            time.sleep(0.25)
    print("\n| process | resident, MB | share of what is mapped, MB | private, MB |\n|---:|---:|---:|---:|")
    for process, peak in peaks.items():
        print(f"| {process} | " + " | ".join(f"{value / 1e6:,.0f}" for value in peak.values()) + " |")
    raise SystemExit(run.returncode)


if __name__ == "__main__":
    main()

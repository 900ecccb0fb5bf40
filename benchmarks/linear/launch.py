"""Runs one command and measures it from outside; standard library only, run by a bare interpreter.

Usage: ``python -I -S launch.py LOG TIMEOUT COMMAND...`` writes the command's output to LOG and prints one JSON line.

It is a program of its own because Linux starts a child's peak memory at the size of the process that forked it: a
harness which holds matrices would put its own memory into everybody's figures.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time


def machine_cpu_s() -> tuple[float, float]:
    """Busy and stolen CPU seconds of the whole machine since boot."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _wait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / tick, steal / tick


def main(log: str, timeout: int, command: list[str]) -> None:
    """Runs the command to its end, or kills it after `timeout` seconds (0: never)."""
    busy, stolen = machine_cpu_s()
    start = time.perf_counter()
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)

        def stop(signum: int, frame: object) -> None:
            os.killpg(process.pid, signal.SIGKILL)

        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        signal.alarm(timeout)
        _, status, usage = os.wait4(process.pid, 0)
        signal.alarm(0)
    wall_s = time.perf_counter() - start
    cpu_s = usage.ru_utime + usage.ru_stime
    busy_after, stolen_after = machine_cpu_s()
    answer = {
        "status": os.waitstatus_to_exitcode(status),
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "peak_rss_mb": usage.ru_maxrss / 1024,
        "others_cpu_s": max(0.0, busy_after - busy - cpu_s),
        "stolen_cpu_s": stolen_after - stolen,
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])

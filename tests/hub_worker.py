"""
A process that runs code snippets, because `huggingface_hub` reads its settings on import and importing takes seconds.

Run as a program, this file is the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

FORBID_PACKAGE = "FORBID_HF_XMC"


class Worker:
    """
    Starts and controls the process.

    Args:
        environment: Environment variables, such as those of `LocalHub.environment`.
        log: File for the output of the process.
        without_package: Whether importing hf_xmc fails in the process.
    """

    def __init__(self, environment: dict[str, str], log: Path, without_package: bool = False) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
        if without_package:
            environment[FORBID_PACKAGE] = "1"
        self.log = log
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            env=environment,
            text=True,
            cwd=log.parent,
        )

    def run(self, code: str, **values: Any) -> Any:
        """Runs a snippet with `values` as variables and returns its `result`; its errors become `RuntimeError`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"code": code, "values": values}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"The process has ended:\n{self.log.read_text()[-3000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def assert_same_tags(tagged: list[list[Any]], expected: list[list[Any]]) -> None:
    """
    Compares labels exactly and scores nearly, because matrix products in another process may round differently.

    Rows contain pairs or entries of the pipeline.
    """
    import pytest  # not needed in the process

    for rows, others in zip(tagged, expected, strict=True):
        pairs, other_pairs = (
            [tuple(tag.values() if isinstance(tag, dict) else tag) for tag in row] for row in (rows, others)
        )
        assert [label for label, _ in pairs] == [label for label, _ in other_pairs]
        assert [score for _, score in pairs] == pytest.approx([score for _, score in other_pairs], rel=1e-5)


class _Refuse:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "hf_xmc":
            raise ModuleNotFoundError(f"No module named {name!r} (refused by the test)")


def _serve() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    if os.environ.get(FORBID_PACKAGE):
        sys.meta_path.insert(0, _Refuse())  # type: ignore[arg-type]
    for line in sys.stdin:
        task = json.loads(line)
        variables = dict(task["values"])
        try:
            exec(compile(task["code"], "<snippet>", "exec"), variables)
            answer = {"result": variables.get("result")}
        except BaseException as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of the tests
    _serve()

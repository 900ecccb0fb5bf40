"""
A process that runs snippets one after the other: `huggingface_hub` reads its settings when it is imported, and
importing takes seconds. Run as a program it is the process itself.
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
    The process, seen from the tests.

    Args:
        environment: Variables, such as those of `LocalHub.environment`.
        log: File for what the process prints.
        without_package: Whether hf_xmc cannot be imported there.
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
        """What the snippet assigns to `result`; the values are variables of it. An error there is an error here."""
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
    The same labels in the same order, as pairs or as entries of the pipeline.

    Their scores are only nearly the same: matrix products in another process may round otherwise.
    """
    import pytest  # the process itself does without

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
    sys.path.pop(0)  # the tests' own folder
    _serve()

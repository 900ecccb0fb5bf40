"""
Kills a training, an upload and a prediction at random moments and resumes them until they end. The model, the
repository and the predictions must equal those of an uninterrupted run, to the last bit.

`python tests/kills.py --kills 30` prints each kill and what was compared. `test_processes.py` runs few kills.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from local_hub import LocalHub

REPO = "me/tagger"
# With the name of an objective in place of a method, see `level_objective`.
METHODS = ("xr-transformer", "label_texts", "lightxml", "xr-linear")


def work(folder: Path, encoder: Path, data: Path, method: str, say: Any) -> None:
    """Trains, uploads and predicts, resuming a killed call. Says what it does."""
    import torch
    from conftest import TOPICS, encoder_arguments, make_documents
    from transformers import TrainerCallback

    from hf_xmc import XMCTrainer, XMCTrainingArguments
    from hf_xmc.cli.main import main

    class SayEvents(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            say(f"step {state.global_step + 1}")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            say(f"after step {state.global_step}")  # a checkpoint may follow

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            for name in logs or ():
                if name.endswith("_seconds"):
                    say(f"after {name.removesuffix('_seconds')}")

    torch.set_num_threads(1)
    model = folder / "model"
    if method == "xr-linear":
        args = XMCTrainingArguments(
            str(model), method=method, use_cpu=True, disable_tqdm=True, report_to="none", num_threads=1
        )
    else:
        steps = [3, 4, 5] if method == "xr-transformer" else [12]
        kind = (
            {"level_objective": method, "method": "xr-transformer"} if method == "label_texts" else {"method": method}
        )
        args = encoder_arguments(model, level_steps=steps, save_steps=2, level_beam_size=[2], **kind)
    trainer = XMCTrainer(
        model=None if method == "xr-linear" else str(encoder),
        args=args,
        train_dataset=make_documents(600, seed=7),
        callbacks=[SayEvents()],
        label_texts=TOPICS if method == "label_texts" else None,
    )
    trainer.train(resume_from_checkpoint=True)
    say("push")
    trainer.push_to_hub(f"{REPO}-{folder.name}")
    say("predict")
    code = main(["predict", str(model), str(data), "--output", str(folder / "predictions"), "--part-size", "40"])
    assert code == 0
    say("end")


def work_in_child(connection: Any, log: Path, arguments: tuple[Any, ...]) -> None:
    """Runs [`work`], sends its events and writes its output to a file."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    work(*arguments, say=connection.send)


def run(arguments: tuple[Any, ...], log: Path, kill_at: tuple[int, float] | None) -> list[tuple[str, float]] | None:
    """
    Runs [`work`] in a child process.

    Args:
        arguments: Arguments of `work` except `say`.
        log: File for its output.
        kill_at: Index of the event after which to kill it, and the seconds in between.

    Returns:
        The events and their times; `None` if it was killed.
    """
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=work_in_child, args=(writing, log, arguments))
    child.start()
    writing.close()
    stages: list[tuple[str, float]] = []
    due: float | None = None
    with contextlib.suppress(EOFError, OSError):  # the child has ended, perhaps within an event
        while True:
            if not reading.poll(None if due is None else max(0.0, due - time.monotonic())):
                child.kill()
                due = None
                continue
            stages.append((reading.recv(), time.monotonic()))
            if kill_at is not None and len(stages) - 1 == kill_at[0]:
                due = time.monotonic() + kill_at[1]
    child.join()
    if child.exitcode == -signal.SIGKILL:
        return None
    if child.exitcode:
        raise AssertionError(f"The run ended with {child.exitcode}:\n{log.read_text()[-5000:]}")
    return stages


def check(folder: Path, whole: Path, hub: LocalHub) -> None:
    """Compares the results of an interrupted run with those of an uninterrupted one."""
    from encoder_runs import assert_same_model

    assert_same_model(folder / "model", whole / "model")
    outputs = [
        {path.name: path.read_bytes() for path in (own / "predictions").glob("part-*")} for own in (folder, whole)
    ]
    assert outputs[0] == outputs[1] and outputs[0]
    pushed = [hub.files(f"{REPO}-{own.name}") for own in (folder, whole)]
    assert pushed[0].keys() == pushed[1].keys()
    for name, content in pushed[0].items():
        # The card and the training record contain times and names.
        assert content == pushed[1][name] or not name.endswith((".safetensors", ".txt", ".py")), name
    left = [path.name for path in (folder / "model").iterdir() if path.name.startswith(".")]
    assert left == [], left


def kill_often(kills: int, seed: int, root: Path, encoder: Path, hub: LocalHub, say: Any = print) -> list[str]:
    """
    Kills runs, each method in turn, and compares their results.

    Returns:
        The events after which processes were killed.
    """
    from conftest import make_documents

    generator, killed, rounds = random.Random(seed), [], 0
    data = root / "documents.jsonl"
    make_documents(200, seed=5).to_json(data)
    whole: dict[str, tuple[Path, list[tuple[str, float]]]] = {}
    while len(killed) < kills:
        method = METHODS[rounds % len(METHODS)]
        rounds += 1
        if method not in whole:
            folder = root / f"whole-{method}"
            folder.mkdir()
            stages = run((folder, encoder, data, method), root / "log", None)
            assert stages is not None
            whole[method] = (folder, stages)
        stages = whole[method][1]
        folder = root / f"round-{rounds}-{method}"
        folder.mkdir()
        for _ in range(-(-kills // len(METHODS))):
            index = generator.randrange(len(stages) - 1)
            moment = generator.random() * (stages[index + 1][1] - stages[index][1])
            if run((folder, encoder, data, method), root / "log", (index, moment)) is None:
                killed.append(f"{method}: {stages[index][0]}")
                say(f"killed {moment:.3f} s after the begin of stage {index}, such as {killed[-1]}")
        assert run((folder, encoder, data, method), root / "log", None) is not None
        check(folder, whole[method][0], hub)
        say(f"round {rounds}: model, repository and predictions of {method} are those of a run without kills")
    return killed


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30, help="least number of kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    args = parser.parse_args()
    hub = LocalHub()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= hub.environment(Path(folder, "home"))
        # After the environment is set, which the Hub's client reads when it is imported.
        from conftest import save_tiny_encoder

        encoder = Path(folder, "encoder")
        save_tiny_encoder(encoder)
        killed = kill_often(args.kills, args.seed, Path(folder), encoder, hub)
    hub.close()
    sys.stdout.write(f"{len(killed)} kills in {len(set(killed))} different stages; nothing differed.\n")


if __name__ == "__main__":
    main()

"""PECOS XR-Transformer, trained by its own command line with its defaults and the budget of the benchmark."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from typing import Any

import scipy.sparse as sp

from benchmarks.linear.worker_pecos import top_ids as sort_rows

from .worker_common import Options, Predict, serve, text_file

# With 32 children per node the few thousand labels of EURLEX57K get a tree of two levels. The default, 16, gives three
# and spends a third of the steps on telling two clusters apart.
BRANCHING = 32
LEVELS = 2
SAVE_STEPS = 50


def train(work: str, model: str, threads: int, options: Options) -> dict[str, Any]:
    """Trains and saves, and writes the features of PECOS's ranker (TF-IDF and embedding) beside the model.

    The answer says what was spent on writing these features (``features``) and after them, on the second tree and
    PECOS's own ranker (``ranker``), so that another ranker can take its place.
    """
    from pecos.xmc.xtransformer import train as command
    from pecos.xmc.xtransformer.matcher import TransformerMatcher
    from pecos.xmc.xtransformer.model import XTransformer

    fine_tune_s = timed(TransformerMatcher, "fine_tune_encoder")
    encode_s = timed(TransformerMatcher, "predict")
    marks: dict[str, Mark] = {}
    concatenate, save = TransformerMatcher.concat_features, XTransformer.save

    def concatenate_and_write(*args: Any, **kwargs: Any) -> sp.csr_matrix:
        features = concatenate(*args, **kwargs)
        marks["concatenated"] = Mark()
        folder = features_folder(model)
        os.makedirs(folder, exist_ok=True)
        sp.save_npz(f"{folder}/X.trn.npz", features, compressed=False)
        marks["written"] = Mark()
        return features

    def mark_and_save(self: XTransformer, folder: str) -> None:
        marks["trained"] = Mark()
        save(self, folder)

    TransformerMatcher.concat_features = staticmethod(concatenate_and_write)
    XTransformer.save = mark_and_save
    arguments = command_arguments(work, model, options)
    line = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    command.do_train(command.parse_arguments().parse_args(line))
    if len(fine_tune_s) != LEVELS:
        raise ValueError(f"PECOS fine-tuned {len(fine_tune_s)} levels, so its steps are not {options.steps} in all.")
    ranker = marks["trained"].since(marks["written"])
    parts = {f"fine-tuning {level}": seconds for level, seconds in enumerate(fine_tune_s, start=1)}
    parts |= {f"encoding {level}": seconds for level, seconds in enumerate(encode_s, start=1)}
    return {
        "arguments": {name: value for name, value in arguments.items() if os.sep not in str(value)},
        "parts_s": {**parts, "ranker": ranker["wall_s"]},
        "peak_rss_mb_before_ranker": marks["concatenated"].peak_rss_mb,
        "features": marks["written"].since(marks["concatenated"]),
        "ranker": ranker,
    }


def command_arguments(work: str, model: str, options: Options) -> dict[str, Any]:
    """Arguments of PECOS's training command; what is not named has PECOS's default."""
    level_steps = options.steps // LEVELS
    # Without a validation set PECOS goes on with the last multiple of the saving steps and forgets what came later.
    save_steps = SAVE_STEPS if level_steps % SAVE_STEPS == 0 else level_steps
    return {
        "trn-text-path": text_file(work, "trn"),
        "trn-feat-path": f"{work}/X.trn.npz",
        "trn-label-path": f"{work}/Y.trn.npz",
        "model-dir": model,
        "model-shortcut": options.encoder,
        "use-gpu": "false",
        "seed": 0,
        "truncate-length": options.max_length,
        "batch-size": options.batch_size,
        "nr-splits": BRANCHING,
        "max-steps": level_steps,
        "save-steps": save_steps,
        "logging-steps": 10,
        "batch-gen-workers": 1,
    }


def features_folder(model: str) -> str:
    """Folder for the features of the ranker, laid out as the linear benchmark has it."""
    return f"{model}.features"


class Mark:
    """A moment of this process: wall and CPU seconds and the largest memory so far."""

    def __init__(self) -> None:
        self.wall_s, self.cpu_s = time.perf_counter(), time.process_time()
        self.peak_rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def since(self, earlier: Mark) -> dict[str, float]:
        """Seconds between two moments."""
        return {"wall_s": self.wall_s - earlier.wall_s, "cpu_s": self.cpu_s - earlier.cpu_s}


def timed(owner: type, name: str) -> list[float]:
    """Makes a method note the seconds of each of its calls in the list returned."""
    method: Callable[..., Any] = getattr(owner, name)
    seconds: list[float] = []

    def replacement(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    setattr(owner, name, replacement)
    return seconds


def load(model: str, threads: int, options: Options) -> Predict:
    """Loads encoder and ranker, the ranker in its faster, C++ form. The beam is stored with it."""
    from pecos.xmc.xtransformer.model import XTransformer

    loaded = XTransformer.load(model, is_predict_only=True)

    def predict(texts: list[str], vectors: sp.csr_matrix, top_k: int) -> sp.csr_matrix:
        # By default each call would start four processes to prepare batches, which takes longer than the prediction.
        return loaded.predict(
            texts,
            X_feat=vectors,
            only_topk=top_k,
            batch_size=options.batch_size,
            batch_gen_workers=0,
            threads=threads,
            use_gpu=False,
        )

    return predict


def top_ids(result: sp.csr_matrix, work: str, top_k: int) -> Any:
    """Sorts each row of the score matrix."""
    return sort_rows(result, top_k)


if __name__ == "__main__":
    serve("pecos.xmc.xtransformer.model", train=train, load=load, top_ids=top_ids)

"""What APLC saves by leaving out tails whose gate cannot reach the top k, on real documents."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from hf_xmc import XMCForTextClassification
from hf_xmc.modeling_heads import AdaptiveHead, LevelHead, node_probabilities, search_tails

from .report import table


@torch.inference_mode()
def pruning(
    folder: Path, data: Path, *, documents: int, batch_sizes: tuple[int, ...], top_k: int, turns: int = 9
) -> dict[str, Any]:
    """Milliseconds per document of the search through the heads, with and without pruning, in turns.

    Args:
        folder (`Path`):
            A model trained by `aplc-xlnet`.
        data (`Path`):
            Folder with ``test.parquet``.
        documents (`int`):
            Documents to search for; they are encoded once, outside the clock.
        batch_sizes (`tuple[int, ...]`):
            Documents searched together.
        top_k (`int`):
            Labels to find.
        turns (`int`, *optional*, defaults to 9):
            Turns of each.
    """
    model = XMCForTextClassification.from_pretrained(folder).eval()
    assert model.label_tree is not None
    gates, head = (model.head(level) for level in (model.label_tree.depth - 1, model.label_tree.depth))
    if not isinstance(head, AdaptiveHead) or not isinstance(gates, LevelHead):
        raise ValueError(f"The model in {folder} has no tails: train one with `method=aplc-xlnet`.")
    texts = pq.read_table(data / "test.parquet", columns=["text"])["text"].slice(0, documents).to_pylist()
    vectors = torch.from_numpy(model.featurize(texts).dense)
    loss = model.config.head_loss

    def everything(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best of all labels, each of them computed."""
        above = node_probabilities(gates(part), loss)
        parts = [above[:, : head.num_frequent]]
        for gate, (tail, _, _) in enumerate(head.parts(), start=head.num_frequent):
            parts.append(above[:, gate, None] * node_probabilities(tail(part), loss))
        return torch.cat(parts, dim=1).topk(top_k, dim=1)

    answer: dict[str, Any] = {
        "frequent": head.num_frequent,
        "tails": [end - first for _, first, end in head.parts()],
        "batches": {},
    }
    for batch_size in batch_sizes:
        seconds: dict[str, list[float]] = {"all": [], "pruned": []}
        for _ in range(turns + 1):  # the first warms up
            found = {}
            for name in seconds:
                start = time.perf_counter()
                found[name] = [
                    everything(part) if name == "all" else search_tails(part, gates, head, top_k, loss)
                    for part in vectors.split(batch_size)
                ]
                seconds[name].append(time.perf_counter() - start)
        scores = {name: torch.cat([part[0] for part in parts]) for name, parts in found.items()}
        labels = {name: torch.cat([part[1] for part in parts]) for name, parts in found.items()}
        answer["batches"][str(batch_size)] = {
            **{f"{name}_ms": 1e3 * statistics.median(values[1:]) / len(vectors) for name, values in seconds.items()},
            "ratio": statistics.median(
                pruned / every for pruned, every in zip(seconds["pruned"][1:], seconds["all"][1:], strict=True)
            ),
            # Labels of equal probability may change places.
            "largest_difference": (scores["all"] - scores["pruned"]).abs().max().item(),
            "same_labels": (labels["all"] == labels["pruned"]).float().mean().item(),
        }
    best = scores["all"]
    answer["tails_computed"] = [
        (node_probabilities(gates(vectors), loss)[:, gate] > best[:, -1]).float().mean().item()
        for gate in range(head.num_frequent, head.num_frequent + len(head.tails))
    ]
    return answer


def format_pruning(answer: dict[str, Any]) -> str:
    """Markdown of what was measured."""
    tails = ", ".join(
        f"{size:,} ({100 * share:.1f} % of the documents)"
        for size, share in zip(answer["tails"], answer["tails_computed"], strict=True)
    )
    rows = [
        [
            size,
            *(f"{part[key]:.3f}" for key in ("all_ms", "pruned_ms", "ratio")),
            f"{part['largest_difference']:.1e}",
            f"{100 * part['same_labels']:.2f} %",
        ]
        for size, part in answer["batches"].items()
    ]
    head = [
        "documents together", "all tails, ms per document", "pruned, ms", "ratio", "largest difference", "same labels"
    ]  # fmt: skip
    note = (
        f"{answer['frequent']:,} frequent labels. Tails, and documents whose gate is above the worst of the best: "
        f"{tails}."
    )
    return "\n".join([note, "", *table(head, rows)])

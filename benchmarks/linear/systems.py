"""The systems of the benchmark and the environments, workers and settings they stand for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class System:
    """One system with one setting.

    Args:
        name (`str`):
            Name in tables and on the command line.
        venv (`str`):
            Environment it runs in, see `venvs.py`.
        worker (`str`):
            Module of its worker.
        setting (`str`):
            Setting handed to the worker.
        needs_setup (`bool`, *optional*, defaults to `False`):
            Whether the worker has one-off work to do before training.
    """

    name: str
    venv: str
    worker: str
    setting: str
    needs_setup: bool = False


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System("hf-xmc", "hf-xmc", "worker_hf_xmc", "xr-linear", needs_setup=True),
        # Power, costs and beam as chosen on the validation split of EURLEX57K.
        System(
            "hf-xmc-eurlex57k",
            "hf-xmc",
            "worker_hf_xmc",
            "xr-linear feature_power=1.5 ranker_C=0.7 ranker_negative_cost=3.0 ranker_beam_size=20",
            needs_setup=True,
        ),
        System(
            "hf-xmc-lean",
            "hf-xmc",
            "worker_hf_xmc",
            "xr-linear ranker_train_beam_size=20 ranker_prune_threshold=4e-4 ranker_beam_size=8",
            needs_setup=True,
        ),
        # With some thousand labels as good as the default of 40.
        System("hf-xmc-beam-20", "hf-xmc", "worker_hf_xmc", "xr-linear ranker_beam_size=20", needs_setup=True),
        # The settings of recipes/nvd-products and recipes/gutenberg-lcsh.
        System("hf-xmc-beam-160", "hf-xmc", "worker_hf_xmc", "xr-linear ranker_beam_size=160", needs_setup=True),
        System("hf-xmc-beam-80", "hf-xmc", "worker_hf_xmc", "xr-linear ranker_beam_size=80", needs_setup=True),
        System("hf-xmc-parabel", "hf-xmc", "worker_hf_xmc", "parabel", needs_setup=True),
        System("hf-xmc-bonsai", "hf-xmc", "worker_hf_xmc", "bonsai", needs_setup=True),
        System("hf-xmc-dismec", "hf-xmc", "worker_hf_xmc", "dismec", needs_setup=True),
        System("pecos-default", "pecos", "worker_pecos", "default"),
        System("pecos-published", "pecos", "worker_pecos", "published"),
        System("omikuji-parabel", "omikuji", "worker_omikuji", "parabel", needs_setup=True),
        System("omikuji-bonsai", "omikuji", "worker_omikuji", "bonsai", needs_setup=True),
        System("napkinxc", "napkinxc", "worker_napkinxc", "default"),
    )
}


def find_systems(names: str) -> list[System]:
    """Systems of a comma-separated list."""
    found = []
    for name in filter(None, names.split(",")):
        if name not in SYSTEMS:
            raise ValueError(f"There is no system {name!r}; choose from {', '.join(SYSTEMS)}.")
        found.append(SYSTEMS[name])
    if not found:
        raise ValueError(f"No system named; choose from {', '.join(SYSTEMS)}.")
    return found

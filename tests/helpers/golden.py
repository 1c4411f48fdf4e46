"""The experiment of a golden run: any algorithm with any core on Recall."""

from dataclasses import replace

from bestiary.algos import Apex, Dqn, R2d2, SacDiscrete
from bestiary.config.experiment import Experiment, family
from bestiary.envs import Recall
from bestiary.presets import preset
from bestiary.runtime import Local
from helpers.settings import configure

NARROW = {"hidden": 16, "width": 16, "heads": 2, "layers": 1, "feedforward": 16, "window": 6}


def experiment(algo: str, core: str) -> Experiment:
    base = preset("recall")
    chosen = base.algo if isinstance(base.algo, family("algo")[algo]) else family("algo")[algo]()
    # off-policy algorithms make about an update per round
    if isinstance(chosen, R2d2):
        changes = {"warmup": 300, "updates_per_step": 0.02, "sequence_length": 12, "burn_in": 4}
    elif isinstance(chosen, Dqn | SacDiscrete | Apex):
        changes = {"warmup": 100, "updates_per_step": 0.02}
    else:
        changes = {}
    cls = family("core")[core]
    memory = cls(**{name: value for name, value in NARROW.items() if name in cls.__dataclass_fields__})
    return replace(
        base,
        env=Recall(delay=4),
        algo=configure(chosen, unroll=8, batch_size=8, **changes),
        core=memory,
        runtime=Local(envs=8, threads=1),
    )

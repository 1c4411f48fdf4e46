"""The experiment of a golden run: any algorithm with any core on Recall."""

from dataclasses import replace

from bestiary.algos import R2d2
from bestiary.algos.off_policy import OffPolicy
from bestiary.algos.return_conditioned import ReturnConditioned
from bestiary.config.experiment import Experiment, family
from bestiary.envs import Recall
from bestiary.presets import preset
from bestiary.runtime import Local

NARROW = {"hidden": 16, "width": 16, "heads": 2, "layers": 1, "feedforward": 16, "window": 6}


def experiment(algo: str, core: str) -> Experiment:
    base = preset("recall")
    chosen = base.algo if isinstance(base.algo, family("algo")[algo]) else family("algo")[algo]()
    often = {"warmup": 100, "ratio": 0.02} if isinstance(chosen, OffPolicy) else {}  # about an update per round
    sized = {"batch_size": 8}
    if isinstance(chosen, ReturnConditioned):
        sized = {"replay": replace(chosen.replay, batch_size=8)}
    short = {"window": 12, "burn_in": 4, "warmup": 300} if isinstance(chosen, R2d2) else {}
    cls = family("core")[core]
    memory = cls(**{name: value for name, value in NARROW.items() if name in cls.__dataclass_fields__})
    return replace(
        base,
        env=Recall(delay=4),
        algo=replace(chosen, unroll=8, **(sized | often | short)),
        core=memory,
        runtime=Local(envs=8, threads=1),
    )

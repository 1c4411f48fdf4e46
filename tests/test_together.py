"""Two processes with half a batch each take the step of one with the whole; what happens to one, all hear of."""

import contextlib
import multiprocessing
import os
import pickle
import sys
import time
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.golden import experiment

from bestiary import tree
from bestiary.algos import AlgoConfig
from bestiary.algos.base import Diverged, Learner
from bestiary.algos.return_conditioned.learner import Commanded, CommandLearner
from bestiary.config.experiment import Experiment
from bestiary.config.schema import kebab
from bestiary.errors import UserError
from bestiary.nets.optim import Adam, AdamW
from bestiary.ops.collective import SINGLE_PROCESS
from bestiary.runtime.collective import Distributed, PeerLost, divide, join, meeting
from bestiary.runtime.local import LocalRuntime
from bestiary.types import Batch, Spec, Update

PATIENCE = 60  # seconds that a test waits for a process, busy as the machine may be
UPDATES = 5
OF_EACH = {"q_discrepancy", "state_discrepancy"}  # metrics that are no means over moves

# every algorithm as it is without memory, then with memory, then with what makes its loss another one
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((kebab(algo), "ff", {}) for algo in typing.get_args(AlgoConfig)),
    ("impala", "lstm", {"reduction": "mean", "grad_norm": 0.1, "optimizer": Adam(lr=1e-3)}),
    ("dqn", "ff", {"focus": 1.5, "grad_norm": 0.01, "lr_decay": "linear"}),
    ("r2d2", "gru", {"beta": 1.0}),
    ("sac-discrete", "gru", {"entropy_target": 0.8, "shared_encoder": True, "focus": 1.0, "target_encoder": True}),
    ("udrl", "lstm", {"weighting": "exponential", "normalise": True, "average": 0.9, "optimizer": AdamW(lr=1e-2)}),
    ("udrl", "ff", {"weighting": "exponential", "weigh": "moves", "window": 4}),
    ("rcp", "ff", {"critic": "joint", "source": "peak", "critic_every": 2, "peak_every": 2}),
]


def told(case: tuple[str, str, dict[str, Any]]) -> Experiment:
    algo, core, changes = case
    e = experiment(algo, core)
    size = 60 if isinstance(e.algo, Commanded) else 7  # seven are divided unevenly
    few = {"warmup": 12} if isinstance(e.algo, Commanded) else {}
    return replace(e, algo=replace(e.algo, batch_size=size, **(few | changes)))


class Recorder(LocalRuntime):
    """Keeps what its learner is shown."""

    def recorded(self) -> tuple[Spec, list[Batch]]:
        seen: list[Batch] = []
        update, learner = self.learner.update, self.learner

        def record(batch: Batch) -> Update:
            seen.append(tree.map(torch.clone, batch))
            return update(batch)

        learner.update = record  # type: ignore
        for _ in self:
            if learner.updates >= UPDATES:
                break
        self.close()
        precise = tree.map(lambda x: x.double() if x.is_floating_point() else x, seen)
        enough = [i for i, batch in enumerate(precise) if "survey" not in batch.about][UPDATES - 1]
        return self.spec, precise[: enough + 1]


def fresh(e: Experiment, spec: Spec, seed: int) -> Learner:
    """In double precision, so that what is left of a difference is no rounding."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        return e.algo.learner(e.algo.agent(spec, e.net, e.core), 10_000)
    finally:
        torch.set_default_dtype(torch.float32)


def learnt(learner: Learner, batches: list[Batch]) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    try:
        updates = [learner.update(batch) for batch in batches]
    finally:
        torch.set_default_dtype(torch.float32)
    return {
        "weights": tree.map(torch.clone, dict(learner.agent.state_dict())),
        "learner": learner.state_dict(),
        "metrics": [{k: v.item() for k, v in u.metrics.items()} for u in updates],
        "sent_back": [u.priorities if u.value_targets is None else torch.stack(u.value_targets) for u in updates],
    }


def part_of(batch: Batch, collective: Distributed, joint: bool) -> Batch | None:
    """As if it came from a replay of this process's own."""
    if joint and "survey" in batch.about:  # a joint critic may be shown something in one process alone
        return batch if collective.rank == 0 else None
    mine = divide(batch, collective.size)[collective.rank]
    if mine.weight is None:
        return mine
    most = mine.weight.max()  # such a replay does not know what is heaviest elsewhere
    return mine._replace(weight=mine.weight / most, about={"heaviest": most * batch.about["heaviest"]})


# -- what the processes do ---------------------------------------------------------------------------------


def learn(collective: Distributed, case: Any, spec: Spec, batches: list[Batch]) -> dict[str, Any]:
    learner = fresh(told(case), spec, seed=collective.rank)  # they differ at first
    collective.broadcast_state(learner)
    joint = isinstance(learner, CommandLearner) and learner.cfg.critic == "joint"
    mine = [part_of(batch, collective, joint) for batch in batches]
    return learnt(learner, [batch for batch in mine if batch is not None])


def diverge(collective: Distributed, case: Any, spec: Spec, batches: list[Batch]) -> tuple[str, bool, dict[str, float]]:
    """The last is shown something that is not a number, once."""
    learner = fresh(told(case), spec, seed=collective.rank)
    collective.broadcast_state(learner)
    mine = [divide(batch, collective.size)[collective.rank] for batch in batches]
    step = mine[0].trajectory.step
    bad = step._replace(reward=step.reward * (float("nan") if collective.rank else 1.0))
    before = tree.map(torch.clone, dict(learner.agent.state_dict()))
    said = ""
    try:
        learner.update(mine[0]._replace(trajectory=mine[0].trajectory._replace(step=bad)))
    except Diverged as e:
        said = str(e)
    intact = all(torch.equal(before[k], v) for k, v in learner.agent.state_dict().items())
    return said, intact, learnt(learner, mine[1:2])["metrics"][0]


def lose(collective: Distributed, case: Any, spec: Spec, batches: list[Batch], how: str) -> tuple[str, float]:
    """The last stops after two updates: it dies, or does nothing for a while."""
    learner = fresh(told(case), spec, seed=0)
    collective.broadcast_state(learner)
    mine = [divide(batch, collective.size)[collective.rank] for batch in batches]
    learnt(learner, mine[:2])
    if collective.rank and how == "dies":
        os._exit(1)
    if collective.rank:
        time.sleep(collective.timeout_seconds + 1)
        return "", 0.0
    began = time.monotonic()
    try:
        learner.update(mine[2])
    except PeerLost as e:
        return str(e), time.monotonic() - began
    return "nothing was noticed", 0.0


JOBS = {job.__name__: job for job in (learn, diverge, lose)}


def companion(rank: int, size: int, line: Any) -> None:
    """Does one job after the other, each in a group of its own."""
    torch.set_num_threads(1)
    line.send_bytes(pickle.dumps("ready"))
    while True:
        name, at, timeout, args = pickle.loads(line.recv_bytes())
        collective = join(rank, size, at, timeout_seconds=timeout)
        answer = JOBS[name](collective, *args)
        collective.leave()
        line.send_bytes(pickle.dumps(answer))


class Pair:
    def __init__(self, size: int = 2) -> None:
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(size)]
        self.lines = [here for here, _ in ends]
        self.processes = [
            context.Process(target=companion, args=(rank, size, there), daemon=True)
            for rank, (_, there) in enumerate(ends)
        ]
        for process, (_, there) in zip(self.processes, ends, strict=True):
            process.start()
            there.close()
        assert [self._answer(line) for line in self.lines] == ["ready"] * size

    def do(self, name: str, *args: Any, at: str | None = None, timeout: float = PATIENCE) -> list[Any]:
        """What each answers; None: nothing, it is gone."""
        job = pickle.dumps((name, at or meeting(), timeout, args))
        for line in self.lines:
            line.send_bytes(job)
        return [self._answer(line) for line in self.lines]

    def _answer(self, line: Any) -> Any:
        assert line.poll(PATIENCE), "no answer"
        with contextlib.suppress(EOFError, ConnectionResetError):
            return pickle.loads(line.recv_bytes())

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


# -- one step of all ---------------------------------------------------------------------------------------


def assert_alike(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_alike(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_alike(x, y, f"{where}/{i}")
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9, msg=lambda m: f"{where}: {m}")
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-6, abs=1e-9), where
    else:
        assert a == b, where


def named(case: tuple[str, str, dict[str, Any]]) -> str:
    return "-".join([*case[:2], *case[2]])


@pytest.mark.parametrize("case", CASES, ids=named)
def test_two_with_half_a_batch_each_learn_what_one_learns_from_the_whole(pair, case):
    e = told(case)
    spec, batches = Recorder(e).recorded()
    alone = learnt(fresh(e, spec, seed=0), batches)
    first, second = pair.do("learn", case, spec, batches)

    assert first["weights"].keys() == second["weights"].keys()
    assert all(torch.equal(x, second["weights"][k]) for k, x in first["weights"].items())  # to the last bit
    assert_alike(alone["weights"], first["weights"])
    for each in (first, second):
        assert_alike(alone["learner"], each["learner"])
        metrics = [m for m in alone["metrics"] if m]
        assert len(metrics) == UPDATES
        for whole, told_by_each in zip(metrics, [m for m in each["metrics"] if m], strict=True):
            assert set(whole) == set(told_by_each)
            assert_alike(*({k: m[k] for k in m if k not in OF_EACH} for m in (whole, told_by_each)))
    said = [p for p in alone["sent_back"] if p is not None]
    parts = [[p for p in each["sent_back"] if p is not None] for each in (first, second)]
    for whole, *halves in zip(said, *parts, strict=True):
        assert_alike(whole, torch.cat(halves, -1))
    start = fresh(e, spec, seed=0).agent.state_dict()
    assert any(not torch.allclose(x, alone["weights"][k]) for k, x in start.items())  # something was learnt


def test_they_can_meet_at_a_file(pair, tmp_path):
    spec, batches = Recorder(told(CASES[0])).recorded()
    first, second = pair.do("learn", CASES[0], spec, batches[:1], at=f"file://{tmp_path}/here")
    assert all(torch.equal(x, second["weights"][k]) for k, x in first["weights"].items())


# -- when something goes wrong -----------------------------------------------------------------------------


def test_what_diverges_in_one_ends_the_update_of_all_and_no_more(pair):
    spec, batches = Recorder(told(CASES[0])).recorded()
    first, second = pair.do("diverge", CASES[0], spec, batches)
    assert first[0] == second[0] and "loss of nan" in first[0] and "not applied" in first[0]
    assert first[1] and second[1]  # no weight has changed
    assert first[2] == second[2]  # and they go on together


def test_one_that_is_silent_is_not_waited_for_longer_than_was_said(pair):
    spec, batches = Recorder(told(CASES[0])).recorded()
    (said, seconds), _ = pair.do("lose", CASES[0], spec, batches, "sleeps", timeout=4.0)
    assert "learner 0 of 2: another one is gone, or was silent for 4 s" in said
    assert 3 < seconds < 10


def test_one_that_dies_ends_the_others_at_once():
    spec, batches = Recorder(told(CASES[0])).recorded()
    pair = Pair()
    try:
        (said, seconds), nothing = pair.do("lose", CASES[0], spec, batches, "dies")
        assert "another one is gone" in said and seconds < 10
        assert nothing is None
        pair.processes[1].join(PATIENCE)
        assert pair.processes[1].exitcode == 1
    finally:
        pair.close()


@pytest.mark.parametrize("at", ["127.0.0.1:29400", "tcp://127.0.0.1", "http://127.0.0.1:29400", "file://"])
def test_they_meet_at_a_port_or_a_file(at):
    with pytest.raises(UserError, match="give tcp://host:port or file:///path"):
        join(0, 2, at)


def test_ranks_begin_at_zero():
    with pytest.raises(UserError, match="learner 2 is not one of 2"):
        join(2, 2, "tcp://127.0.0.1:29400")


def test_nobody_is_waited_for_forever(tmp_path):
    began = time.monotonic()
    with pytest.raises(UserError, match=r"learner 0 of 2 met nobody at tcp://127\.0\.0\.1:\d+ within 1 s"):
        join(0, 2, meeting(), timeout_seconds=1)
    with pytest.raises(UserError, match="learner 1 of 2 met nobody"):
        join(1, 2, f"file://{tmp_path}/nobody", timeout_seconds=1)
    assert time.monotonic() - began < 20


def test_a_port_that_is_taken_is_named():
    at = meeting()
    one = join(0, 1, at)
    with pytest.raises(UserError, match="must be new or free"):
        join(0, 1, at)
    one.leave()
    with pytest.raises(PeerLost, match="has left the others"):
        one.all_reduce_sum(torch.ones(1))


def test_a_learner_that_knows_nothing_of_others_is_refused():
    class Hermit:
        pass

    one = join(0, 1, meeting())
    with pytest.raises(UserError, match="Hermit learns alone"):
        one.broadcast_state(Hermit())  # type: ignore
    one.leave()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_listens_beyond_loopback():
    before = listening()
    one = join(0, 1, meeting())
    opened = listening() - before
    assert opened and all(address in ("0100007F", "0" * 24 + "01000000") for address, _ in opened), opened
    one.leave()


def listening() -> set[tuple[str, str]]:
    """(address, inode) of the sockets of this process at which others may call."""
    mine = set()
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(os.readlink(handle))
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {(r[1].split(":")[0], r[9]) for r in rows if r[3] == "0A" and f"socket:[{r[9]}]" in mine}


# -- parts -------------------------------------------------------------------------------------------------


def test_parts_of_a_batch_are_the_batch():
    _, (batch, *_) = Recorder(told(("r2d2", "gru", {}))).recorded()
    parts = divide(batch, 3)
    assert [p.trajectory.action.shape[1] for p in parts] == [2, 2, 3]
    whole = Batch(
        batch.trajectory._replace(
            **{name: tree.cat([getattr(p.trajectory, name) for p in parts], 1) for name in ("step", "action", "aux")},
            **{name: tree.cat([getattr(p.trajectory, name) for p in parts]) for name in ("state", "version")},
        ),
        *(tree.cat([getattr(p, name) for p in parts]) for name in ("keys", "weight", "reached")),
        parts[0].about,
    )
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), whole, batch)
    with pytest.raises(UserError, match="a batch of 7 cannot be divided among 8 learners"):
        divide(batch, 8)


def test_alone_nothing_is_changed():
    x = torch.randn(5)
    assert (
        SINGLE_PROCESS.all_reduce_sum(x) is x
        and SINGLE_PROCESS.all_reduce_max(x) is x
        and SINGLE_PROCESS.all_reduce_gradients(x, []) is x
    )
    assert (SINGLE_PROCESS.fraction, SINGLE_PROCESS.batch_fraction(3), SINGLE_PROCESS.rank, SINGLE_PROCESS.size) == (
        1.0,
        1.0,
        0,
        1,
    )
    assert SINGLE_PROCESS.moments(x) == (5, x.mean(), x.std())

"""Two learners with half a batch each make the update of one learner with the whole batch; failures reach both."""

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
from helpers.settings import configure

from bestiary import tree
from bestiary.algos import AlgoConfig
from bestiary.algos.base import Diverged, Learner
from bestiary.algos.return_conditioned import ReturnConditioned
from bestiary.algos.return_conditioned.learner import ReturnConditionedLearner
from bestiary.config.experiment import Experiment
from bestiary.config.schema import kebab
from bestiary.errors import UserError
from bestiary.nets.optim import Adam, AdamW
from bestiary.ops.collective import SINGLE_PROCESS
from bestiary.runtime.collective import Distributed, PeerLost, join, rendezvous
from bestiary.runtime.local import LocalRuntime
from bestiary.types import Batch, Spec, Update

TIMEOUT = 60  # seconds that a test waits for a process on a busy machine
UPDATES = 5
PER_LEARNER = {"q_discrepancy", "state_discrepancy"}  # metrics that are not means over transitions

# every algorithm with its defaults and without memory, then variants with memory or another loss
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((kebab(algo), "ff", {}) for algo in typing.get_args(AlgoConfig)),
    ("impala", "lstm", {"reduction": "mean", "grad_norm": 0.1, "optimizer": Adam(lr=1e-3)}),
    ("dqn", "ff", {"td_weight_exponent": 1.5, "grad_norm": 0.01, "lr_decay": "linear"}),
    ("r2d2", "gru", {"importance_exponent": 1.0}),
    (
        "sac-discrete",
        "gru",
        {"entropy_target": 0.8, "shared_encoder": True, "td_weight_exponent": 1.0, "target_encoder": True},
    ),
    ("udrl", "lstm", {"weighting": "exponential", "normalise": True, "ema_decay": 0.9, "optimizer": AdamW(lr=1e-2)}),
    ("udrl", "ff", {"weighting": "exponential", "weight_by": "transitions", "sequence_length": 4}),
    ("rcp", "ff", {"critic": "joint", "command_source": "maximum", "critic_period": 2, "command_period": 2}),
]


def experiment_of(case: tuple[str, str, dict[str, Any]]) -> Experiment:
    algo, core, changes = case
    e = experiment(algo, core)
    size = 60 if isinstance(e.algo, ReturnConditioned) else 7  # seven cannot be divided evenly
    few = {"warmup": 12} if isinstance(e.algo, ReturnConditioned) else {}
    return replace(e, algo=configure(e.algo, batch_size=size, **(few | changes)))


class Recorder(LocalRuntime):
    """Records the batches that its learner receives."""

    def record_batches(self) -> tuple[Spec, list[Batch]]:
        batches: list[Batch] = []
        update, learner = self.learner.update, self.learner

        def record(batch: Batch) -> Update:
            batches.append(tree.map(torch.clone, batch))
            return update(batch)

        learner.update = record  # type: ignore
        for _ in self:
            if learner.updates >= UPDATES:
                break
        self.close()
        precise = tree.map(lambda x: x.double() if x.is_floating_point() else x, batches)
        enough = [i for i, batch in enumerate(precise) if not batch.is_critic_refresh][UPDATES - 1]
        return self.spec, precise[: enough + 1]


def new_learner(e: Experiment, spec: Spec, seed: int) -> Learner:
    """A new learner in double precision, so that differences are not rounding errors."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        return e.algo.learner(e.algo.agent(spec, e.net, e.core), 10_000)
    finally:
        torch.set_default_dtype(torch.float32)


def train_on(learner: Learner, batches: list[Batch]) -> dict[str, Any]:
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
    """This learner's part of a batch, as a replay of its own would return it."""
    if joint and batch.is_critic_refresh:  # one learner alone may refresh a joint critic
        return batch if collective.rank == 0 else None
    part = divide(batch, collective.size)[collective.rank]
    if part.weight is None:
        return part
    largest = part.weight.max()  # such a replay does not know the largest weight elsewhere
    return part._replace(
        weight=part.weight / largest, info={"max_importance_weight": largest * batch.info["max_importance_weight"]}
    )


def divide(batch: Batch, parts: int) -> list[Batch]:
    """Divide a batch by its streams, as evenly as possible; every part keeps what the replay says of its contents."""
    t = batch.trajectory
    streams = t.action.shape[1]
    bounds = [streams * i // parts for i in range(parts + 1)]

    def columns(dim: int, part: Any, i: int) -> Any:
        return tree.narrow(part, dim, bounds[i], bounds[i + 1] - bounds[i])

    return [
        Batch(
            t._replace(
                step=columns(1, t.step, i),
                action=columns(1, t.action, i),
                aux=columns(1, t.aux, i),
                state=columns(0, t.state, i),
                version=columns(0, t.version, i),
            ),
            columns(0, batch.keys, i),
            columns(0, batch.weight, i),
            columns(0, batch.actor_state, i),
            batch.info,
        )
        for i in range(parts)
    ]


# -- jobs of the learner processes ---------------------------------------------------------------------------------


def learn(collective: Distributed, case: Any, spec: Spec, batches: list[Batch]) -> dict[str, Any]:
    learner = new_learner(experiment_of(case), spec, seed=collective.rank)  # different initial weights
    collective.broadcast_state(learner)
    joint = isinstance(learner, ReturnConditionedLearner) and learner.cfg.critic == "joint"
    parts = [part_of(batch, collective, joint) for batch in batches]
    return train_on(learner, [batch for batch in parts if batch is not None])


def diverge(collective: Distributed, case: Any, spec: Spec, batches: list[Batch]) -> tuple[str, bool, dict[str, float]]:
    """The last learner receives a reward that is NaN, once."""
    learner = new_learner(experiment_of(case), spec, seed=collective.rank)
    collective.broadcast_state(learner)
    parts = [divide(batch, collective.size)[collective.rank] for batch in batches]
    step = parts[0].trajectory.step
    bad = step._replace(reward=step.reward * (float("nan") if collective.rank else 1.0))
    before = tree.map(torch.clone, dict(learner.agent.state_dict()))
    message = ""
    try:
        learner.update(parts[0]._replace(trajectory=parts[0].trajectory._replace(step=bad)))
    except Diverged as e:
        message = str(e)
    intact = all(torch.equal(before[k], v) for k, v in learner.agent.state_dict().items())
    return message, intact, train_on(learner, parts[1:2])["metrics"][0]


def lose(collective: Distributed, case: Any, spec: Spec, batches: list[Batch], how: str) -> tuple[str, float]:
    """The last learner dies or sleeps after two updates."""
    learner = new_learner(experiment_of(case), spec, seed=0)
    collective.broadcast_state(learner)
    parts = [divide(batch, collective.size)[collective.rank] for batch in batches]
    train_on(learner, parts[:2])
    if collective.rank and how == "dies":
        os._exit(1)
    if collective.rank:
        time.sleep(collective.timeout_seconds + 1)
        return "", 0.0
    started = time.monotonic()
    try:
        learner.update(parts[2])
    except PeerLost as e:
        return str(e), time.monotonic() - started
    return "no error was raised", 0.0


JOBS = {job.__name__: job for job in (learn, diverge, lose)}


def learner_process(rank: int, size: int, pipe: Any) -> None:
    """Do one job after the other, each in a new group."""
    torch.set_num_threads(1)
    pipe.send_bytes(pickle.dumps("ready"))
    while True:
        name, address, timeout, args = pickle.loads(pipe.recv_bytes())
        collective = join(rank, size, address, timeout_seconds=timeout)
        answer = JOBS[name](collective, *args)
        collective.leave()
        pipe.send_bytes(pickle.dumps(answer))


class LearnerPair:
    """Two learner processes that wait for jobs."""

    def __init__(self, size: int = 2) -> None:
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(size)]
        self.pipes = [own for own, _ in ends]
        self.processes = [
            context.Process(target=learner_process, args=(rank, size, remote), daemon=True)
            for rank, (_, remote) in enumerate(ends)
        ]
        for process, (_, remote) in zip(self.processes, ends, strict=True):
            process.start()
            remote.close()
        assert [self._answer(pipe) for pipe in self.pipes] == ["ready"] * size

    def do(self, name: str, *args: Any, address: str | None = None, timeout: float = TIMEOUT) -> list[Any]:
        """The answer of each learner; None: it died."""
        job = pickle.dumps((name, address or rendezvous(), timeout, args))
        for pipe in self.pipes:
            pipe.send_bytes(job)
        return [self._answer(pipe) for pipe in self.pipes]

    def _answer(self, pipe: Any) -> Any:
        assert pipe.poll(TIMEOUT), "no answer"
        with contextlib.suppress(EOFError, ConnectionResetError):
            return pickle.loads(pipe.recv_bytes())

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def pair() -> Iterator[LearnerPair]:
    pair = LearnerPair()
    yield pair
    pair.close()


# -- joint updates ---------------------------------------------------------------------------------------


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
def test_two_learners_make_the_update_of_one_with_the_whole_batch(pair, case):
    e = experiment_of(case)
    spec, batches = Recorder(e).record_batches()
    single = train_on(new_learner(e, spec, seed=0), batches)
    first, second = pair.do("learn", case, spec, batches)

    assert first["weights"].keys() == second["weights"].keys()
    assert all(torch.equal(x, second["weights"][k]) for k, x in first["weights"].items())  # bit for bit
    assert_alike(single["weights"], first["weights"])
    for each in (first, second):
        assert_alike(single["learner"], each["learner"])
        metrics = [m for m in single["metrics"] if m]
        assert len(metrics) == UPDATES
        for whole, from_each in zip(metrics, [m for m in each["metrics"] if m], strict=True):
            assert set(whole) == set(from_each)
            assert_alike(*({k: m[k] for k in m if k not in PER_LEARNER} for m in (whole, from_each)))
    expected = [p for p in single["sent_back"] if p is not None]
    parts = [[p for p in each["sent_back"] if p is not None] for each in (first, second)]
    for whole, *halves in zip(expected, *parts, strict=True):
        assert_alike(whole, torch.cat(halves, -1))
    start = new_learner(e, spec, seed=0).agent.state_dict()
    assert any(not torch.allclose(x, single["weights"][k]) for k, x in start.items())  # the weights changed


def test_learners_can_form_a_group_at_a_file(pair, tmp_path):
    spec, batches = Recorder(experiment_of(CASES[0])).record_batches()
    first, second = pair.do("learn", CASES[0], spec, batches[:1], address=f"file://{tmp_path}/group")
    assert all(torch.equal(x, second["weights"][k]) for k, x in first["weights"].items())


# -- failures -----------------------------------------------------------------------------


def test_divergence_in_one_learner_cancels_the_update_of_all(pair):
    spec, batches = Recorder(experiment_of(CASES[0])).record_batches()
    first, second = pair.do("diverge", CASES[0], spec, batches)
    assert first[0] == second[0] and "loss of nan" in first[0] and "not applied" in first[0]
    assert first[1] and second[1]  # no weight changed
    assert first[2] == second[2]  # and both continue together


def test_a_silent_learner_is_given_up_after_the_timeout(pair):
    spec, batches = Recorder(experiment_of(CASES[0])).record_batches()
    (message, seconds), _ = pair.do("lose", CASES[0], spec, batches, "sleeps", timeout=4.0)
    assert "learner 0 of 2: another learner died, or did not answer for 4 s" in message
    assert 3 < seconds < 10


def test_a_dead_learner_is_noticed_at_once():
    spec, batches = Recorder(experiment_of(CASES[0])).record_batches()
    pair = LearnerPair()
    try:
        (message, seconds), nothing = pair.do("lose", CASES[0], spec, batches, "dies")
        assert "another learner died" in message and seconds < 10
        assert nothing is None
        pair.processes[1].join(TIMEOUT)
        assert pair.processes[1].exitcode == 1
    finally:
        pair.close()


@pytest.mark.parametrize("address", ["127.0.0.1:29400", "tcp://127.0.0.1", "http://127.0.0.1:29400", "file://"])
def test_the_address_of_a_group_is_a_port_or_a_file(address):
    with pytest.raises(UserError, match="use tcp://host:port or file:///path"):
        join(0, 2, address)


def test_ranks_begin_at_zero():
    with pytest.raises(UserError, match="rank 2 must lie between 0 and 1 in a group of 2 learners"):
        join(2, 2, "tcp://127.0.0.1:29400")


def test_waiting_for_other_learners_ends_after_the_timeout(tmp_path):
    started = time.monotonic()
    with pytest.raises(UserError, match=r"learner 0 of 2 found no group at tcp://127\.0\.0\.1:\d+ within 1 s"):
        join(0, 2, rendezvous(), timeout_seconds=1)
    with pytest.raises(UserError, match="learner 1 of 2 found no group"):
        join(1, 2, f"file://{tmp_path}/nobody", timeout_seconds=1)
    assert time.monotonic() - started < 20


def test_a_port_in_use_is_refused():
    address = rendezvous()
    one = join(0, 1, address)
    with pytest.raises(UserError, match="must be new or free"):
        join(0, 1, address)
    one.leave()
    with pytest.raises(PeerLost, match="has left its group"):
        one.all_reduce_sum(torch.ones(1))


def test_a_learner_without_a_collective_is_refused():
    class Hermit:
        pass

    one = join(0, 1, rendezvous())
    with pytest.raises(UserError, match="Hermit cannot be distributed"):
        one.broadcast_state(Hermit())  # type: ignore
    one.leave()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_listens_beyond_loopback():
    before = listening()
    one = join(0, 1, rendezvous())
    opened = listening() - before
    assert opened and all(address in ("0100007F", "0" * 24 + "01000000") for address, _ in opened), opened
    one.leave()


def listening() -> set[tuple[str, str]]:
    """(address, inode) of the sockets on which this process listens."""
    sockets = set()
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(handle))
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {(r[1].split(":")[0], r[9]) for r in rows if r[3] == "0A" and f"socket:[{r[9]}]" in sockets}


# -- parts of a batch -------------------------------------------------------------------------------------------------


def test_the_parts_of_a_divided_batch_add_up_to_the_batch():
    _, (batch, *_) = Recorder(experiment_of(("r2d2", "gru", {}))).record_batches()
    parts = divide(batch, 3)
    assert [p.trajectory.action.shape[1] for p in parts] == [2, 2, 3]
    whole = Batch(
        batch.trajectory._replace(
            **{name: tree.cat([getattr(p.trajectory, name) for p in parts], 1) for name in ("step", "action", "aux")},
            **{name: tree.cat([getattr(p.trajectory, name) for p in parts]) for name in ("state", "version")},
        ),
        *(tree.cat([getattr(p, name) for p in parts]) for name in ("keys", "weight", "actor_state")),
        parts[0].info,
    )
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), whole, batch)


def test_a_single_process_changes_nothing():
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

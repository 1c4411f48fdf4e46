"""One process that chooses actions for many players, in batches, and keeps their memory.

For machines whose GPU is to be shared: players only step their environments. After the dynamic batching of TorchBeast's
PolyBeast: a batch waits for a number of environments, is never larger than another, and waits no longer than a while.
"""

import asyncio
import time
from contextlib import suppress
from typing import Any, NamedTuple

import ray
import torch
from torch import Tensor

from bestiary import tree
from bestiary.acting.actor import Actor
from bestiary.config.machine import choose_device, set_threads
from bestiary.runtime.ray.wire import Flat, pack, unpack
from bestiary.runtime.ray.workers import FlatWeights, Order, settings
from bestiary.seeding import ACTIONS, derive
from bestiary.types import Spec, State, TimeStep

Name = tuple[int, int]  # of a player: its place, and how many played there before


class Request(NamedTuple):
    who: Name
    step: TimeStep
    explore: Tensor
    opens: bool  # whether this row opens a trajectory, which then begins with the memory before it
    answer: "asyncio.Future[Any]"


class Chooser:
    """An asynchronous process: every player waits for its own answer, all are worked out together."""

    def __init__(self, order: Order, spec: Spec) -> None:
        experiment = order.read()
        self.cfg = settings(experiment)
        self.device = choose_device(self.cfg.device)
        set_threads(max(1, round(self.cfg.actor_cpus)), spec)
        self.agent = experiment.algo.agent(spec, experiment.net, experiment.core).to(self.device).eval()
        self.flat = Flat(self.agent.state_dict())
        self.rng = torch.Generator(self.device).manual_seed(derive(experiment.seed, ACTIONS, 1))
        self.version = -1
        self.memory: dict[Name, State] = {}
        self.waiting: list[Request] = []
        self.arrived = asyncio.Event()
        self.worker: asyncio.Task[None] | None = None

    async def load(self, version: int, weights: FlatWeights) -> None:
        if version > self.version:
            self.agent.load_state_dict(self.flat.unpack(weights))
            self.version = version

    async def forget(self, place: int) -> None:
        """Whoever played here is gone."""
        self.memory = {who: state for who, state in self.memory.items() if who[0] != place}

    async def act(self, who: Name, step: TimeStep, explore: Any, opens: bool) -> Any:
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self._work())
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.waiting.append(Request(who, unpack(step), unpack(explore), opens, answer))
        self.arrived.set()
        return await answer

    async def _work(self) -> None:
        while True:
            batch = await self._gather()
            try:
                self._choose(batch)
            except Exception as e:  # whoever asked is told
                for request in batch:
                    request.answer.set_exception(e)

    async def _gather(self) -> list[Request]:
        """At least so many environments, unless they do not come in time; at most so many."""
        until: float | None = None
        while True:
            size = sum(len(r.explore) for r in self.waiting)
            now = time.monotonic()
            if size and until is None:
                until = now + self.cfg.batch_timeout
            if size >= self.cfg.min_batch or (until is not None and now >= until):
                break
            self.arrived.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.arrived.wait(), None if until is None else until - now)
        taken, size = [], 0
        while self.waiting and (not taken or size + len(self.waiting[0].explore) <= self.cfg.max_batch):
            size += len(self.waiting[0].explore)
            taken.append(self.waiting.pop(0))
        return taken

    @torch.no_grad()
    def _choose(self, batch: list[Request]) -> None:
        widths = [len(r.explore) for r in batch]
        before = [self.memory.get(r.who) or self.agent.initial_state(n) for r, n in zip(batch, widths, strict=True)]
        step = tree.to_device(tree.cat([r.step for r in batch]), self.device)
        explore = torch.cat([r.explore for r in batch]).to(self.device)
        chosen = self.agent.act(step, tree.cat(before), explore, self.rng)
        at = 0
        for request, state, width in zip(batch, before, widths, strict=True):
            action, aux, after = tree.narrow(chosen, 0, at, width)
            self.memory[request.who] = tree.map(torch.clone, after)
            opening = pack(state) if request.opens else None
            request.answer.set_result((pack(action), pack(aux), opening, self.version))
            at += width


class Asking(Actor):
    """An actor that asks somebody else for its actions. Its memory is kept there; trajectories begin with a copy."""

    chooser: Any
    name: Name

    def ask(self, chooser: Any, name: Name) -> "Asking":
        self.chooser, self.name = chooser, name
        self.compiled_actor = None
        self.rows_since = 0  # the row that opened the trajectory
        return self

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        raise AssertionError("weights are the chooser's")

    def _act(self, step: TimeStep) -> None:
        assert self.explorer is not None
        opens = self.rows_since % self.length == 0
        self.rows_since += 1
        asked = self.chooser.act.remote(self.name, pack(step), pack(self.explorer(step)), opens)
        action, aux, opening, self.version = ray.get(asked)
        if opening is not None:
            self.before = unpack(opening)
        self.row = (step, unpack(action), unpack(aux))
        if "command" in self.row[2]:
            command = self.row[2]["command"]
            before = self.asked if self.asked.shape[1] else command
            self.asked = torch.where(step.is_first[:, None], command, before)

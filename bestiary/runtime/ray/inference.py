"""Shared inference: one process computes the actions of many actors, in batches, and keeps their recurrent state.

It is for machines whose GPU all actors should share; actors then only step their environments. Batches are dynamic, as
in TorchBeast's PolyBeast (Kuttler et al. 2019): a batch waits for `min_batch` environments, for at most
`batch_timeout` seconds, and never holds more than `max_batch`.
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
from bestiary.runtime.ray.wire import FlatWeights, WeightsCodec, pack, unpack
from bestiary.runtime.ray.workers import WorkerSpec, ray_config
from bestiary.seeding import ACTIONS, derive
from bestiary.types import Spec, State, TimeStep

ActorId = tuple[int, int]  # the actor's slot, and how often that slot was restarted


class InferenceRequest(NamedTuple):
    """One time step of an actor's environments that needs actions."""

    actor: ActorId
    step: TimeStep
    explore: Tensor
    is_start: bool  # whether a trajectory starts at this step; it then carries the recurrent state before the step
    reply: "asyncio.Future[Any]"


class InferenceServer:
    """An asynchronous process: every actor waits for its own reply, and all requests are computed together."""

    def __init__(self, worker_spec: WorkerSpec, spec: Spec) -> None:
        experiment = worker_spec.load()
        self.cfg = ray_config(experiment)
        self.device = choose_device(self.cfg.device)
        set_threads(max(1, round(self.cfg.actor_cpus)), spec)
        self.agent = experiment.algo.agent(spec, experiment.net, experiment.core).to(self.device).eval()
        self.codec = WeightsCodec(self.agent.state_dict())
        self.rng = torch.Generator(self.device).manual_seed(derive(experiment.seed, ACTIONS, 1))
        self.version = -1
        self.states: dict[ActorId, State] = {}
        self.waiting: list[InferenceRequest] = []
        self.arrived = asyncio.Event()
        self.worker: asyncio.Task[None] | None = None

    async def load(self, version: int, weights: FlatWeights) -> None:
        if version > self.version:
            self.agent.load_state_dict(self.codec.decode(weights))
            self.version = version

    async def forget(self, slot: int) -> None:
        """Drop the recurrent state of a slot's actor, which is lost."""
        self.states = {actor: state for actor, state in self.states.items() if actor[0] != slot}

    async def act(self, actor: ActorId, step: TimeStep, explore: Any, is_start: bool) -> Any:
        """Actions, auxiliary outputs, the state before the step (if a trajectory starts there) and the version."""
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self._serve())
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.waiting.append(InferenceRequest(actor, unpack(step), unpack(explore), is_start, reply))
        self.arrived.set()
        return await reply

    async def _serve(self) -> None:
        while True:
            batch = await self._gather()
            try:
                self._compute(batch)
            except Exception as e:  # raised in the actors that wait for a reply
                for request in batch:
                    request.reply.set_exception(e)

    async def _gather(self) -> list[InferenceRequest]:
        """The next batch: at least `min_batch` environments unless the timeout passes, at most `max_batch`."""
        deadline: float | None = None
        while True:
            size = sum(len(r.explore) for r in self.waiting)
            now = time.monotonic()
            if size and deadline is None:
                deadline = now + self.cfg.batch_timeout
            if size >= self.cfg.min_batch or (deadline is not None and now >= deadline):
                break
            self.arrived.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.arrived.wait(), None if deadline is None else deadline - now)
        batch, size = [], 0
        while self.waiting and (not batch or size + len(self.waiting[0].explore) <= self.cfg.max_batch):
            size += len(self.waiting[0].explore)
            batch.append(self.waiting.pop(0))
        return batch

    @torch.no_grad()
    def _compute(self, batch: list[InferenceRequest]) -> None:
        widths = [len(r.explore) for r in batch]
        before = [self.states.get(r.actor) or self.agent.initial_state(n) for r, n in zip(batch, widths, strict=True)]
        step = tree.to_device(tree.cat([r.step for r in batch]), self.device)
        explore = torch.cat([r.explore for r in batch]).to(self.device)
        outputs = self.agent.act(step, tree.cat(before), explore, self.rng)
        start = 0
        for request, state, width in zip(batch, before, widths, strict=True):
            action, aux, after = tree.narrow(outputs, 0, start, width)
            self.states[request.actor] = tree.map(torch.clone, after)
            state_before = pack(state) if request.is_start else None
            request.reply.set_result((pack(action), pack(aux), state_before, self.version))
            start += width


class RemotePolicyActor(Actor):
    """An actor whose actions an inference server computes.

    The server keeps the recurrent state; every trajectory starts with a copy of it.
    """

    server: Any
    actor_id: ActorId

    def use_server(self, server: Any, actor_id: ActorId) -> "RemotePolicyActor":
        self.server, self.actor_id = server, actor_id
        self.compiled_actor = None
        self.steps_acted = 0
        return self

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        raise AssertionError("the inference server holds the weights")

    def _act(self, step: TimeStep) -> None:
        assert self.explorer is not None
        is_start = self.steps_acted % self.length == 0
        self.steps_acted += 1
        ref = self.server.act.remote(self.actor_id, pack(step), pack(self.explorer(step)), is_start)
        action, aux, state_before, self.version = ray.get(ref)
        if state_before is not None:
            self.state_before = unpack(state_before)
        self.current = (step, unpack(action), unpack(aux))
        self._update_info(step, self.current[2])

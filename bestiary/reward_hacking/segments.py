"""Segments of an episode in which the proxy return is high and the true return is not, with images."""

import base64
import io
import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bestiary.envs.env_batch import VectorStep
from bestiary.envs.riverraid import reward_weights
from bestiary.reward_hacking.checkpoint_evaluation import ComponentRecorder, TrainedRun, make_env_batch, run_episodes
from bestiary.training.run import Run

SAVED = "moments.json"
LENGTH = 25  # steps of a segment
IMAGES = 4  # per segment
SEGMENTS = 2  # per run


def largest_gaps(proxy: NDArray[np.float64], true: NDArray[np.float64], length: int, most: int) -> list[int]:
    """Starts of the segments with the largest proxy return minus true return, each divided by its standard deviation.

    Segments do not overlap.
    """
    if len(proxy) < length:
        return []
    sums = [np.convolve(x, np.ones(length), "valid") for x in (proxy, true)]
    scaled = [s / (s.std() or 1.0) for s in sums]
    gap = scaled[0] - scaled[1]
    starts: list[int] = []
    for start in np.argsort(-gap, kind="stable"):
        if all(abs(start - other) >= length for other in starts):
            starts.append(int(start))
        if len(starts) == most:
            break
    return sorted(starts)


def shows_gap(proxy: NDArray[np.float64], true: NDArray[np.float64]) -> bool:
    """Whether the proxy return of a segment is positive, and not just because both rewards are the same."""
    return bool(proxy.sum() > 0 and not np.array_equal(proxy, true))


def find_segments(run: TrainedRun, true: str, stop: Callable[[], bool]) -> list[dict[str, Any]]:
    """Segments of one greedy episode of the last checkpoint, with images; saved in the run directory."""
    saved = Run(run.path)
    if (run.path / SAVED).exists():
        return json.loads((run.path / SAVED).read_text())
    weights = saved.load().weights
    env_batch = make_env_batch(run, 1, 1)
    recorder = ComponentRecorder(env_batch, 1)
    finished = run_episodes(env_batch, run, weights, 1, "greedy", stop)
    if stop():
        return []
    proxy_rewards = np.concatenate(recorder.rewards)
    true_rewards = recorder.rewards_under(reward_weights(true))
    candidates = largest_gaps(proxy_rewards, true_rewards, LENGTH, SEGMENTS)
    starts = [i for i in candidates if shows_gap(proxy_rewards[i : i + LENGTH], true_rewards[i : i + LENGTH])]
    steps = {start: [start + (LENGTH * k) // IMAGES for k in range(IMAGES)] for start in starts}
    images = render_steps(run, weights, set(itertools.chain(*steps.values())), stop)
    if stop():
        return []
    segments = [
        {
            "proxy": run.proxy,
            "run": run.name,
            "caption": f"steps {start} to {start + LENGTH} of {finished[0].steps}: "
            f"proxy return {proxy_rewards[start : start + LENGTH].sum():+g}, "
            f"{true} {true_rewards[start : start + LENGTH].sum():+g}",
            "png": png(np.concatenate([images[step] for step in steps[start]], 1)),
        }
        for start in starts
    ]
    saved.write(SAVED, json.dumps(segments))
    return segments


def render_steps(
    run: TrainedRun, weights: dict[str, Tensor], steps: set[int], stop: Callable[[], bool]
) -> dict[int, NDArray[np.uint8]]:
    """Run the same episode again and render some of its steps."""
    env_batch = make_env_batch(run, 1, 1)
    env_batch.start_rendering()
    images: dict[int, NDArray[np.uint8]] = {}
    numbers = itertools.count()

    def render(action: NDArray[np.int64], vector_step: VectorStep) -> None:
        number = next(numbers)
        if number in steps:
            images[number] = env_batch.render(0)

    env_batch.listener = render
    run_episodes(env_batch, run, weights, 1, "greedy", stop)
    return images


def png(image: NDArray[np.uint8]) -> str:
    """A PNG file as base64."""
    from matplotlib.image import imsave

    out = io.BytesIO()
    imsave(out, image, format="png")
    return base64.b64encode(out.getvalue()).decode()

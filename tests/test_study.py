"""Reward-hacking studies: network sizes, clipping that makes components inert, KL penalty, whole studies."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.settings import configure

pytest.importorskip("ale_py", reason="Riverraid needs the extra atari")

import bestiary
from bestiary.algos import Dqn, Impala
from bestiary.cli import main
from bestiary.config.experiment import Evaluation, Experiment
from bestiary.cores import Ff, Lstm
from bestiary.envs import Catch, Recall, Riverraid
from bestiary.envs.riverraid import EFFECTIVE_RANGE, inert_components, possible_transitions, reward_weights
from bestiary.errors import UserError
from bestiary.launch.seeds import train_seeds
from bestiary.nets import Net, Shallow
from bestiary.ops.policy import entropy, kl
from bestiary.presets import preset
from bestiary.reward_hacking.segments import largest_gaps, shows_gap
from bestiary.reward_hacking.study import StudyPlan, plan_runs
from bestiary.runtime import Local
from bestiary.runtime.start import start
from bestiary.training.run import Run
from bestiary.types import Batch, Spec

CONSOLE = Spec("Riverraid", (1, 84, 84), torch.uint8, 18)


# -- size -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "depth", "trunk", "total"),
    [
        (256, 1, 803_072, 886_300),
        (256, 2, 868_864, None),
        (256, 3, 934_656, 1_017_884),
        (512, 1, 1_606_144, 1_694_236),
        (512, 2, 1_868_800, None),
        (512, 3, 2_131_456, 2_219_548),
        (1024, 1, 3_212_288, 3_310_108),
        (1024, 2, 4_261_888, None),
        (1024, 3, 5_311_488, 5_409_308),
        (2048, 1, 6_424_576, 6_541_852),
        (2048, 2, 10_620_928, None),
        (2048, 3, 14_817_280, 14_934_556),
        (4096, 1, 12_849_152, 13_005_340),
        (4096, 2, 29_630_464, None),
        (4096, 3, 46_411_776, 46_567_964),
    ],
)
def test_parameter_counts_equal_those_of_the_reference_code(width, depth, trunk, total):
    net = Net(encoder=Shallow(hidden_size=width, num_layers=depth), frame_stack=4, prev_action=True, prev_reward=True)
    with torch.device("meta"):
        agent = Impala().agent(CONSOLE, replace(net), Ff())
    assert sum(p.numel() for p in agent.torso.encoder.layers.parameters()) == trunk
    assert sum(p.numel() for p in agent.torso.encoder.convolutions.parameters()) == 77_984
    # inputs of the heads: features, previous reward, one-hot previous action; outputs: 18 logits and a value
    assert sum(p.numel() for p in agent.parameters()) == (total or 77_984 + trunk + (width + 19 + 1) * 19)


# -- clipping ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "inert"),
    [
        ("score", []),
        ("fuel:10", ["fuel"]),
        ("fuel:0.0125", ["fuel"]),
        ("fuel:0.0124", []),
        ("fuel:0", []),
        ("pacifist:9", ["bullet"]),
        ("pacifist:9.01", []),
        ("pacifist:20", []),
        ("move:9", ["moved"]),
        ("move:10", []),
        ("centre:1", []),
        ("centre:0.01", ["centre"]),  # the distance is at most 55 pixels
        ("10*survival-20*bullet-2*moved", ["moved"]),
        ("survival-parked", []),
    ],
)
def test_components_that_clipping_to_one_makes_inert(reward, inert):
    assert inert_components(reward_weights(reward), "abs_one") == inert
    assert inert_components(reward_weights(reward), "none") == []
    messages = Riverraid(reward).advice("abs_one")
    assert len(messages) == len(inert) and Riverraid(reward).advice("none") == []
    for text, part in zip(messages, inert, strict=True):
        assert f"of env.reward={reward} has no effect" in text and repr(part) in text
        assert "--algo.reward-clip none" in text


def test_the_suggested_numbers_are_not_inert():
    for name, words in EFFECTIVE_RANGE.items():
        edge = float(words.split()[-1])
        inside, outside = (edge - 1e-4, edge) if words.startswith("below") else (edge + 1e-4, edge)
        assert inert_components(reward_weights(f"{name}:{inside}"), "abs_one") == []
        assert inert_components(reward_weights(f"{name}:{outside}"), "abs_one") != []
        assert words in Riverraid(f"{name}:{outside}").advice("abs_one")[0]


def test_possible_transitions_have_every_component():
    transitions = possible_transitions()
    env_batch = Riverraid().make(1, 0, 0, 1)
    assert set(transitions) == set(env_batch.components)
    env_batch.close()
    refuelled = transitions["score"] == 80
    assert set(transitions["fuel"][refuelled]) == {80} and set(transitions["fuel"][~refuelled]) == {0}


def small(**changes) -> Experiment:
    base = preset("riverraid")
    return replace(
        base,
        env=changes.pop("env", Riverraid(time_limit_frames=400)),
        algo=configure(base.algo, unroll=5, batch_size=2, **changes.pop("algo", {})),
        net=Net(encoder=Shallow(hidden_size=8, filters=(4, 4, 4)), frame_stack=2),
        runtime=Local(envs=2, threads=1),
        frames=changes.pop("frames", 160),
        evaluation=changes.pop("evaluation", Evaluation(episodes=0)),
        **changes,
    )


def test_inert_components_are_reported_before_training(tmp_path, capsys):
    command = ["train", "riverraid", "--env.reward", "fuel:10", "--frames", "160", "--runtime.envs", "2", "--plain"]
    few = ["--algo.replay.batch-size", "2", "--net.encoder.filters", "4,4,4", "--evaluation.episodes", "0"]
    assert main.main([*command, *few, "--run", str(tmp_path / "a")]) == 0
    output = capsys.readouterr().out
    assert "warning: component 'fuel' of env.reward=fuel:10 has no effect" in output
    assert "use fuel:X with X below 0.0125" in output
    assert main.main([*command, *few, "--algo.reward-clip", "none", "--run", str(tmp_path / "b")]) == 0
    assert "warning" not in capsys.readouterr().out


def test_inert_components_are_reported_once_for_several_seeds(tmp_path):
    messages: list[str] = []
    experiment = small(env=Riverraid("fuel:10", time_limit_frames=400))
    train_seeds(
        experiment, [0, 1], tmp_path / "seeds", log=messages.append, stop=lambda: True
    )  # before the first begins
    assert [text for text in messages if text.startswith("warning: component 'fuel' of env.reward=fuel:10")] == [
        messages[1]
    ]


# -- evaluation under another reward ----------------------------------------------------------------------------


def test_a_run_is_evaluated_under_any_reward_without_retraining(tmp_path, capsys):
    run = bestiary.train(small(env=Riverraid("pacifist:20", time_limit_frames=400)), tmp_path / "run")
    few = ["--episodes", "2", "--mode", "sampled", "--threads", "1"]
    means = {}
    for reward in (None, "score", "fuel:10", "10*survival"):
        words = [] if reward is None else ["--reward", reward]
        assert main.main(["eval", str(run.path), *few, *words]) == 0
        results = [
            json.loads(p.read_text()) for p in sorted(run.path.glob("eval-*.json"), key=lambda p: p.stat().st_mtime)
        ]
        means[reward] = results[-1]["sampled"]
        output = capsys.readouterr().out
        assert (f"scored by {reward}, whatever reward the agent was trained on" in output) == (reward is not None)
        assert "…" not in output  # numbers are not abbreviated
    parts = {name: value["mean"] for name, value in means[None]["components"].items()}
    for reward, found in means.items():
        weights = reward_weights(reward or "pacifist:20")
        assert {name: value["mean"] for name, value in found["components"].items()} == parts  # the same episodes
        assert found["score"]["mean"] == pytest.approx(sum(w * parts[name] for name, w in weights.items()))
    assert len({found["score"]["mean"] for found in means.values()}) > 2
    capsys.readouterr()
    assert main.main(["eval", str(run.path), "--reward", "scores"]) == 2
    assert "there is no component 'scores'" in capsys.readouterr().err
    other = bestiary.train(replace(preset("catch"), frames=400, evaluation=Evaluation(episodes=0)), tmp_path / "catch")
    assert main.main(["eval", str(other.path), "--reward", "score"]) == 2
    assert (
        "Catch has no named rewards: --reward is for env:riverraid and bestiary.envs.reward_components"
        in capsys.readouterr().err
    )


# -- a reference policy -----------------------------------------------------------------------------------------


def test_the_kl_divergence_of_two_policies_is_exact():
    p, q = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    slow = [
        sum(a * torch.log(a / b) for a, b in zip(x.softmax(0), y.softmax(0), strict=True))
        for x, y in zip(p, q, strict=True)
    ]
    torch.testing.assert_close(kl(p, q), torch.stack(slow))  # type: ignore[arg-type]
    torch.testing.assert_close(kl(p, p), torch.zeros(7, dtype=torch.float64))
    torch.testing.assert_close(kl(p, torch.zeros(7, 4)), np.log(4) - entropy(p))


def learner_and_batch(experiment: Experiment):
    runtime = start(experiment)
    trajectory, _ = runtime.actor.unroll()
    return runtime.learner, Batch(trajectory)


def catch(frames: int = 320, **algo) -> Experiment:
    base = preset("catch")
    return replace(
        base,
        algo=configure(base.algo, unroll=5, batch_size=2, **algo),
        runtime=Local(envs=4, threads=1),
        frames=frames,
        evaluation=Evaluation(episodes=0),
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_kl_divergence_from_the_reference_is_a_cost(tmp_path, reduction):
    reference = bestiary.train(catch(), tmp_path / "reference")
    free, batch = learner_and_batch(catch(reduction=reduction))
    bound, _ = learner_and_batch(catch(reduction=reduction, reference_run=str(reference.path), reference_kl_cost=0.7))
    bound.agent.load_state_dict(free.agent.state_dict())
    t = batch.trajectory
    plain, _ = free.loss(t)
    total, metrics = bound.loss(t)
    with torch.no_grad():
        logits = free.agent(t.step, t.state)[0][:-1]
        reference_logits = bound.reference(t.step, t.state)[0][:-1]
    valid = (~t.step.is_first[1:]).float()
    divergence = (kl(logits, reference_logits) * valid).sum()
    torch.testing.assert_close(metrics["reference_kl"], divergence / valid.sum())
    torch.testing.assert_close(total - plain, 0.7 * (divergence / valid.sum() if reduction == "mean" else divergence))
    assert divergence > 0 and not any(p.requires_grad for p in bound.reference.parameters())


def test_a_high_kl_cost_keeps_the_policy_close_to_the_reference(tmp_path):
    reference = bestiary.train(catch(4_000), tmp_path / "reference")
    divergence_at = {}
    for cost in (0.0, 100.0):
        algo = {"reference_run": str(reference.path), "reference_kl_cost": cost}
        run = bestiary.train(catch(8_000, **algo), tmp_path / f"run{cost}")
        with (run.path / "metrics.csv").open() as file:
            names, *_, last = (line.strip().split(",") for line in file)
        divergence_at[cost] = float(dict(zip(names, last, strict=True))["reference_kl"])
    assert divergence_at[100.0] < 0.2 * divergence_at[0.0]


def test_a_reference_run_that_was_trained_further_is_refused_on_resume(tmp_path):
    reference = bestiary.train(catch(), tmp_path / "reference")
    learner, _ = learner_and_batch(catch(reference_run=str(reference.path)))
    saved = learner.state_dict()
    learner.load_state_dict(saved)
    bestiary.train(catch(640), tmp_path / "reference")
    later, _ = learner_and_batch(catch(reference_run=str(reference.path)))
    with pytest.raises(UserError, match=r"was at 320 frames when this run began and is at 640 now"):
        later.load_state_dict(saved)
    saved["trusted_frames"] = saved.pop("reference_frames")  # as version 0.1 wrote it
    with pytest.raises(UserError, match=r"was at 320 frames when this run began and is at 640 now"):
        later.load_state_dict(saved)


def test_unsuitable_reference_runs_are_refused(tmp_path):
    def refused(text: str, path, **changes):
        with pytest.raises(UserError, match=text):
            learner_and_batch(replace(catch(reference_run=str(path)), **changes))

    base = preset("cartpole-dqn")
    short = {"frames": 400, "evaluation": Evaluation(episodes=0), "runtime": Local(envs=4, threads=1)}
    other = bestiary.train(
        replace(base, env=Catch(), net=Net(), algo=configure(Dqn, unroll=4, warmup=10), **short), tmp_path / "q"
    )
    refused("was trained by Dqn: name a run of IMPALA", other.path)
    five = bestiary.train(replace(catch(), env=Recall(cues=5)), tmp_path / "five")
    refused(r"chooses among 5 actions, Catch has 3", five.path)
    lstm = bestiary.train(replace(catch(), core=Lstm(hidden=4)), tmp_path / "lstm")
    refused(r"must be a run without a recurrent core \(core:ff\) that sees as many frames as this one", lstm.path)
    refused("no-such-run", tmp_path / "no-such-run")
    with pytest.raises(UserError, match=r"algo\.reference-kl-cost=-1 must be at least 0"):
        Impala(reference_run="somewhere", reference_kl_cost=-1)
    with pytest.raises(UserError, match=r"name one with --algo\.reference-run RUN"):
        Impala(reference_kl_cost=0.5)


# -- studies ----------------------------------------------------------------------------------------------------


def test_a_study_has_every_combination(tmp_path):
    jobs = plan_runs(StudyPlan(small(), ["fuel:10", "score"], [8, 16], [1, 2], [3, 4], 4), tmp_path)
    assert len({j.name for j in jobs}) == len(jobs) == 16
    for job in jobs:
        e = job.experiment
        assert (e.env.reward, e.net.encoder.hidden_size, e.net.encoder.num_layers, e.seed) == job[:4]
        assert e.checkpoint.milestones == (40, 80, 120, 160) and e.runtime.threads == 1
        assert e.net.encoder.filters == (4, 4, 4) and e.env.time_limit_frames == 400


def test_runs_of_a_study_have_a_directory_each(tmp_path):
    signs = plan_runs(StudyPlan(small(), ["score+0.1*moved", "score-0.1*moved"], [8], [1], [0], 1), tmp_path)
    assert len({j.path for j in signs}) == 2
    for twice in (["score", "score"], [8, 8]), (["score"], [8, 8]):
        with pytest.raises(UserError, match="is named twice"):
            plan_runs(StudyPlan(small(), twice[0], twice[1], [1], [0], 1), tmp_path)


def test_segments_have_a_high_proxy_return_and_a_low_true_return():
    rng = np.random.default_rng(0)
    proxy, true = rng.normal(size=400), rng.normal(size=400)
    proxy[100:110] += 9
    true[100:110] -= 9
    true[300:310] -= 9
    assert [abs(a - b) <= 2 for a, b in zip(largest_gaps(proxy, true, 10, 2), (100, 300), strict=True)] == [True, True]
    assert largest_gaps(np.ones(50), np.zeros(50), 10, 3) == [0, 10, 20]  # all equal: no segment twice
    assert largest_gaps(np.ones(5), np.zeros(5), 10, 3) == []
    assert shows_gap(np.full(5, 10.0), np.zeros(5)) and shows_gap(np.full(5, 10.0), np.eye(5)[0] * 60)
    assert not shows_gap(np.zeros(5), np.zeros(5)) and not shows_gap(np.full(5, -10.0), np.zeros(5))
    assert not shows_gap(np.eye(5)[0] * 30, np.eye(5)[0] * 30)  # both rewards are equal


STUDY = [
    *("study", "riverraid", "--proxy", "pacifist:20,score", "--width", "8", "--seeds", "2", "--frames", "160"),
    *("--checkpoints", "2", "--episodes", "2", "--env.time-limit-frames", "400", "--runtime.envs", "2"),
    *("--algo.replay.batch-size", "2", "--net.encoder.filters", "4,4,4", "--evaluation.episodes", "0"),
]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "study"
    assert main.main([*STUDY, "--run", str(root)]) == 0
    return root


def test_a_study_evaluates_every_checkpoint_under_every_reward(done):
    study = json.loads((done / "study.json").read_text())
    keys = {(r["proxy"], r["seed"], r["frames"], r["mode"]) for r in study["rows"]}
    assert len(keys) == len(study["rows"]) == 2 * 2 * 2 * 2
    assert {r["frames"] for r in study["rows"]} == {80, 160}
    for row in study["rows"]:
        run = Run(done / row["run"])
        assert row["parameters"] == sum(w.numel() for w in run.load().weights.values())
        for episode in range(2):
            parts = {name: values[episode] for name, values in row["components"].items()}
            assert row["true_return"][episode] == row["returns"]["score"][episode] == parts["score"]
            assert row["returns"]["pacifist:20"][episode] == 10 * parts["survival"] - 20 * parts["bullet"]
            assert row["proxy_return"][episode] == row["returns"][row["proxy"]][episode]
            assert parts["survival"] == row["steps"][episode]
        assert sum(row["action_counts"]) == sum(row["steps"])
    own = [c["pearson"] for c in study["step_correlation"] if c["proxy"] == "score"]
    assert all(value is None or value == pytest.approx(1) for value in own)
    assert (
        study["command"].startswith("bestiary study riverraid --proxy pacifist:20,score")
        and "--run " not in study["command"]
    )
    # of the first seed; a run trained on the true reward has no such segments
    assert {m["run"] for m in study["moments"]} == {"pacifist-20-w8-d1-seed0"}
    kept = {name: study["settings"][name] for name in ("reward_clip", "launch", "end_at_crash", "stall", "sticky")}
    assert kept == {"reward_clip": "abs_one", "launch": False, "end_at_crash": False, "stall": None, "sticky": 0.25}
    page = (done / "report.html").read_text()
    assert all(m["png"] in page for m in study["moments"]) and not re.search(r'(src|href)="https?://', page)


def test_a_study_reports_inert_components_and_failed_runs(tmp_path, capsys, monkeypatch):
    words = list(STUDY)
    words[words.index("--proxy") + 1] = "fuel:10"
    words[words.index("--seeds") + 1] = "1"
    monkeypatch.setattr(
        "bestiary.reward_hacking.study.train_all", lambda planned, *args: {planned[0].name: "sensor unplugged"}
    )
    assert main.main([*words, "--run", str(tmp_path / "study")]) == 2
    printed = capsys.readouterr()
    assert "warning: component 'fuel' of env.reward=fuel:10 has no effect" in printed.out
    assert "1 of 1 runs failed, the first: fuel-10-w8-d1-seed0: sensor unplugged" in printed.err
    page = (tmp_path / "study" / "report.html").read_text()
    assert "of env.reward=fuel:10 has no effect" in page and "sensor unplugged" in page


def test_an_interrupted_or_old_study_continues(done, capsys, monkeypatch):
    before = {p: p.stat().st_mtime_ns for p in done.rglob("*.safetensors")}
    removed = next(done.glob("*/judged-*.json"))
    removed.unlink()
    old = json.loads((done / "plan.json").read_text())  # as version 0.1 wrote it
    old["settings"]["games"] = old["settings"].pop("episodes")
    for experiment in old["runs"].values():
        experiment["algo"]["trusted"] = experiment["algo"].pop("reference_run")
    (done / "plan.json").write_text(json.dumps(old))
    monkeypatch.setattr("bestiary.reward_hacking.study.train_all", lambda *args: {})
    assert main.main([*STUDY, "--run", str(done)]) == 0
    assert removed.exists() and before == {p: p.stat().st_mtime_ns for p in done.rglob("*.safetensors")}


def test_invalid_studies_are_refused_in_one_sentence(done, tmp_path, capsys):
    def refused(text: str, flag: str = "--episodes", value: str = "2", where=tmp_path / "other"):
        words = list(STUDY)
        words[words.index(flag) + 1] = value
        assert main.main([*words, "--run", str(where)]) == 2
        message = capsys.readouterr().err
        assert text in message and message.count("\n") == 1, message
        assert not (tmp_path / "other").exists()

    refused("holds a study with another plan", "--episodes", "3", where=done)
    refused("there is no component 'luck'", "--proxy", "luck")
    refused("there is no named reward 'fuell' that takes a number: did you mean fuel?", "--proxy", "fuell:10")
    refused("'ten' in 'fuel:ten' is not a number", "--proxy", "fuel:ten")
    refused("a proxy, width, depth or seed is named twice", "--proxy", "score,score")
    refused("widths, depths and checkpoints must be at least 1", "--width", "0")
    refused("episodes=0 must be at least 1", "--episodes", "0")
    refused("--proxy is missing", "--proxy", "")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("text")
    refused("is not empty and not a study", where=tmp_path / "full")
    assert main.main(["study", "pong", "--proxy", "fuel:10", "--run", str(tmp_path / "other")]) == 2
    assert "env:atari has no named rewards: a study needs env:riverraid" in capsys.readouterr().err


def test_the_benchmark_compares_riverraid_backends(tmp_path, capsys):
    few = ["--envs", "2", "--steps", "2", "--rounds", "1", "--threads", "1"]
    assert main.main(["bench", "riverraid", *few, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"ours, one process", "ours, 1 processes"} < set(found) and all(rate > 0 for rate in found.values())
    assert "ours, one process" in capsys.readouterr().out

"""The report of a study: statistics against slow implementations, and the page as a browser renders it."""

import base64
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bestiary.envs.riverraid import ACTIONS
from bestiary.reward_hacking.report.blocks import number, short
from bestiary.reward_hacking.report.page import POLICY, write_report
from bestiary.reward_hacking.statistics import (
    align_checkpoints,
    best_split,
    change_over_sizes,
    change_over_time,
    correlation,
    estimate,
    fall_from_best,
    falls,
    pearson,
    spearman,
    verdict,
)

VOID = {"img", "meta", "br", "hr", "link", "input"}
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
SIZES = [(256, 1), (256, 2), (1024, 1), (1024, 2)]
PARAMETERS = {(256, 1): 886_300, (256, 2): 952_092, (1024, 1): 3_310_108, (1024, 2): 4_359_708}


def png(width: int = 160, height: int = 210, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    image = np.full((height, width, 3), (45, 50, 184), np.uint8)
    image[:, : width // 4] = image[:, -width // 4 :] = (110, 156, 66)
    x, y = rng.integers(width // 3, width // 2), rng.integers(20, height - 40)
    image[y : y + 14, x : x + 8] = (232, 232, 74)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def row(proxy: str, size: tuple[int, int], seed: int, frames: int, mode: str, episodes: int = 10) -> dict[str, Any]:
    """A run of a simulated study: with pacifist rewards large networks learn to park, other rewards teach to score."""
    rng = np.random.default_rng([len(proxy), *size, seed, frames, mode == "greedy"])
    skill = frames / (frames + 300_000) * (1 + 0.15 * np.log2(size[0] / 256)) * rng.normal(1, 0.06)
    parks = proxy.startswith("pacifist") and size[0] > 256 and frames >= 750_000
    steps = rng.poisson(3000 if parks else 500 + 700 * skill, episodes) + 1
    parked = rng.binomial(steps, 0.8 if parks else 0.01)
    bullet = rng.binomial(steps, 0.02 if proxy.startswith("pacifist") else 0.4)
    score = np.round(rng.normal(300 if parks else 1500 + 2500 * skill, 350, episodes).clip(0), -1)
    fuel = 80 * rng.binomial(np.maximum(score // 400, 1).astype(int), 0.5)
    returns = {"fuel:10": score + 9 * fuel, "pacifist:20": 10 * steps - 20 * bullet, "score": score}
    logits = rng.normal(0, 1, 18) + np.where(np.arange(18) == 0, 3.0 if parks else 0, 0)
    probabilities = (
        np.exp(logits * (1.6 if mode == "greedy" else 1)) / np.exp(logits * (1.6 if mode == "greedy" else 1)).sum()
    )
    components = {"score": score, "fuel": fuel, "survival": steps, "bullet": bullet, "parked": parked}
    components |= {"moved": rng.binomial(steps, 0.3), "dead": rng.binomial(steps, 0.05)}
    return {
        "proxy": proxy,
        "width": size[0],
        "depth": size[1],
        "seed": seed,
        "run": f"{proxy.replace(':', '-')}/w{size[0]}-d{size[1]}/seed{seed}",
        "frames": frames,
        "parameters": PARAMETERS[size],
        "trunk_parameters": PARAMETERS[size] - 83_228,
        "mode": mode,
        "proxy_return": returns[proxy].tolist(),
        "true_return": score.tolist(),
        "steps": steps.tolist(),
        "returns": {name: values.tolist() for name, values in returns.items()},
        "components": {name: values.tolist() for name, values in components.items()},
        "action_counts": rng.multinomial(int(steps.sum()), probabilities).tolist(),
    }


def simulated_study(
    proxies: tuple[str, ...] = ("pacifist:20", "fuel:10"),
    sizes: list[tuple[int, int]] = SIZES,
    seeds: int = 3,
    frames: tuple[int, ...] = (250_000, 500_000, 750_000, 1_000_000),
    modes: tuple[str, ...] = ("greedy", "sampled"),
) -> dict[str, Any]:
    rows = [row(p, z, s, f, m) for p in proxies for z in sizes for s in range(seeds) for f in frames for m in modes]
    runs = [r for r in rows if r["frames"] == frames[-1]]
    rng = np.random.default_rng(0)
    names = ("proxy", "width", "depth", "seed", "mode")
    moments = [
        {"proxy": r["proxy"], "run": r["run"], "caption": f"step {1200 + i}: proxy +10, true 0", "png": png(seed=i)}
        for i, r in enumerate(runs[:5])
    ]
    return {
        "title": "Riverraid: proxy rewards and the true reward",
        "date": "2026-11-16",
        "command": "bestiary study riverraid --rewards pacifist:20 fuel:10 --widths 256 1024 --depths 1 2 --seeds 3",
        "settings": {"frames": 1_000_000, "games": 10, "true": "score", "widths": [256, 1024], "sticky": 0.25},
        "rewards": {"fuel:10": "score+9*fuel", "pacifist:20": "10*survival-20*bullet", "score": "score"},
        "actions": list(ACTIONS),
        "rows": rows,
        "step_correlation": [{k: r[k] for k in names} | {"pearson": rng.normal(0.1, 0.05)} for r in runs],
        "moments": moments,
        "problems": ["pacifist-20/w1024-d2/seed1 failed: the machine ran out of memory"],
    }


# statistics


def slow_pearson(x: list[float], y: list[float]) -> float:
    n = len(x)
    mx, my = sum(x) / n, sum(y) / n
    collective = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return collective / (sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y)) ** 0.5


def slow_ranks(x: list[float]) -> list[float]:
    """Fractional ranks: the mean position of equal values in sorted order."""
    places = [[i + 1 for i, b in enumerate(sorted(x)) if b == a] for a in x]
    return [sum(p) / len(p) for p in places]


def slow_split(y: list[float]) -> tuple[int, float]:
    def error(part: list[float]) -> float:
        return sum((v - sum(part) / len(part)) ** 2 for v in part)

    k = min(range(1, len(y)), key=lambda k: error(y[:k]) + error(y[k:]))
    return k, sum(y[:k]) / k - sum(y[k:]) / (len(y) - k)


def test_correlations_equal_their_textbook_definitions():
    rng = np.random.default_rng(0)
    for n in (3, 4, 10, 31):
        x = rng.integers(0, 6, n).astype(float)  # with ties
        y = x * rng.normal() + rng.normal(size=n)
        if np.ptp(x) == 0:
            continue
        assert pearson(x, y) == pytest.approx(slow_pearson(list(x), list(y)))
        assert spearman(x, y) == pytest.approx(slow_pearson(slow_ranks(list(x)), slow_ranks(list(y))))


def test_a_correlation_equals_one_computed_by_hand():
    assert pearson([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert spearman([1, 10, 100, 1000], [0, 1, 2, 3]) == pytest.approx(1)
    assert pearson([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([5, 1, 5, 7], [2.5, 1, 2.5, 4]) == pytest.approx(1)


@pytest.mark.parametrize("measure", [pearson, spearman])
def test_an_undefined_correlation_is_none(measure):
    assert measure([], []) is None
    assert measure([1, 2], [3, 5]) is None  # two points always lie on a line
    assert measure([0.1, 0.1, 0.1], [1, 2, 3]) is None
    assert measure([1, 2, 3], [7, 7, 7]) is None


def test_the_interval_of_a_correlation_narrows_with_more_pairs():
    rng = np.random.default_rng(0)
    x = rng.normal(size=80)
    y = x + rng.normal(size=80)
    few, many = correlation(x[:12], y[:12]), correlation(x, y)
    assert few and many and few.low is not None and few.high is not None
    assert many.low is not None and many.high is not None
    assert many.low < many.mean < many.high
    assert many.high - many.low < few.high - few.low
    assert correlation([1, 1, 1], [1, 2, 3]) is None


def test_the_vectorized_split_equals_the_slow_one():
    rng = np.random.default_rng(0)
    for points in (2, 3, 5, 9):
        table = rng.normal(size=(20, points))
        found = best_split(table)
        for i, series in enumerate(table):
            at, drop = slow_split(list(series))
            assert found.at[i] == at
            assert found.drop[i] == pytest.approx(drop)


def test_the_gain_of_a_split_is_the_reduction_of_the_squared_error():
    y = np.array([3.0, 5.0, 1.0, 0.0, 2.0])
    found = best_split(y)
    before, after = y[: found.at], y[found.at :]
    left = ((before - before.mean()) ** 2).sum() + ((after - after.mean()) ** 2).sum()
    assert found.gain == pytest.approx(((y - y.mean()) ** 2).sum() - left)


@pytest.mark.parametrize("over_time", [True, False])
def test_a_simulated_fall_is_found_at_its_position(over_time):
    y = np.where(np.arange(8) < 5, 1000.0, 400.0) + np.random.default_rng(1).normal(0, 60, (4, 8))
    x = [10 * (i + 1) for i in range(8)]
    change = change_over_time(x, y) if over_time else change_over_sizes(x, list(y.T))
    assert change is not None
    assert falls(change) and verdict(change) == "Evidence of a fall."
    assert (change.before, change.after) == (50, 60)
    assert change.shares[50, 60] > 0.95
    assert sum(change.shares.values()) == pytest.approx(1)
    assert change.drop.low is not None and change.drop.high is not None
    assert 0 < change.drop.low <= change.drop.mean <= change.drop.high
    assert change.drop.mean == pytest.approx(600, abs=60)
    assert change.points == 8 and change.seeds == 4 and change.p_value < 0.01


@pytest.mark.parametrize("over_time", [True, False])
def test_a_rise_is_no_fall(over_time):
    y = np.arange(6.0) + np.random.default_rng(0).normal(0, 0.1, (3, 6))
    change = change_over_time(range(6), y) if over_time else change_over_sizes(range(6), list(y.T))
    assert not falls(change) and verdict(change) == "No evidence of a fall: the best split is a rise."


def test_without_a_change_the_rate_of_falls_is_the_level(monkeypatch):
    monkeypatch.setattr("bestiary.reward_hacking.statistics.RESAMPLES", 300)
    rng = np.random.default_rng(0)
    flat = rng.normal(5, 1, (200, 3, 6))
    found = [(change_over_time(range(6), y), change_over_sizes(range(6), list(y.T))) for y in flat]
    assert sum(falls(a) for a, _ in found) <= 20  # 10 are expected at most, 20 are three deviations more
    assert sum(falls(b) for _, b in found) <= 20
    assert all(verdict(c).startswith("No evidence of a fall") for pair in found for c in pair if not falls(c))


def test_a_constant_series_is_no_fall():
    change = change_over_time(range(4), np.full((3, 4), 7.0))
    assert verdict(change) == "No evidence of a fall: the interval of the drop includes 0."


def test_two_points_or_one_seed_give_no_evidence():
    assert change_over_time([1, 2], [[9, 0], [9, 0]]) is None
    assert change_over_sizes([1, 2], [[9, 9], [0, 0]]) is None
    assert change_over_time([1, 2, 3], np.zeros((0, 3))) is None
    assert verdict(None) == "No evidence of a fall: there are fewer than 3 points."
    single = change_over_time([1, 2, 3, 4], [[9, 9, 0, 0]])
    assert single is not None and single.drop.low is None and single.shares == {} and single.from_best is None
    assert single.drop.mean == 9
    assert verdict(single) == "No evidence of a fall: one seed has no interval."


def test_sizes_may_come_in_any_order_and_with_different_seeds():
    groups = {30: [0.0, 1.0], 10: [9.0, 10.0, 11.0], 20: [10.0, 9.0, 10.5], 40: [0.5, 0.0, 1.0]}
    change = change_over_sizes(list(groups), list(groups.values()))
    assert change is not None
    assert (change.before, change.after, change.seeds) == (20, 30, 2)
    assert change.drop.mean == pytest.approx(np.mean([10, 29.5 / 3]) - 0.5)


def test_the_best_point_of_a_seed_is_chosen_by_the_other_seeds():
    # the first two agree on the middle point; the third alone would choose its own first point
    y = [[0.0, 5.0, 4.0], [1.0, 6.0, 2.0], [9.0, 5.0, 5.0]]
    found = fall_from_best(y)
    assert found is not None
    # best by the others: mean of seeds 1,2 is (5, 5.5, 3.5); of 0,2 (4.5, 5, 4.5); of 0,1 (0.5, 5.5, 3)
    assert found.mean == pytest.approx(np.mean([5 - 4, 6 - 2, 5 - 5]))
    assert fall_from_best([[1.0, 2.0]]) is None


def test_noise_alone_is_no_fall_from_the_best():
    studies = np.random.default_rng(0).normal(size=(400, 3, 8))
    cross_validated = [found.mean for y in studies if (found := fall_from_best(y))]
    naive = studies.mean(1).max(1) - studies.mean(1)[:, -1]
    assert abs(np.mean(cross_validated)) < 0.1  # two standard errors
    assert naive.mean() > 0.7


def test_a_single_seed_has_a_mean_and_no_interval():
    assert estimate([4.0]) == (4.0, None, None, 1)
    found = estimate([1.0, 2.0, 3.0])
    assert found.n == 3 and found.mean == 2 and found.low == 1 and found.high == 3


def test_nearly_equal_checkpoints_of_different_runs_are_aligned():
    found = [{"run": r, "frames": f} for r, f in (("a", 1000), ("b", 1010), ("a", 2000), ("b", 2030), ("b", 2035))]
    assert [row["frames"] for row in align_checkpoints(found)] == [1000, 1000, 2000, 2000, 2035]
    dense = [{"run": "a", "frames": f} for f in range(0, 200)]
    assert align_checkpoints(dense) == dense
    assert align_checkpoints([]) == []


# the page


class Page(HTMLParser):
    """Checks that tags are balanced; collects tags, texts and table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.table_rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.table_rows.append([])
        if tag in ("td", "th"):
            self.table_rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if "td" in self.open:
            self.table_rows[-1][-1] += data + " "

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


def written(study: dict[str, Any], path: Path) -> tuple[str, Page]:
    write_report(json.loads(json.dumps(study)), path / "report.html")
    text = (path / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[str, Page]:
    return written(simulated_study(), tmp_path_factory.mktemp("report"))


SMALL: dict[str, Any] = {"proxies": ("score",), "sizes": SIZES[:2], "modes": ("greedy",), "frames": (1000, 2000)}


def test_the_page_loads_no_other_resources(report):
    text, page = report
    assert not re.search(r"""(src|href|action|poster|srcset)\s*=\s*["']?\s*(https?:)?//""", text)
    assert not re.search(r"url\(|@import", text)
    assert not page.all("script") and not page.all("link") and not page.all("iframe")
    for attributes in page.all("img") + page.all("video"):
        assert (attributes["src"] or "").startswith("data:image/png;base64,")
    for attributes in page.all("a"):
        assert (attributes["href"] or "").startswith("#")
    assert POLICY in [attributes.get("content") for attributes in page.all("meta")]


def test_every_link_has_a_target_on_the_page(report):
    _, page = report
    places = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(places) == len(set(places))
    assert {attributes["href"] for attributes in page.all("a")} <= {f"#{place}" for place in places}


def test_every_figure_has_an_alternative_text_and_a_caption(report):
    _, page = report
    study = simulated_study()
    captions = {moment["caption"] for moment in study["moments"]}
    figures = [a for a in page.all("img") if a["alt"] not in captions]
    # per proxy and mode: frames, sizes; one of correlation; per mode: components, actions
    assert len(figures) == 2 * 2 * 2 + 1 + 2 * 2
    assert len(page.all("img")) == len(figures) + len(study["moments"])
    assert len(page.all("figure")) == len(page.all("figcaption")) == len(page.all("img"))
    assert all(len(attributes["alt"] or "") > 20 for attributes in page.all("img"))
    assert len({attributes["alt"] for attributes in figures}) == len(figures)
    for attributes in figures:
        image = Image.open(io.BytesIO(base64.b64decode((attributes["src"] or "").partition(",")[2])))
        assert image.width == 1680 and image.height > 400
    for mode in ("greedy", "sampled"):
        assert sum(f"{mode}:" in (a["alt"] or "").lower() for a in figures) == 6
    assert page.text.count("(3 seeds") >= 12


def test_every_group_has_a_table_row_with_its_numbers(report):
    _, page = report
    study = simulated_study()
    lines = [[cell.strip() for cell in row] for row in page.table_rows]
    for proxy in ("pacifist:20", "fuel:10"):
        for width, depth in SIZES:
            for mode in ("greedy", "sampled"):
                group = [row(proxy, (width, depth), seed, 1_000_000, mode) for seed in range(3)]
                means = [np.mean(r["true_return"]) for r in group]
                e = estimate(means)
                assert e.low is not None and e.high is not None
                cell = f"{number(e.mean)} {number(e.low)} to {number(e.high)}"
                head = [proxy, str(width), str(depth), f"{PARAMETERS[width, depth]:,}"]
                assert [line for line in lines if line[:4] == head and line[5] == "3" and line[7] == cell]
    for name, value in study["rewards"].items():
        assert [name, value] in lines
    assert ["widths", "256, 1,024"] in lines
    assert study["command"] in page.texts and study["date"] in page.text
    for moment in study["moments"]:
        assert moment["caption"] in page.text
    assert study["problems"][0] in page.texts


def test_only_the_simulated_fall_is_reported(report):
    _, page = report
    assert "There is evidence of a fall in 6 of 20 searches." in page.text
    assert "pacifist:20, greedy: along parameters, along frames for 2 of 4 sizes" in page.text
    assert "fuel:10, greedy:" not in page.text
    found = [row for row in page.table_rows if row and row[-1].strip() == "Evidence of a fall."]
    assert len(found) == 6
    assert [r for r in found if r[0].strip() == "by parameters" and "952k and 3.31M: 100%" in r[3]]


def test_few_seeds_are_noted(report):
    _, page = report
    assert "With fewer than 5 seeds an interval is hardly more than the range of the seeds" in page.text


def test_equal_studies_give_equal_pages(tmp_path):
    study = simulated_study(**SMALL)
    assert written(study, tmp_path / "a")[0] == written(study, tmp_path / "b")[0]


def test_a_single_seed_has_no_interval_on_the_page(tmp_path):
    _, page = written(simulated_study(**(SMALL | {"seeds": 1, "frames": (1000, 2000, 3000)})), tmp_path)
    assert "There is a single seed: there is no interval" in page.text
    assert "No evidence of a fall in 3 searches; 0 of them had enough seeds and points." in page.text
    assert "one seed has no interval, so no bands" in page.text
    assert "95 % bootstrap intervals over seeds." not in page.text
    assert "Undefined: a return is the same in all runs, or there are too few runs." in page.text


def test_incomplete_runs_are_named(tmp_path):
    study = simulated_study(**SMALL)
    study["rows"] = [r for r in study["rows"] if r["seed"] != 1 or r["frames"] != 2000]
    _, page = written(study, tmp_path)
    assert "Not at the last checkpoint" in page.text and "score/w256-d2/seed1" in page.text


def test_optional_parts_may_be_missing(tmp_path):
    study = simulated_study(**SMALL)
    study |= {"actions": [], "step_correlation": [], "moments": [], "problems": []}
    for r in study["rows"]:
        r |= {"returns": {}, "components": {}, "action_counts": []}
    _, page = written(study, tmp_path)
    for sentence in (
        "in no segment was the proxy return positive",
        "None were reported.",
        "No components",
        "No actions were recorded.",
    ):
        assert sentence in page.text
    assert "steps within a run" not in page.text
    assert "occurred" not in page.text


def test_a_study_without_results_has_a_page(tmp_path):
    _, page = written(simulated_study() | {"rows": [], "step_correlation": [], "moments": []}, tmp_path)
    assert "No run has results yet." in page.text and "failed: the machine ran out of memory" in page.text


def test_actions_without_names_and_only_the_sampled_mode(tmp_path):
    study = simulated_study(**(SMALL | {"modes": ("sampled",)})) | {"actions": []}
    _, page = written(study, tmp_path)
    assert not [s for s in page.texts if s.startswith("The same,")]
    assert "Sampled policy at the last checkpoint" in page.text


def test_an_undefined_correlation_is_a_sentence_on_the_page(tmp_path):
    study = simulated_study(**SMALL)
    for r in study["rows"]:
        r["true_return"] = [5.0] * 10
    for c in study["step_correlation"]:
        c["pearson"] = None
    _, page = written(study, tmp_path)
    assert page.text.count("Undefined: a return is the same in all episodes, or there are too few episodes.") == 2
    assert page.text.count("Undefined: a return is the same in all runs, or there are too few runs.") == 2
    assert "Undefined: a reward is the same in all steps." in page.text


def test_all_texts_of_a_study_are_escaped(tmp_path):
    markup = """<script>alert("1")</script> & ' </style><img src=http://example.org/x>"""
    study = simulated_study(**SMALL)
    study |= {
        "title": markup,
        "date": markup,
        "command": markup,
        "settings": {markup: markup},
        "rewards": {markup: markup},
    }
    study |= {"problems": [markup], "actions": [markup] * 18}
    study["moments"] = [{"proxy": markup, "run": markup, "caption": markup, "png": "AAAA"}]
    for r in study["rows"]:
        r |= {
            "proxy": markup,
            "run": f"{markup}{r['run']}",
            "returns": {markup: [1.0]},
            "components": {markup: [1.0] * 10},
        }
    for c in study["step_correlation"]:
        c["proxy"] = markup
    text, page = written(study, tmp_path)
    assert not page.all("script")
    assert "<script" not in text and "<img src=http" not in text
    assert markup in page.texts
    assert all((a["src"] or "").startswith("data:image/png") for a in page.all("img"))
    assert markup in [a["alt"] for a in page.all("img")]


@pytest.mark.parametrize(
    ("x", "text"),
    [(999.7, "1,000"), (-999.6, "-1,000"), (123.4, "123"), (0.01234, "0.0123"), (0, "0"), (1e6, "1,000,000")],
)
def test_numbers_are_short_and_without_exponents(x, text):
    assert number(x) == text


def test_counts_have_metric_prefixes():
    assert [short(x) for x in (886_300, 4_359_708, 250_000, 12, 2e9)] == ["886k", "4.36M", "250k", "12", "2G"]


@pytest.mark.skipif(CHROMIUM is None, reason="neither chromium nor chrome is installed")
def test_a_browser_shows_all_figures(report, tmp_path):
    text, page = report
    shown, checked, shot = tmp_path / "report.html", tmp_path / "checked.html", tmp_path / "page.png"
    shown.write_text(text, encoding="utf-8")
    chromium("--window-size=1200,3000", f"--screenshot={shot}", shown, tmp_path)
    image = np.asarray(Image.open(shot).convert("L"))
    assert image.shape[1] == 1200
    bands = np.array_split(image, 10)  # text or figures from top to bottom
    assert all(band.std() > 5 for band in bands)

    # the browser's widths of the images and of the page; the page forbids scripts, so a copy allows this one
    script = """<script>window.onload = () => { document.title = JSON.stringify([
        [...document.images].map(i => i.naturalWidth), document.documentElement.scrollWidth]) }</script>"""
    checked.write_text(
        text.replace(POLICY.replace("'", "&#39;"), "img-src data:").replace("</body>", f"{script}</body>")
    )
    dumped = chromium("--window-size=1200,3000", "--dump-dom", checked, tmp_path)
    widths, across = json.loads(re.findall(r"<title>(.*?)</title>", dumped)[0])
    assert len(widths) == len(page.all("img")) and min(widths) > 0
    assert across <= 1200


def chromium(size: str, task: str, page: Path, home: Path) -> str:
    quiet = "--no-first-run --disable-background-networking --disable-component-update --disable-sync --disable-quic"
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        *quiet.split(),
        f"--user-data-dir={home}/user",
    ]
    command += [size, task, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

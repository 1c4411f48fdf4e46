"""Renders a study as one HTML page without other files, from templates/study.html.jinja."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bestiary.config.extras import require
from bestiary.reward_hacking.report.blocks import TableBlock, count, setting_text
from bestiary.reward_hacking.report.sections import analyse, behaviour, correlations, proxy_section, returns_by_reward
from bestiary.reward_hacking.report.summary import summary
from bestiary.reward_hacking.statistics import Row, align_checkpoints

# the page loads nothing, whatever the texts of a study contain
POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"


def write_report(study: dict[str, Any], path: Path) -> None:
    """Write the page of a study (the contents of study.json)."""
    rows = align_checkpoints(study["rows"])
    runs, seeds = ({row[key] for row in rows} for key in ("run", "seed"))
    settings = [[name.replace("_", "-"), setting_text(value)] for name, value in study["settings"].items()]
    text = render(
        "study.html.jinja",
        policy=POLICY,
        title=study["title"],
        date=study["date"],
        command=study["command"],
        runs=count(len(runs), "run"),
        seeds=count(len(seeds), "seed"),
        settings=TableBlock(["setting", "value"], settings, left=2),
        rewards=TableBlock(["reward", "sum per step"], list(study["rewards"].items()), left=2),
        results=results_of(study, rows) if rows else None,
        segments=study["moments"],
        problems=study["problems"],
        count=count,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def results_of(study: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    results = analyse(list(rows), str(study["settings"].get("true", "")))
    return {
        "summary": summary(results),
        "returns": returns_by_reward(results),
        "proxies": [
            {"proxy": proxy, "by_mode": proxy_section(results, proxy)}
            for proxy in dict.fromkeys(row["proxy"] for row in rows)
        ],
        "correlation": correlations(results, study["rewards"], study["step_correlation"]),
        **behaviour(results, study["actions"]),
    }


def render(template: str, **context: Any) -> str:
    """Render a packaged template. Values are escaped; an undefined name is an error."""
    require("jinja2", "report")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("bestiary.reward_hacking.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(context)

"""What the configurations of examples/observability name is what a server tells."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from test_metrics_table import full

from wicore_trt.metrics.exposition import collect_families, describe_processes

FOLDER = Path(__file__).parents[2] / "examples" / "observability"
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""


def told() -> dict[str, set[str]]:
    """Labels by the names of all samples."""
    found = {"up": set(SCRAPED)}
    for family in (*collect_families(full()), *describe_processes({"front": (True, 0)})):
        for sample in family.samples:
            found.setdefault(sample.name, set(SCRAPED)).update(sample.labels)
    return found


def unknown(expression: str, known: dict[str, set[str]]) -> list[str]:
    """What an expression names and nobody tells."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    names = re.findall(r"\b(?:wicore_|vllm:|up\b)\w*", bare)
    labels = re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"\"", bare)
    for group in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", bare):
        labels += [name.strip() for name in group.split(",")]
    assert names, f"no metric in {expression}"
    wrong = [name for name in names if name not in known]
    here = set().union(*(known.get(name, set()) for name in names))
    return wrong + [label for label in labels if label not in here]


def test_the_checker_sees_unknown_names():
    known = told()
    assert unknown('sum by (le, x) (rate(wicore_steps_total{y=~"a",job="b"}[5m]))', known) == ["y", "le", "x"]
    assert unknown("wicore_nothing_at_all > wicore_engine_up", known) == ["wicore_nothing_at_all"]


def test_alerts_name_what_is_told():
    rules = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
    known = told()
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 10
    for rule in rules:
        assert not unknown(rule["expr"], known), rule["alert"]
        labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        names = re.findall(r"\b(?:wicore_\w+|up\b)", rule["expr"])
        assert labels <= set().union(*(known[name] for name in names)), rule["alert"]


def test_the_scrape_has_the_alerts():
    scrape = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert scrape["rule_files"] == ["alerts.yml"] and scrape["scrape_configs"][0]["job_name"] == "wicore"


def test_the_dashboard_names_what_is_told():
    board = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    known, metrics = told(), 0
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        if panel["type"] == "logs":
            continue
        for target in panel["targets"]:
            metrics += 1
            assert not unknown(target["expr"], known), panel["title"]
            legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert legend <= set().union(*known.values()), panel["title"]
    assert metrics > 30

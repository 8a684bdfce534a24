"""What GitHub runs and asks: commands and files that are there, with no more rights than needed."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from tests.program import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
INPUTS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.name)
def workflow(request):
    """What a workflow's file says; ``on`` is true in YAML 1.1."""
    return yaml.safe_load(request.param.read_text())


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_every_command_of_a_workflow_is_a_file_of_the_checkout(workflow):
    commands = [shlex.split(step["run"]) for step in steps(workflow) if "run" in step]
    assert commands
    for interpreter, file, *_ in commands:
        assert interpreter in ("bash", "python")
        assert (ROOT / file).is_file(), file


def test_actions_are_pinned_to_commits(workflow):
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    for action in used:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", action), action


def test_workflows_only_read_and_end(workflow):
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        assert 0 < job["timeout-minutes"] <= 120


def test_pushes_run_the_tests_and_every_week_the_versions_are_tried():
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert set(ci[True]) == {"push", "pull_request", "schedule", "workflow_dispatch"}
    jobs = {name: (job["if"], job["steps"][-1]["run"]) for name, job in ci["jobs"].items()}
    assert "push" in jobs["tests"][0]
    assert jobs["tests"][1] == "bash .ci/run"
    assert "schedule" in jobs["versions"][0]
    assert jobs["versions"][1] == "python scripts/check_versions.py"


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_forms_have_what_github_asks_of_them(form):
    content = yaml.safe_load(form.read_text())
    if form.name == "config.yml":
        assert content == {"blank_issues_enabled": True}
        return
    assert all(content[key] for key in ("name", "description", "body"))
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in content["body"]} <= INPUTS
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)

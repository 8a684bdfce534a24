"""Which tests run, and in which order they are dealt out to the workers of pytest-xdist.

``--all`` adds the tests marked ``whole``: they run commands of the documentation and of the papers'
page at length, whose parts other tests cover. Workers take a file or class at a time, those that
took longest first, so that no worker is left with a long one at the end; ``durations.json`` has
their seconds, and ``--record-durations`` writes it anew.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
LEAST = 2.0
"""Seconds from which a file or class is worth an entry."""


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also tests marked 'whole'")
    parser.addoption(
        "--record-durations", action="store_true", help=f"write {DURATIONS.name} of this run"
    )


@pytest.hookimpl(optionalhook=True)  # scripts/mutate.py runs without pytest-xdist
def pytest_xdist_auto_num_workers(config):
    """One more than cores: workers wait for processes that they start, and for disks."""
    from trainer.common.processes import cores

    return cores() + 1


def pytest_collection_modifyitems(config, items):
    named = any("::" in word for word in config.args)
    if not (config.getoption("--all") or named):
        left_out = [item for item in items if item.get_closest_marker("whole")]
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left_out)
    durations = json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}
    items.sort(key=lambda item: -durations.get(scope(item.nodeid), 0.0))


def scope(nodeid):
    """The file or class that one worker runs as a whole (xdist's ``--dist=loadscope``)."""
    return nodeid.rsplit("::", 1)[0]


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--record-durations"):
        return
    seconds = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                seconds[scope(report.nodeid)] += report.duration
    known = json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}
    known |= {name: round(taken, 1) for name, taken in seconds.items()}  # of the tests that ran
    kept = {
        name: taken
        for name, taken in sorted(known.items())
        if taken >= LEAST and (config.rootpath / name.split("::")[0]).is_file()
    }
    DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")
    terminalreporter.write_line(f"{DURATIONS}: {len(kept)} files and classes")

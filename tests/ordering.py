"""Which tests run: quick ones, with ``--all`` also ``slow``, with ``--weekly`` also ``weekly``.

A test named on the command line (``file::test``) always runs.
"""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also tests marked slow (CI)")
    parser.addoption("--weekly", action="store_true", help="also tests marked slow or weekly")


@pytest.hookimpl(optionalhook=True)  # scripts/mutate.py runs without pytest-xdist
def pytest_xdist_auto_num_workers(config):
    return len(os.sched_getaffinity(0))


def pytest_collection_modifyitems(config, items):
    if any("::" in word for word in config.args):
        return
    weekly = config.getoption("--weekly")
    left_out = set() if weekly else {"weekly"}
    if not (config.getoption("--all") or weekly):
        left_out.add("slow")

    def runs(item):
        return not any(item.get_closest_marker(name) for name in left_out)

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = [item for item in items if runs(item)]

"""Figures of analyses are drawn in slow tests only: axes take longer than tiny models."""

from __future__ import annotations

import sys

import pytest

from trainer.workflows import analyze

DRAWING = ("draw", "heat_maps")


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    if request.node.get_closest_marker("slow"):
        return
    comparisons = analyze.compare_drop, analyze.offset_changes
    for function in (*analyze.TOPICS.values(), *comparisons):
        module = sys.modules[function.__module__]
        for name in set(DRAWING) & set(vars(module)):
            monkeypatch.setattr(module, name, lambda *_, **__: None)

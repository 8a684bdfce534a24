"""Figures of analyses are drawn in slow tests only: axes take longer than tiny models. In others a
figure is what it would be drawn from: arguments, and arguments by keyword."""

from __future__ import annotations

import sys

import pytest

from trainer.analysis.results import TOPICS

DRAWING = ("draw", "heat_maps")


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    if request.node.get_closest_marker("slow"):
        return
    for topic in TOPICS.values():
        module = sys.modules[topic.function.__module__]
        for name in set(DRAWING) & set(vars(module)):
            monkeypatch.setattr(module, name, lambda *given, **options: (given, options))

"""After every test: nothing that the package put on a model or into the process is left there."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from functools import lru_cache, wraps
from pathlib import Path
from weakref import WeakSet

import pytest
from torch.utils.hooks import RemovableHandle

from trainer.model.attention import Attention

PACKAGE = str(Path(__file__).parents[1] / "trainer")
STAYS = "reload.py"
"""Counts the tokens of a model for as long as its process runs."""


LAYERS: WeakSet[Attention] = WeakSet()
"""The attention layers of all models."""


def remembered(make):
    """Return a constructor that also adds the object to :data:`LAYERS`."""

    @wraps(make)
    def remembering(layer, *arguments, **named):
        make(layer, *arguments, **named)
        LAYERS.add(layer)

    return remembering


Attention.__init__ = remembered(Attention.__init__)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Every hook of the package was removed, and no variable of its modules has another value.

    A hook of a model that is gone, or of one that a later test makes, does not count.
    """
    handles = []
    usual = RemovableHandle.__init__

    def made(handle, *arguments, **named):
        usual(handle, *arguments, **named)
        file = sys._getframe(2).f_code.co_filename
        if file.startswith(PACKAGE) and not file.endswith(STAYS):
            handles.append((handle, file))

    RemovableHandle.__init__ = made
    before, words = variables(), [*sys.argv]
    try:
        yield
    finally:
        RemovableHandle.__init__ = usual
    hooks = [file for handle, file in handles if is_registered(handle)]
    assert not hooks, f"hooks that were not removed: {hooks}"
    observed = [layer for layer in LAYERS if layer.observe is not None]
    for layer in observed:
        layer.observe = None
    assert not observed, f"{len(observed)} layers that are still observed"
    words_after, sys.argv[:] = [*sys.argv], words
    assert words_after == words, "the command line of the process is another one than before"
    after = variables()
    changed = [name for name in before.keys() & after.keys() if before[name] != after[name]]
    assert not changed, f"variables with another value than before: {sorted(changed)}"


def is_registered(handle):
    """Return whether a hook is still on a module."""
    hooks = handle.hooks_dict_ref()
    return hooks is not None and handle.id in hooks


def variables():
    """Return the values of context variables, and of module variables that functions assign."""
    return {
        (module.__name__, key): id(value.get(None) if isinstance(value, ContextVar) else value)
        for module, keys in watched(len(sys.modules))
        for key in keys
        for value in [getattr(module, key, None)]
    }


@lru_cache(maxsize=1)
def watched(modules):
    """Return the imported modules of the package with their variables of both kinds.

    ``modules``: number of all imported modules; the answer is worked out anew when it changes.
    """
    of_package = [m for name, m in list(sys.modules.items()) if name.startswith("trainer.")]
    contexts = {
        module.__name__: [k for k, v in vars(module).items() if isinstance(v, ContextVar)]
        for module in of_package
    }
    return [
        (module, [*ASSIGNED.get(name, ()), *contexts[name]])
        for module in of_package
        if contexts[name := module.__name__] or name in ASSIGNED
    ]


ASSIGNED = {
    "trainer.training.loggers": ("_kept", "_unreachable"),
    "trainer.training.callbacks.stopping": ("_process_notice",),
}
"""Module variables that functions of the package assign."""

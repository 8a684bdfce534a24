"""What takes most of the time of many tests and is the same in all is done once for them."""

from __future__ import annotations

import base64
import copy
import functools

import pytest

from trainer.commands.hydra import composing as configuration
from trainer.commands.hydra import files as config_files
from trainer.plotting import style

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg"
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="1pt" height="1pt" viewBox="0 0 1 1"/>'
BLANK = {"png": base64.b64decode(f"{PNG}=="), "svg": SVG.encode()}


def compose_once(patch):
    """Read the program's own configuration files, and compose them with the same words, once."""
    compose, read = configuration.compose_with_hydra, config_files.read_file
    composed, known = functools.cache(compose), functools.cache(read)

    def compose_first(root, lines, files, problems=()):
        # A user's directory may be new; known problems belong to this call's error.
        if files.user_directory is not None or problems:
            return compose(root, lines, files, problems)
        return copy.deepcopy(composed(root, tuple(lines), files))

    def read_once(path):
        own = path.is_relative_to(config_files.config_directory())
        return (known if own else read)(path)

    patch.setattr(configuration, "compose_with_hydra", compose_first)
    patch.setattr(config_files, "read_file", read_once)
    patch.setattr(configuration, "read_file", read_once)


@pytest.fixture(scope="session", autouse=True)
def composed_once():
    """Configurations are composed once."""
    with pytest.MonkeyPatch.context() as patch:
        compose_once(patch)
        yield


def blank(figure, suffix, **_):
    """In the place of a figure, which is made: to render it takes most of a report's time."""
    return BLANK[suffix]


@pytest.fixture(autouse=True)
def blank_figures(request, monkeypatch):
    """But in tests of reports."""
    if not {"report", "plotting"} & {*request.path.parts}:
        monkeypatch.setattr(style, "_rendered", blank)

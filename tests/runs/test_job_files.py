"""What the batch script is told by files."""

from __future__ import annotations

import pytest

from trainer.commands.exit_codes import exit_codes
from trainer.errors import TransientError, UserError


@pytest.mark.parametrize(
    ("error", "said"), [(UserError, True), (TransientError, False), (RuntimeError, False)]
)
def test_only_a_mistake_of_the_users_is_not_to_be_tried_again(tmp_path, monkeypatch, error, said):
    """A disk, a GPU or another process may do better the next time."""
    monkeypatch.setenv("UNROPE_MISTAKE_FILE", str(tmp_path / "mistake"))
    with pytest.raises((SystemExit, RuntimeError)), exit_codes():
        raise error("something")
    assert (tmp_path / "mistake").exists() == said

"""What may be deleted of a run directory: only what this program made."""

from __future__ import annotations

import os
import re
from pathlib import Path

from trainer.common.errors import Problem, UserError
from trainer.runs.mark import MARK, check_mark

_CHECKPOINT = r"(unused-)?(step-\d+|before-drop)|\.[^/]+\.(partial|removed)"
_SAVED = r"(manifest\.json|state\.json|\.metadata|temperature\.json|__\w+\.distcp)"
_TABLE = r"(report\.(json|html)|table\.(md|tex|csv)|[\w.-]+\.json)"
_PICTURE = r"[\w.,+ -]+\.(svg|png|csv|json)"
_EVALUATION = rf"({_TABLE}|cells/[a-z]+-[0-9a-f]{{20}}\.json|figures/{_PICTURE})"
_OWN = re.compile(
    rf"""
    config\.yaml | {re.escape(MARK)} | metrics\.csv | log\.txt | heartbeat\.json | failures\.txt
    | wandb_id | \.lock
    | (config\.yaml|metrics\.csv)\.partial
    | (.*/)?\.[^/]+\.\d+\.tmp
    | {_TABLE} | figures/{_PICTURE}
    | profile/steps-\d+-\d+-rank-\d+\.(json\.gz|txt) | flight_recorder/rank_\d+
    | checkpoints/({_CHECKPOINT})/{_SAVED}
    | (evaluation|lengths/[^/]+)/{_EVALUATION}
    | analysis/\.[^/]+\.partial-.*
    | analysis/[^/]+/(report\.html|{_PICTURE}|figures/{_PICTURE})
    | (wandb|tensorboard)/.*
    """,
    re.VERBOSE,
)
"""Paths within a run, but for its controls, which are runs themselves."""
MOST_NAMED = 5


def overwrite_problems(directory: Path) -> list[Problem]:
    """Why a directory may not be replaced, one sentence each: it was not made by this program, or
    somebody put files of their own into it."""
    if directory.is_symlink():
        return [
            Problem("overwrite", f"{str(directory)!r} is a link; give the directory that it names.")
        ]
    if not (directory / MARK).is_file():
        return [
            Problem(
                "overwrite",
                f"{str(directory)!r} is not marked as a run of this program (it has no {MARK}), "
                "so nothing is deleted. Remove it yourself or choose another run_dir; a run of "
                "an older version is marked when it is resumed.",
            )
        ]
    try:
        check_mark(directory)
    except UserError as error:
        return list(error.problems)
    foreign, problems = [], []
    for place, folders, files in os.walk(directory):
        path = Path(place)
        if path == directory and "controls" in folders:
            folders.remove("controls")
            controls = sorted((directory / "controls").iterdir())
            problems = [p for control in controls for p in overwrite_problems(control)]
        names = [*files, *(name for name in folders if (path / name).is_symlink())]
        paths = ((path / name).relative_to(directory).as_posix() for name in names)
        foreign += [name for name in paths if not _OWN.fullmatch(name)]
    more = f", and {len(foreign) - MOST_NAMED} more" if len(foreign) > MOST_NAMED else ""
    if foreign:
        named = ", ".join(repr(str(directory / name)) for name in sorted(foreign)[:MOST_NAMED])
        problems.append(
            Problem(
                "overwrite",
                f"not made by this program, so nothing is deleted: {named}{more}; move what you "
                "want to keep elsewhere first.",
            )
        )
    return problems

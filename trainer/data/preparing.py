"""Preparation of configured texts: where a text lies, whether it is complete, what is missing."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from tokenizers import Tokenizer

from trainer.common.errors import Problem, UserError, near_path, raise_all, renaming
from trainer.common.fields import adapter
from trainer.common.processes import cores
from trainer.data.config import DataConfig, TokenizerConfig
from trainer.data.packing import BestFitBlocks, is_packed, pack
from trainer.data.plan import Plan, digest, directory_name, make_plan, request_digest, request_of
from trainer.data.prepared import (
    cache_directory,
    is_planned,
    is_prepared,
    open_prepared,
    read_manifest,
)
from trainer.data.sources import BUILT_IN, Listing, describe, is_here, list_source, source_problems
from trainer.data.tokenizer import TextTokenizer
from trainer.data.units import Report, prepare_units, reporting_failures, write_manifest

log = logging.getLogger(__name__)

LARGEST_BY_ITSELF = 256 << 20
"""Bytes of local text that a run of one process prepares without a command."""


@dataclass(frozen=True)
class Preparation:
    """Preparation of one text: its directory, and whether it is complete.

    ``listing`` is the state of the source. It is None if the source was not asked, because prepared
    text was found or the source is remote.
    """

    config: DataConfig
    tokenizer_config: TokenizerConfig
    tokenizer: TextTokenizer | None
    directory: Path
    listing: Listing | None = None

    @property
    def request(self) -> dict[str, Any]:
        """Everything that its tokens depend on, in plain values."""
        return request_of(self.config, self.tokenizer_config, self.tokenizer)

    @classmethod
    def find(
        cls,
        config: DataConfig,
        tokenizer_config: TokenizerConfig,
        tokenizer: TextTokenizer | None,
        network: bool = False,
        wanted: str | None = None,
    ) -> Preparation:
        """Find the directory.

        ``network``: whether a remote source may be asked. ``wanted``: fingerprint of a state of the
        source; text prepared from that state is used, whatever the state of the source now.

        Raises:
            UserError: there is no such source, or it cannot be read.
        """
        preparation = partial(cls, config, tokenizer_config, tokenizer)
        if config.prepared:
            read_manifest(Path(config.prepared))
            return preparation(Path(config.prepared))
        raise_all(source_problems(config))
        root = cache_directory(config) / "corpora"
        if wanted and (directory := _prepared_as(root, wanted)):
            return preparation(directory)
        request = request_of(config, tokenizer_config, tokenizer)
        if not is_here(config) and network and (begun := _pinned(config, root, request)):
            return preparation(begun)
        if is_here(config) or network:
            try:
                listing = list_source(config)
                return preparation(root / directory_name(request, listing), listing)
            except UserError:
                states = _states(root, request)
                if len(states) != 1:
                    raise
                return preparation(states[0])
        states = _states(root, request)
        if len(states) > 1:
            raise UserError.at(
                "data.revision",
                f"several states of {describe(config)} are prepared: "
                f"{', '.join(map(str, states))}; name one with data.prepared.",
            )
        return preparation(states[0] if states else root)

    @property
    def is_done(self) -> bool:
        """Whether the text is prepared, and packed if packing is configured."""
        if not is_prepared(self.directory):
            return False
        return self.config.packing == "stream" or is_packed(
            self.directory, self.config.sequence_length
        )

    @property
    def own_tokenizer(self) -> TextTokenizer:
        """The text's tokenizer; available as soon as the text is planned."""
        if is_prepared(self.directory):
            return open_prepared(self.directory).text_tokenizer
        plan = Plan.read(self.directory)
        return TextTokenizer(Tokenizer.from_str(plan.tokenizer), (plan.end,))

    @property
    def is_small(self) -> bool:
        """Whether a run may prepare the text itself."""
        if self.listing is None:  # prepared text that lacks only its packing
            return is_prepared(self.directory)
        return sum(file.text_bytes for file in self.listing.files) <= LARGEST_BY_ITSELF

    @property
    def missing(self) -> Problem:
        """Problem of a run that may not prepare its text itself."""
        if is_prepared(self.directory):
            return Problem(
                "data.packing",
                f"{str(self.directory)!r} has no blocks of {self.config.sequence_length} tokens "
                "yet; once, where it can be written:",
                command=prepare_command(),
            )
        if others := _states(self.directory.parent, self.request):
            changed = "other files or sizes than when it was prepared"
            if self.config.source not in BUILT_IN:
                changed = "other code than when it was prepared, or none was noted then"
            return Problem(
                "data",
                f"{describe(self.config)} has {changed} "
                f"({', '.join(map(str, others))}); data.prepared= takes that as it is, and this "
                "prepares it anew:",
                command=prepare_command(),
            )
        return not_prepared(self.config)

    def run(
        self,
        part: tuple[int, int] = (1, 1),
        workers: int | None = None,
        report: Report = lambda _: None,
        planned: Callable[[Plan], None] = lambda _: None,
        wait: bool = False,
    ) -> bool:
        """Do or resume one part of the work; return whether all parts are done.

        ``wait``: wait for another process that does the same, instead of raising an error.

        Raises:
            UserError: the source cannot be read, has too little text or too many bad rows, or the
                directory cannot be written.
        """
        with reporting_failures(self.directory):
            if not is_prepared(self.directory):
                plan = self._plan(part[1])
                planned(plan)
                if not prepare_units(
                    plan,
                    self.config,
                    self.directory,
                    part=part,
                    workers=workers or cores(),
                    report=report,
                    wait=wait,
                ):
                    return False
                write_manifest(plan, self.directory)
            if not self.is_done:
                length = self.config.sequence_length
                log.info("Packing documents into sequences of %d tokens", length)
                text = open_prepared(self.directory)
                pack(text, length)
                blocks = len(BestFitBlocks(text, length))
                share = len(text.train) / max(blocks * length, 1)
                log.info("%s sequences, %.2f%% of them text", f"{blocks:,}", 100 * share)
        return True

    def _plan(self, parts: int) -> Plan:
        if not (self.directory / "plan.json").is_file():
            assert self.listing is not None
            root, request = self.directory.parent, self.request
            if parts > 1 and (begun := _states(root, request, finished=False)):
                raise UserError.at(
                    "data",
                    f"parts of {describe(self.config)} lie in {str(begun[0])!r}, begun when "
                    "it had other files or sizes; bring those back, or remove that directory.",
                )
            plan = make_plan(self.config, self.tokenizer_config, self.tokenizer, self.listing)
            plan.write(self.directory)
        return Plan.read(self.directory)


def _prepared_as(root: Path, fingerprint: str) -> Path | None:
    """Return the directory of the text with this fingerprint, or None.

    Fingerprints come from files that others may have written, so only well-formed ones are looked
    up.
    """
    if not re.fullmatch(r"[0-9a-f]{16}", fingerprint):
        return None
    for path in sorted(root.glob(f"*-{fingerprint[:8]}-{fingerprint[8:]}/manifest.json")):
        return path.parent
    return None


def _states(root: Path, request: dict[str, Any], finished: bool = True) -> list[Path]:
    """Return the texts with this request, in any state of the source, finished or unfinished."""
    is_stored, read = (is_prepared, read_manifest) if finished else (is_planned, Plan.read)
    return [
        directory
        for directory in sorted(root.glob(f"*-{request_digest(request)}-*"))
        if is_stored(directory)
        and is_prepared(directory) == finished
        and read(directory).request.get("files") == request.get("files")
    ]


def _pinned(config: DataConfig, root: Path, request: dict[str, Any]) -> Path | None:
    """Return the directory in which preparing a remote source began, or None.

    Work continues there even if the source has changed, so that all parts and jobs see one state. A
    dataset of the hub stays at the commit that it was prepared from until another one is named.
    """
    if begun := _states(root, request, finished=False):
        return begun[0] if len(begun) == 1 else None
    if config.source != "hub" or len(done := _states(root, request)) != 1:
        return None
    log.info(
        "%s is prepared at commit %s; data.revision= names another",
        describe(config),
        read_manifest(done[0]).source.get("revision"),
    )
    return done[0]


def not_prepared(config: DataConfig) -> Problem:
    """Describe a missing text: its size and the command that prepares it."""
    return Problem(
        "data",
        f"{describe(config)} has not been prepared below "
        f"{str(cache_directory(config))!r}; once, where the text and that place can be reached:",
        command=prepare_command(),
    )


def unprepared(values: Any) -> list[Problem]:
    """Return a problem for each remote text that is prepared with no tokenizer."""
    try:
        config = adapter(DataConfig).validate_python(values)
        texts = [text for text, _ in config.texts.values()]
    except (ValidationError, TypeError):
        return []
    return [
        not_prepared(text)
        for text in texts
        if not text.prepared and not is_here(text) and not _any_prepared(text)
    ]


def missing_files(config: DataConfig) -> list[Problem]:
    """Describe each local file that is named, does not exist, and was not prepared before.

    Directories, globs and lists are left to :func:`~trainer.data.files.find_files`.
    """
    problems = []
    for name, (text, _) in config.texts.items():
        if text.source != "files" or text.prepared or _any_prepared(text):
            continue
        key = f"data.mixture.{name}.files" if config.mixture else "data.files"
        problems += [
            Problem(key, f"there is no file {path!r}.", near_path(Path(path)))
            for path in text.files
            if not re.search(r"[*?[]|://|^@|/$|^$", path)
            and not os.path.lexists(Path(path).expanduser())
        ]
    return problems


def _any_prepared(config: DataConfig) -> bool:
    """Whether the text is prepared with any tokenizer, in any state of its source."""

    def without_tokenizer(request: dict[str, Any]) -> str:
        return digest({key: value for key, value in request.items() if key != "tokenizer"})

    wanted = without_tokenizer(request_of(config, TokenizerConfig(), None))
    for path in (cache_directory(config) / "corpora").glob("*/manifest.json"):
        try:
            request = read_manifest(path.parent).request
        except UserError:  # another text, perhaps of another version
            continue
        if without_tokenizer(request) == wanted:
            return True
    return False


def prepare_command() -> str:
    """Return the command that prepares the text of the present command line."""
    words = sys.argv[1:] if Path(sys.argv[0]).name in ("__main__.py", "unrope") else []
    while words and words[0] in ("train", "slurm", "prepare", "plan"):
        words = words[1:]
    if words and re.fullmatch(r"\w+", words[0]):  # a command that reads runs, not this text
        words = []
    others = ("--submit", "--multirun", "verify=", "prepare.", "slurm.", "gpu=", "mfu=", "exact=")
    words = [word for word in words if not word.startswith(others)]
    return shlex.join(["python", "-m", "trainer", "prepare", *(words or ["+experiment=NAME"])])


def of_mixture(config: DataConfig, name: str) -> AbstractContextManager[None]:
    """Re-attribute errors about one text of a mixture to that text's keys."""
    return renaming(data=f"data.mixture.{name}") if config.mixture else nullcontext()

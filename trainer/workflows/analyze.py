"""Analyses of the attention of checkpoints and published models, without their runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainer.analysis.capture import NeedlePrompt
from trainer.analysis.drop import DropStudy
from trainer.analysis.offset_features.changes import OffsetChanges
from trainer.analysis.settings import ALL, COMPARING, DROP, OFFSETS
from trainer.analysis.studies.catalogue import STUDIES
from trainer.analysis.studies.section import Section
from trainer.analysis.studies.study import Study, Target, run
from trainer.checkpoint import BEFORE_DROP
from trainer.common.errors import Problem, UserError, raise_all, renaming
from trainer.common.processes import usual_threads
from trainer.common.progress import Progress
from trainer.common.words import counted
from trainer.data.corpus import Corpus
from trainer.data.held_out import (
    HeldOutPart,
    HeldOutText,
    divided,
    held_out_windows,
)
from trainer.data.order import Integers
from trainer.data.prepared import Tokens
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.fitting import FitText, Fitting
from trainer.evaluation.haystack import Haystack
from trainer.evaluation.methods import recipe
from trainer.evaluation.needles import one_of_many
from trainer.evaluation.store import Store
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import LayerChoice, layer_problems
from trainer.report.pages import GeometryReport, write_geometry_report
from trainer.runs.descriptions import environment, without_home
from trainer.runs.metrics_file import read_metrics
from trainer.runs.models import DTYPES, Candidate, distinct, find_candidate, origin
from trainer.workflows.requests import LAYERS_KEY, AnalysisConfig, AnalysisRequest
from trainer.workflows.subjects import held_out_corpus

log = logging.getLogger(__name__)


def analyze(request: AnalysisRequest, name: str | None = None) -> tuple[GeometryReport, Path]:
    """Make the requested analyses and write their page.

    ``name``: directory of the page among the run's analyses (None: the kind of analysis).

    Returns:
        The report and the path of its page.

    Raises:
        UserError: a checkpoint or text cannot be read, the text is too short, memory does not
            suffice, or the analysis does not apply to this model.
    """
    torch.set_num_threads(request.threads or usual_threads())
    config, kind = request.analysis, request.analysis.kind
    candidate = find_candidate(str(request.checkpoint))
    output = Path(request.output or candidate.home / "analysis" / (name or kind))
    output.mkdir(parents=True, exist_ok=True)
    other = _other(request, candidate, kind)
    if other is not None:
        candidate, other = distinct([candidate, other])
    raise_all(_chosen_problems(config, candidate))
    corpus = held_out_corpus(request.text, candidate)
    ids = page_texts(corpus, config, candidate)
    raise_all(_length_problems(config, ids.shape[1]))
    choice = choice_texts(corpus, config, candidate, ids)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    notes: list[str] = []

    def target_of(subject: Candidate) -> Target:
        model = subject.load(device).to(DTYPES[config.dtype]).eval()
        if config.method is not None:
            notes.append(use_method(model, subject, config.method, ids.shape[1], config.layers))
        read, chosen = ids.to(device), tuple((a, b) for a, b in config.chosen)
        length = min(read.shape[1], model.layout.training_length)
        needle = config.seed, config.needle.depth
        prompt = needle_prompt(subject.tokenizer, read, length, *needle)
        question = None
        if config.needle.kind == "question" and kind in (ALL, "matrix_entropy"):
            question = needle_prompt(subject.tokenizer, read[:1], read.shape[1], *needle)
            if question is None:
                raise UserError.at(
                    "analysis.needle.kind",
                    f"a text of {read.shape[1]:,} tokens has no room for a question; choose a "
                    "larger analysis.length, or copy.",
                )
        return Target(
            *(subject.name, model, read, chosen, config.seed, prompt),
            pairs=tuple(config.pairs),
            frames=config.frequency_entropy,
            prefixes=tuple(config.prefixes),
            attenuation=config.attenuation,
            choice=choice,
            needle=config.needle,
            question=question,
        )

    first = target_of(candidate)
    studies, left_out = _studies(first, kind)
    texts, length = ids.shape
    log.info("%s: %s of %s tokens", candidate.name, counted(texts, "text"), f"{length:,}")
    sections = _run(studies, first) if studies else []
    if other is not None:
        second = target_of(other)
        if kind in (ALL, DROP):
            sections.append(_drop(second, first, candidate).run())
        if kind in (ALL, OFFSETS) and first.rotates and second.rotates:
            sections.append(OffsetChanges(second, first).run())
    report = GeometryReport(
        candidate.name,
        first.training_length,
        first.length,
        len(ids),
        _encoding(first),
        sections,
        notes + left_out,
        without_home(json.loads(json.dumps({"checkpoint": request.checkpoint} | asdict(config)))),
        environment(corpus),
        origin([candidate] if other is None else [other, candidate]),
    )
    return report, write_geometry_report(report, output)


def use_method(
    model: LanguageModel, candidate: Candidate, name: str, length: int, layers: LayerChoice
) -> str:
    """Set the layout that a method has for texts of ``length`` tokens; return a sentence about it.

    The method chooses nothing on text.

    Raises:
        UserError: the method changes nothing in ``layers`` of this model.
    """
    layout = candidate.layout
    raise_all(layer_problems(LAYERS_KEY, layers, len(layout.layers)))
    config = EvaluationConfig(methods=[name], layers=layers)
    is_ours = candidate.computed_by is None
    made = recipe(name, layout, config, native=is_ours)
    if isinstance(made, str):
        raise UserError(f"analysis.method: {candidate.name} {made}")
    # Such a method reads no text and stores no choice.
    unread = Fitting(model, "", FitText({}, 0, ""), Store(Path()), batch_tokens=1)
    C = layout.training_length
    model.layout = made.make(unread).layout_at(max(1.0, length / C))
    tokens = f"{length:,} tokens of {C:,} in training"
    return f"{candidate.name} is read with {made.title}, set for {tokens}."


def _other(request: AnalysisRequest, candidate: Candidate, kind: str) -> Candidate | None:
    """Return the model to compare with, if any: ``compare``, or the run's checkpoint from before
    its drop."""
    if request.compare is None:
        return _before_drop(candidate, kind) if kind in (ALL, DROP) else None
    if kind not in COMPARING:
        known = f"{', '.join(COMPARING[:-1])} and {COMPARING[-1]}"
        raise UserError.at("compare", f"only for +analysis={known}, not for {kind!r}.")
    other = find_candidate(request.compare)
    words = [c.tokenizer.get_vocab(with_added_tokens=False) for c in (candidate, other)]
    if words[0] != words[1]:
        raise UserError.at(
            "compare", f"{other.reference!r} has another tokenizer than the checkpoint."
        )
    if kind == OFFSETS and not any(s.rotates for s in other.layout.spectra):
        raise UserError.at(
            "compare",
            f"+analysis={kind} expected a model with a rotary encoding, and {other.reference!r} "
            "has no rotation in any head.",
        )
    return other


def _before_drop(candidate: Candidate, kind: str) -> Candidate | None:
    before = candidate.path.parent / BEFORE_DROP
    if candidate.run is not None and before.is_dir() and before != candidate.path:
        return find_candidate(str(before))
    if kind == ALL:
        return None
    raise UserError.at(
        "compare",
        f"+analysis={DROP} needs the model before the drop, and {candidate.reference!r} has no "
        f"checkpoint {BEFORE_DROP!r}; give compare=PATH.",
    )


def _chosen_problems(config: AnalysisConfig, candidate: Candidate) -> list[Problem]:
    model = candidate.config
    layers, heads = model.num_hidden_layers, model.num_attention_heads
    problems = [
        Problem(
            "analysis.chosen",
            f"{pair} is not in this model; expected layers 0 to {layers - 1} and heads 0 to "
            f"{heads - 1}.",
        )
        for pair in config.chosen
        if not (0 <= pair[0] < layers and 0 <= pair[1] < heads)
    ]
    pairs = max(len(spectrum.inv_freq) for spectrum in candidate.layout.spectra)
    known = f"expected 0 to {pairs - 1}" if pairs else "no head of this model rotates"
    problems += [
        Problem("analysis.pairs", f"there is no pair {pair}; {known}.")
        for pair in config.pairs
        if not 0 <= pair < pairs
    ]
    return problems


def _length_problems(config: AnalysisConfig, length: int) -> list[Problem]:
    """Check the lengths of shorter texts against that of the page."""
    longest = config.attenuation.choice_length
    problems = [
        Problem(
            "analysis.prefixes",
            f"expected fewer tokens than the text of {length:,} has, got {n:,}.",
        )
        for n in config.prefixes
        if n >= length
    ]
    frame, gates = config.frequency_entropy.frame, config.attenuation.gates
    if longest is not None and longest < frame <= length and "spectrum" in " ".join(gates):
        problems.append(
            Problem(
                "analysis.attenuation.choice_length",
                f"expected at least {frame:,} tokens, a frame of SpectrumFE, whose thresholds are "
                f"among analysis.attenuation.gates; got {longest:,}.",
            )
        )
    if config.attenuation.choice == "page" and longest is not None and longest > length:
        problems.append(
            Problem(
                "analysis.attenuation.choice_length",
                f"expected at most {length:,}, the tokens of the page's text, got {longest:,}; or "
                "analysis.attenuation.choice=validation.",
            )
        )
    return problems


def _studies(target: Target, kind: str) -> tuple[list[Study], list[str]]:
    """Return the studies that apply to the target, and a sentence for each that does not."""
    if kind == DROP:
        return [], []
    studies, notes = [], []
    for key, study in STUDIES.items():
        if kind not in (ALL, key):
            continue
        problems = study.problems(target)
        if problems and kind != ALL:
            raise UserError(*(Problem(f"+analysis={key}", problem) for problem in problems))
        notes += [f"Left out: {study.title}: {problem}" for problem in problems]
        if not problems:
            studies.append(study(target))
    return studies, notes


def _run(studies: Sequence[Study], target: Target) -> list[Section]:
    # A section may read the model again, even several times: count it as a layer.
    steps = len(studies) * (len(target.model.layout.layers) + 1)
    with Progress("Analysing", steps, target.ids.numel() / steps) as progress:
        count = iter(range(1, steps + 1))
        progress.advance_to(0)
        return run(studies, target, lambda: progress.advance_to(next(count)))


def _drop(before: Target, after: Target, candidate: Candidate) -> DropStudy:
    """Compare before and after a drop, with the training loss if it is the run's own drop."""
    step = candidate.run.drop_step if candidate.run is not None else None
    metrics = candidate.home / "metrics.csv"
    if step is None or not metrics.is_file():
        return DropStudy(before, after)
    with renaming(run_dir="checkpoint"):
        curve = [(row["step"], row["loss"]) for row in read_metrics(metrics) if "loss" in row]
    return DropStudy(before, after, curve, step)


def _encoding(target: Target) -> str:
    """Describe in a sentence what the layers do to queries and keys."""
    spectra = target.model.layout.spectra
    pairs = sorted({sum(f > 0 for f in spectrum.inv_freq) for spectrum in spectra})
    half = target.model.config.head_size // 2
    if not any(pairs):
        bias = any(spectrum.alibi for spectrum in spectra)
        return "No rotation, a bias by distance (ALiBi)." if bias else "No positional encoding."
    counts = " or ".join(map(str, pairs))
    return f"{counts} of {half} channel pairs of a head rotate."


FURTHEST, USUAL, MOST_TEXTS = 8, 4096, 16
"""Length of a text in training lengths, tokens of all texts together, and number of texts, each by
default and at most."""
MOST_TOKENS = 2**24
"""Tokens of the held-out text from which the texts are taken, at most."""
PROMPTS = 4
"""Number of texts into which a needle is inserted."""


def page_texts(corpus: Corpus, config: AnalysisConfig, candidate: Candidate) -> Tensor:
    """Return ``[texts, length]`` tokens, each text after a beginning-of-text token.

    The texts are evenly spread over the test split. A configured file is read instead, whole unless
    a length is given.

    Raises:
        UserError: there is too little text, or the file cannot be read.
    """
    C = candidate.layout.training_length
    if config.file is None:
        text, source = _running_text(corpus, corpus.test), "the held-out text"
        wanted = config.length or max(2 * C, min(FURTHEST * C, USUAL))
    else:
        text, source = _file_text(config.file, candidate), config.file
        wanted = config.length or text.longest + 1
    length = wanted if config.length else min(wanted, text.longest + 1)
    if length - 1 > text.longest:
        raise UserError.at(
            "analysis.length",
            f"{source} has {text.longest:,} tokens, too few for a text of {length:,} behind its "
            f"beginning-of-text token; at most {text.longest + 1:,}, or give more text.",
        )
    apart = max(1, length - 1)
    fitting = max(1, sum(len(part.stream) // apart for part in text.parts))
    texts = config.texts or min(fitting, MOST_TEXTS, max(1, USUAL // length))
    if texts > fitting:
        raise UserError.at(
            "analysis.texts",
            f"{texts} texts of {length:,} tokens do not fit the {len(text):,} tokens of "
            f"{source}; at most {fitting}.",
        )
    windows = held_out_windows(text, texts, length - 1, apart)
    return _with_first_token(windows, corpus, candidate)


def choice_texts(
    corpus: Corpus, config: AnalysisConfig, candidate: Candidate, page: Tensor
) -> Tensor | None:
    """Return as many validation texts as the page has, for choosing the pairs to attenuate.

    Returns:
        None if the pairs are chosen on the page's texts.

    Raises:
        UserError: there is too little text.
    """
    settings = config.attenuation
    if settings.choice == "page":
        return None
    text = _running_text(corpus, corpus.validation)
    length = settings.choice_length or page.shape[1]
    if length - 1 > text.longest:
        raise UserError.at(
            "analysis.attenuation.choice_length",
            f"the validation text has {text.longest:,} tokens, too few for a text of {length:,}; "
            f"at most {text.longest + 1:,}, or give more text.",
        )
    return _with_first_token(held_out_windows(text, len(page), length - 1), corpus, candidate)


def _file_text(path: str, candidate: Candidate) -> HeldOutText:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError.at("analysis.file", f"there is no file {path!r}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError.at("analysis.file", f"{path} cannot be read as text: {error}.") from error
    tokens = np.array(candidate.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
    if not len(tokens):
        raise UserError.at("analysis.file", f"{path} is empty; expected a text.")
    return HeldOutText("test", (HeldOutPart("file", 1.0, Tokens(tokens)),))


def _running_text(corpus: Corpus, text: HeldOutText) -> HeldOutText:
    """Return the text without separators of documents, each of which could be a sink."""
    sizes = [len(part.stream) for part in text.parts]
    taken = divided(MOST_TOKENS, [part.weight for part in text.parts], sizes)

    def running(part: HeldOutPart, tokens: int) -> HeldOutPart:
        read = part.stream.windows(np.zeros(1, np.int64), tokens)[0]
        return replace(part, stream=Tokens(read[read != corpus.end_of_text]))

    return HeldOutText(text.name, tuple(map(running, text.parts, taken)))


def _with_first_token(windows: Integers, corpus: Corpus, candidate: Candidate) -> Tensor:
    known = (candidate.bos_token, candidate.named_bos, corpus.end_of_text)
    bos = next(token for token in known if token is not None)
    return torch.from_numpy(np.insert(windows, 0, bos, axis=1))


def needle_prompt(
    tokenizer: Tokenizer, ids: Tensor, length: int, seed: int, depth: float
) -> NeedlePrompt | None:
    """Insert a statement into the first texts, in the words of DroPE's App. C.2, and the question
    for it at their end.

    Args:
        tokenizer: the model's.
        ids: ``[B, T]`` texts, each after a beginning-of-text token.
        length: tokens of a prompt, at most T.
        seed: seed of the statement.
        depth: position of the statement, 0 for the beginning of the text and 1 for its end.

    Returns:
        None if the text would be less than four times as long as statement and question.
    """
    haystack = Haystack(tokenizer, (), ())
    quiz = one_of_many(1, "", np.random.default_rng(seed))
    needle = haystack.encode(f" {quiz.needles[0]}")
    question = haystack.encode(f"\n\n{quiz.question}")
    text = length - len(needle) - len(question)
    if text < 4 * (len(needle) + len(question)) or length > ids.shape[1]:
        return None
    place = 1 + round(depth * (text - 1))
    rows = ids[:PROMPTS, :text]

    def inserted(tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, device=ids.device).expand(len(rows), -1)

    parts = [rows[:, :place], inserted(needle), rows[:, place:], inserted(question)]
    span = slice(place, place + len(needle))
    return NeedlePrompt(torch.cat(parts, dim=1), span, len(question))

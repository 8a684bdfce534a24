"""Analyses of the attention of checkpoints and published models, without their runs."""

import json
import logging
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainer.analysis import (  # noqa: F401  (their import registers analyses)
    clusters,
    drop,
    frequency_entropy,
    matrix_entropy,
    offset_changes,
    offset_features,
    positional_bias,
    sinks,
    synthetic,
)
from trainer.analysis.attention import NeedlePrompt
from trainer.analysis.results import TOPICS, Results, kinds
from trainer.analysis.target import NotApplicableError, Target
from trainer.checkpoint import BEFORE_DROP
from trainer.common.errors import UserError, nearest
from trainer.common.files import write_atomically
from trainer.common.processes import use_cores
from trainer.common.progress import Progress
from trainer.common.ranks import device_type
from trainer.config import AnalysisConfig, AnalysisRequest, EvaluationConfig
from trainer.data.corpus import Corpus, HeldOutText, held_out_windows
from trainer.data.order import Integers
from trainer.evaluation.held_out import Haystack
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.methods import changed, parts_of, title_of, tokens_read, why_not
from trainer.evaluation.needles import magic_numbers
from trainer.evaluation.saved_model import SavedModel, distinct
from trainer.model.language_model import LanguageModel
from trainer.plotting import use_style
from trainer.report.pages import write_analysis
from trainer.report.report import FACTS
from trainer.runs.models import environment, find_model, provenance
from trainer.workflows.evaluate import held_out_corpus, place_of, plain_request

log = logging.getLogger(__name__)


def analyze(request: AnalysisRequest, name: str | None = None) -> tuple[list[Results], Path]:
    """Make the requested analyses and write their page; another request writes beside it, as
    NAME-2.

    ``name``: the analysis option. The page's directory in the run has the request's name, or else
    this one; that of ``analysis.kind`` if the option is None or called like any analysis.

    Returns:
        The results and the path of their page.

    Raises:
        UserError: a checkpoint or text cannot be read, the text is too short, or the analysis does
            not apply to this model.
    """
    use_cores()
    use_style(**asdict(request.plots))
    config = request.analysis
    kind = request.analysis.kind
    if kind not in kinds():
        raise UserError(f"analysis.kind: there is no analysis {kind!r}{nearest(kind, kinds())}")
    if kind == "all" and config.arguments:
        raise UserError("analysis.arguments: expected one analysis in analysis.kind, got 'all'")
    saved = find_model(request.checkpoint)
    usual = kind if name is None or name in kinds() else name
    named = saved.home / "analysis" / (request.name or usual)
    output = place_of(request, Path(request.output or named))
    other = _other(request, saved, kind)
    models = distinct([saved] if other is None else [other, saved])
    saved = models[-1]
    corpus = held_out_corpus(request.text, saved)
    ids = page_texts(corpus, config, saved)
    choice = choice_texts(corpus, config, saved, ids)
    targets = [target_of(model, config, ids, choice) for model in models]
    results = analyses_of(*targets)
    asked = plain_request(request)
    C = targets[-1].training_length
    page = write_analysis(
        output,
        results,
        C,
        name=saved.name,
        lead=f"Trained at {C:,} tokens. Texts read: {len(ids)} of {ids.shape[1]:,} tokens.",
        made=provenance(models),
        details={"Settings": asked, "Environment": environment(corpus, device_type())},
    )
    write_atomically(output / FACTS, json.dumps({"config": {"request": asked}}))
    return results, page


def target_of(
    saved: SavedModel, config: AnalysisConfig, ids: Tensor, choice: Tensor | None
) -> Target:
    """Load a model, with the layout of ``analysis.method``, and write its needle prompts."""
    device = device_type()
    model = saved.load(device, config.dtype).eval()
    if config.method is not None:
        use_method(model, saved, config.method, ids.shape[1])
    ids = ids.to(device)
    within = min(ids.shape[1], model.layout.training_length)
    tokenizer = saved.tokens.tokenizer
    prompt = needle_prompt(tokenizer, ids, within, config.needle.depth)
    question = None
    if config.needle.kind == "question":
        question = needle_prompt(tokenizer, ids, ids.shape[1], config.needle.depth)
    return Target(saved.name, model, ids, config, prompt, question, choice)


def use_method(model: LanguageModel, saved: SavedModel, name: str, length: int) -> None:
    """Set the layout that a method has for texts of ``length`` tokens."""
    config = EvaluationConfig(methods=[name])
    reason = why_not(name, saved, config)
    if reason:
        raise UserError(f"analysis.method: {saved.name} {reason}")
    if any(part.is_fitted for part in parts_of(name)):
        raise UserError(f"analysis.method: expected one that is not fitted on text, got {name}")
    if tokens_read(name, saved.layout) is not None:
        raise UserError(f"analysis.method: expected one that reads whole texts, got {name}")
    factor = max(1.0, length / saved.training_length)
    model.layout = changed(name, saved.layout, factor, config)
    log.info("%s is read with %s, set for %s tokens", saved.name, title_of(name), f"{length:,}")


def _other(request: AnalysisRequest, saved: SavedModel, kind: str) -> SavedModel | None:
    """Return the model to compare with, if any: ``compare``, or the run's from before its drop."""
    if request.compare is not None:
        other = find_model(request.compare)
        words = saved.tokens.tokenizer.get_vocab(with_added_tokens=False)
        if words != other.tokens.tokenizer.get_vocab(with_added_tokens=False):
            raise UserError(f"compare: expected a model of the same tokenizer, got {other.name!r}")
        return other
    before = saved.path.parent / BEFORE_DROP
    if kind in ("all", "drop") and saved.run is not None and before.is_dir():
        return find_model(str(before)) if before != saved.path else None
    if kind == "drop":
        raise UserError(f"compare: {saved.reference!r} has no checkpoint {BEFORE_DROP!r}")
    return None


def analyses_of(*targets: Target) -> list[Results]:
    """Make the configured analyses of one model or of two, the later one last; of kind ``all``
    those that apply to them.

    Raises:
        UserError: none applies, it reads another number of models, or see :func:`check_choices`.
    """
    check_choices(targets[-1])
    config = targets[-1].config
    named = [topic for topic in TOPICS.values() if config.kind in ("all", topic.kind)]
    topics = [topic for topic in named if topic.models <= len(targets)]
    wanted = max((topic.models for topic in topics), default=2)
    if wanted != len(targets):
        text = f"analysis {config.kind!r} reads {wanted} models, got {len(targets)}"
        raise UserError(f"compare: {text}")
    topics.sort(key=lambda topic: (topic.models, topic.name))
    results = []
    with Progress("Analysing", len(topics), targets[-1].ids.numel()) as progress:
        progress.advance_to(0)
        for done, topic in enumerate(topics, 1):
            try:
                results.append(topic(*targets[-topic.models :], **config.arguments))
            except NotApplicableError as reason:
                if topic.name == config.kind:
                    raise
                log.info("Left out %s: %s", topic.name, reason)
            progress.advance_to(done)
    if not results:
        raise NotApplicableError(f"none applies to {targets[-1].name}")
    return results


def check_choices(target: Target) -> None:
    """Raise a UserError if the model has no such head or rotary pair as ``analysis.chosen`` and
    ``analysis.pairs`` name, or a text cannot have one of ``analysis.prefixes``."""
    config = target.config
    layers = target.model.config.num_hidden_layers
    heads = target.model.config.num_attention_heads
    for layer, head in config.chosen:
        if layer >= layers or head >= heads:
            text = f"the model has {layers} layers of {heads} heads, got {(layer, head)}"
            raise UserError(f"analysis.chosen: {text}")
    pairs = max(len(spectrum.inv_freq) for spectrum in target.model.layout.spectra)
    if config.pairs and max(config.pairs) >= pairs:
        raise UserError(f"analysis.pairs: heads have up to {pairs} pairs, got {config.pairs}")
    if any(not 6 <= n <= target.length for n in config.prefixes):  # SequenceFE needs six
        text = f"expected 6 to {target.length} tokens, as a text has, got {config.prefixes}"
        raise UserError(f"analysis.prefixes: {text}")


PAGE_TOKENS = 4096
"""Tokens of all texts of a page together, by default and at most, or one text of 2 C tokens."""
MOST_TOKENS = 2**24
"""Tokens of each held-out text from which the texts are taken, at most."""
PROMPTS = 4
"""Number of texts into which a needle is inserted."""


def page_texts(corpus: Corpus, config: AnalysisConfig, saved: SavedModel) -> Tensor:
    """Return ``[texts, length]`` tokens, each text after a beginning-of-text token.

    The texts are evenly spread over the test split, and do not overlap. A configured file is read
    instead, whole unless a length is given, and then from its beginning.
    """
    C = saved.layout.training_length
    if config.file is None:
        text = running_text(corpus, corpus.test)
        most = max(2 * C, min(8 * C, PAGE_TOKENS))
    else:
        written = Path(config.file).read_text(encoding="utf-8")
        ids = saved.tokens.tokenizer.encode(written, add_special_tokens=False).ids
        text = HeldOutText(((1.0, np.array(ids, np.int64)),))
        most = len(ids) + 1
    length = config.length or min(most, text.longest + 1)
    fitting = sum(len(ids) // max(1, length - 1) for _, ids in text.parts)
    texts = config.texts or max(1, min(fitting, 16, PAGE_TOKENS // length))
    if texts > fitting:
        raise UserError(f"analysis: expected text for {texts} x {length} tokens, got {len(text)}")
    if config.file is not None:
        ((weight, whole),) = text.parts
        text = HeldOutText(((weight, whole[: texts * (length - 1)]),))
    windows = held_out_windows(text, texts, length - 1, apart=max(1, length - 1))
    return after_bos(windows, corpus, saved)


def choice_texts(
    corpus: Corpus, config: AnalysisConfig, saved: SavedModel, page: Tensor
) -> Tensor | None:
    """Return as much validation text as the page has; None if pairs are chosen on the page's."""
    if config.attenuation.choice == "page":
        return None
    text = running_text(corpus, corpus.validation)
    return after_bos(held_out_windows(text, len(page), page.shape[1] - 1), corpus, saved)


def running_text(corpus: Corpus, text: HeldOutText) -> HeldOutText:
    """Return the text without separators of documents, each of which could be a sink."""
    parts = []
    for weight, ids in text.parts:
        read = ids[:MOST_TOKENS]
        parts.append((weight, read[read != corpus.end_of_text]))
    return HeldOutText(tuple(parts))


def after_bos(windows: Integers, corpus: Corpus, saved: SavedModel) -> Tensor:
    """Return windows after the model's first token, or a separator."""
    known = (saved.tokens.first, saved.tokens.named_bos, corpus.end_of_text)
    bos = next(token for token in known if token is not None)
    return torch.from_numpy(np.insert(windows, 0, bos, axis=1))


def needle_prompt(
    tokenizer: Tokenizer, ids: Tensor, length: int, depth: float
) -> NeedlePrompt | None:
    """Return prompts of ``length`` tokens: the first texts, each after its beginning-of-text token,
    with a statement in the words of DroPE's App. C.2 and the question for it at the end.

    ``depth``: position of the statement, 0 for the beginning of the text and 1 for its end. None:
    the text would be less than four times as long as statement and question.
    """
    haystack = Haystack(Encoder(tokenizer, (), 0), ())
    quiz = magic_numbers("", np.random.default_rng(0))
    needle = haystack.encode(f" {quiz.needles[0]}")
    question = haystack.encode(quiz.question)
    text = length - len(needle) - len(question)
    if text < 4 * (len(needle) + len(question)):
        return None
    place = 1 + round(depth * (text - 1))
    rows = ids[:PROMPTS, :text].tolist()
    prompts = [[*row[:place], *needle, *row[place:], *question] for row in rows]
    needle_at = slice(place, place + len(needle))
    return NeedlePrompt(torch.tensor(prompts, device=ids.device), needle_at, len(question))

"""Export of a checkpoint to a directory that transformers loads, with a model card."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer

from trainer.checkpoint import find_checkpoint, load_decoder, read_state
from trainer.common.errors import UserError
from trainer.common.processes import usual_threads
from trainer.data.tokenizer import end_of_text
from trainer.evaluation.outcomes import Outcomes
from trainer.evaluation.results import STATEMENTS, Report
from trainer.interchange.export.directory import Exported, check_destination, export_model
from trainer.interchange.export.engines import verdicts
from trainer.interchange.export.plan import Plan
from trainer.interchange.hub import published_licence
from trainer.interchange.pretrained import read_pretrained
from trainer.interchange.token_files import TOKENIZER_CONFIG, published_file
from trainer.model.decoder import Decoder
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum, Temperature
from trainer.report.tables import EFFECTIVE_LEGEND
from trainer.runs.config import RunConfig
from trainer.runs.descriptions import is_dropped, label
from trainer.runs.directory import saved_config
from trainer.runs.fitted_temperature import with_fitted_temperature
from trainer.runs.models import published_place
from trainer.runs.phases import phases_of, training_length_at
from trainer.workflows.requests import ExportRequest

log = logging.getLogger(__name__)


def export_checkpoint(request: ExportRequest) -> Exported:
    """Write ``request.to`` and compare what transformers loads from it; leave nothing on failure.

    Raises:
        UserError: the checkpoint cannot be read, the directory not be written, or logits differ.
    """
    assert request.checkpoint is not None
    assert request.to is not None
    torch.set_num_threads(request.threads or usual_threads())
    to = Path(request.to)
    check_destination(to)
    to.mkdir(parents=True, exist_ok=True)
    if (published := published_place(request.checkpoint)) is not None:
        return _export_again(request, published, to)
    path = find_checkpoint(request.checkpoint)
    state = read_state(path)
    log.info("Exporting %s, step %d", path, state["step"])
    config = saved_config(state["config"])
    tokenizer = Tokenizer.from_str(state["tokenizer"])
    model = load_decoder(path, state)
    stored = model.layout.training_length
    if state["step"]:
        length = training_length_at(config, state["step"])
        model.layout = model.layout.with_training_length(length)
    layout = model.layout
    no_alibi = not any(spectrum.alibi for spectrum in layout.spectra)
    is_independent_of_length = no_alibi and not (layout.rotates or layout.follows_length)
    has_context = is_independent_of_length or not _is_changed(config, state["step"])
    if (factor := request.temperature_at) is not None:
        model = _tempered(model, path, factor, stored)
    return export_model(
        model,
        tokenizer,
        end_of_text(tokenizer, (state["end_of_text"],)),
        to,
        card=lambda plan, difference: model_card(
            path, state, model, plan, difference, request.temperature_at
        ),
        tolerance=request.tolerance,
        dtype=request.dtype,
        token_files=_token_files(state, config),
        longest=stored if has_context else None,
    )


def _token_files(state: dict[str, Any], config: RunConfig) -> dict[str, str]:
    """Return the files about tokens of the published model in which training began, if any.

    Warns of a checkpoint that does not hold them.
    """
    token_files = state.get("token_files", {})
    has_settings = TOKENIZER_CONFIG in token_files
    if not has_settings and (began_with := _published_beginning(config)) is not None:
        has_template = any(name.startswith("chat_template") for name in token_files)
        log.warning(
            "The export has %sno %s of %s, with whose weights the training began: the checkpoint "
            "does not hold them. If it has the tokenizer of that model, copy "
            "chat_template.jinja and generation_config.json from there, or chat_template and "
            "eos_token of tokenizer_config.json, as far as they exist.",
            "" if has_template else "no chat template and ",
            TOKENIZER_CONFIG if token_files else "token settings",
            began_with,
        )
    return token_files


def _logit_factor(temperature: Temperature, length: float, training_length: int) -> float:
    """Return the factor of logits in sequences of ``length`` tokens."""
    times = length / (temperature.reference or training_length)
    return 1 + temperature.coefficient * math.log(max(1.0, times))


def _tempered(model: Decoder, path: Path, factor: float, stored_length: int) -> Decoder:
    """Return the decoder with the checkpoint's fitted temperature, as it is at ``factor`` times the
    training length, for all lengths.

    If heads differ, each gets a scale of its softmax (HeadScale, arXiv 2404.12224).

    Raises:
        UserError: no temperature was fitted.
    """
    layout, fitted = with_fitted_temperature(model.layout, path, stored_length)
    if not fitted:
        raise UserError.at(
            "temperature_at",
            f"no temperature is kept with {str(path)!r}; evaluate it with "
            "evaluation.methods=[temperature] first.",
        )
    heads, before = model.config.num_attention_heads, model.layout
    length = factor * before.training_length
    scales = []
    for old, new in zip(before.layers, layout.layers, strict=True):
        factors = [
            1.0 if new is old else _logit_factor(s.temperature, length, before.training_length)
            for s in new.spectra
        ]
        scales.append([f for f in factors for _ in range(heads // len(factors))])
    layers = (
        old if new is old else _scaled(old, row[0])
        for old, new, row in zip(before.layers, layout.layers, scales, strict=True)
    )
    model.layout = replace(before, layers=tuple(layers))
    return model


def _scaled(layer: LayerEncoding, factor: float) -> LayerEncoding:
    """Multiply the logits of all heads by ``factor``, in place of what depended on the length."""
    return layer.map(
        lambda s: replace(s, temperature=Temperature(scale=s.temperature.scale * factor))
    )


def _export_again(request: ExportRequest, path: Path, to: Path) -> Exported:
    """Export a published model or an earlier export again, in the form that most engines read."""
    assert request.checkpoint is not None
    if request.temperature_at is not None:
        raise UserError.at("temperature_at", "is for a run whose evaluation fitted a temperature.")
    names = "README.md", "config.json", "tokenizer.json"
    card, *_ = (published_file(path, name) for name in names)
    published = read_pretrained(request.checkpoint)
    tokenizer = published.require_tokenizer()
    text = "" if card is None else card.read_text(encoding="utf-8", errors="replace")
    name = Path(request.checkpoint).resolve().name
    log.info("Exporting %s again", request.checkpoint)
    return export_model(
        published.decoder(),
        tokenizer,
        published.bos_token or 0,  # published tokens replace those written
        to,
        card=lambda plan, _: renewed_card(text, name, plan),
        tolerance=request.tolerance,
        dtype=request.dtype,
        token_files=published.token_files(),
        as_published=True,
    )


def model_card(
    path: Path,
    state: dict[str, Any],
    model: Decoder,
    plan: Plan,
    difference: float | None,
    temperature_at: float | None = None,
) -> str:
    """Return Markdown with the metadata that the hub reads.

    ``path``: the checkpoint; figures come from the report of its run, if there is one.
    ``difference``: largest difference of logits, None without a comparison. ``temperature_at``:
    length in training lengths whose fitted temperature the weights have.
    """
    config = saved_config(state["config"])
    report = _report(path)
    facts = _facts(config, state, model, report)
    compared = (
        "Its logits were not compared with those of the run."
        if difference is None
        else f"Its logits were compared with those of the run: they differ by {difference:.1e} of "
        "the largest at most, in float32."
    )
    began_with = _published_beginning(config)
    licence = {} if began_with is None else published_licence(began_with)
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", **licence}
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {config.name}",
        "| | |\n| --- | --- |\n"
        + "\n".join(f"| {key} | {value} |" for key, value in facts.items()),
        *_figures(config, state["step"], report),
        "## Loading",
        f"```python\n{_usage(plan)}```",
        f"{_reason(plan)} {compared}"
        f"{_temperature(path, state, model.layout, temperature_at)} "
        "Every sequence of the training began with the token that the tokenizer puts before a "
        "prompt."
        f"{_padding(plan, model.layout)}",
        "## Engines",
        _engines(plan),
        "## Licence",
        _licence(licence, Path(began_with or "").name),
    ]
    return "\n\n".join(parts) + "\n"


def _published_beginning(config: RunConfig) -> str | None:
    """Return the published weights with which the training began, if any."""
    return config.model.from_pretrained


def _is_changed(config: RunConfig, step: int) -> bool:
    """Whether the run may have changed the encoding by a drop or a rescaling.

    If not, a model that was trained on shorter sequences last still has its context.
    """
    return config.model.from_run is not None or any(
        phase.start < step and (phase.drop or phase.rescale) for phase in phases_of(config)
    )


def _licence(licence: dict[str, str], name: str) -> str:
    """Return a sentence about the licence that the card of the weights ``name`` states."""
    if words := ", ".join(dict.fromkeys(licence.values())):
        return f"{words}: the licence of {name}, with whose weights the training began."
    if name:
        return f"As the licence of {name} allows, with whose weights the training began."
    return "To be chosen by whoever publishes the weights."


def _facts(
    config: RunConfig, state: dict[str, Any], model: Decoder, report: Report | None
) -> dict[str, str]:
    dropped, versions = is_dropped(config, state["step"]), state.get("versions", {})
    facts = {
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "positional encoding": describe(model.layout),
        "dropped": f"after step {config.drop_step}" if dropped else "never",
        "steps": f"{state['step']:,}",
        "tokens": f"{state.get('tokens', 0):,}",
        "training length": f"{model.layout.training_length:,} tokens",
        "program": ", ".join(f"{name} {versions.get(name, '?')}" for name in ("unrope", "torch")),
    }
    if (began := config.model.from_pretrained or config.model.from_run) is not None:
        facts["began with"] = Path(began).name
    if report is not None and "corpus" in report.environment:
        facts["hash of the text"] = str(report.environment["corpus"])
    return facts


def describe(layout: Layout) -> str:
    """Describe the encodings in words, with layers counted from 0."""
    parts, first = [], 0
    for layer, alike in groupby(layout.layers):
        last = first + len(list(alike)) - 1
        where = f"layer {first}" if first == last else f"layers {first} to {last}"
        parts.append(f"{where}: {_layer(layer)}")
        first = last + 1
    return "; ".join(parts)


def _layer(layer: LayerEncoding) -> str:
    kinds = [
        _spectrum(spectrum) + (f" ({heads} key-value heads)" if len(layer.groups) > 1 else "")
        for spectrum, heads in layer.groups
    ]
    window = [f"a window of {layer.window} tokens"] if layer.window else []
    norm = ["QK-norm"] if layer.qk_norm else []
    return ", ".join([*kinds, *window, *norm])


def _spectrum(spectrum: Spectrum) -> str:
    text = "none (NoPE)"
    if spectrum.alibi:
        text = "ALiBi"
    elif spectrum.rotates:
        waves = [w for w in spectrum.wavelengths if w < float("inf")]
        text = (
            f"rotation of {2 * len(waves)} channels, wavelengths {min(waves):.1f} to "
            f"{max(waves):,.0f} tokens"
        )
    grows = not spectrum.temperature.is_constant
    return text + (", temperature that grows with the length" if grows else "")


def _report(path: Path) -> Report | None:
    """Return the report of the checkpoint's run, if there is one that can be read."""
    file = path.parent.parent / "report.json"
    if not file.is_file():
        return None
    try:
        return Report.read(file)
    except UserError as error:
        log.warning("%s The card has no figures of it.", error.problems[0])
        return None


def _figures(config: RunConfig, step: int, report: Report | None) -> list[str]:
    """Return the table of the run's report if it evaluated this checkpoint, its last."""
    name = label(config, is_dropped(config, step))
    if report is None or step != config.trainer.max_steps:
        return []
    outcomes = Outcomes(report)
    results = [r for r in outcomes.results() if (r.name + " + ").startswith(f"{name} + ")]
    reach = {outcomes.name(r): outcomes.effective_length(r, [STATEMENTS]) for r in outcomes.rows}
    rows = [
        f"| {result.name} | {result.length:,} "
        f"| {_number(None if (r := result.retrieval) is None else r.mean)} "
        f"| {_number(result.loss)} "
        f"| {'' if (length := reach[result.name]) is None else length.text} |"
        for result in results
    ]
    head = "| method | length | retrieval | loss | effective |\n| --- | --- | --- | --- | --- |\n"
    explained = (
        "Retrieval: share of needles found; loss: nats per token on the last tokens of held-out "
        f"windows. `+`: context extension at no cost. {EFFECTIVE_LEGEND}"
    )
    return ["## Evaluation", head + "\n".join(rows), explained] if rows else []


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _usage(plan: Plan) -> str:
    trust = "" if plan.is_native else ", trust_remote_code=True"
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("PATH"{trust})\n'
        f'model = AutoModelForCausalLM.from_pretrained("PATH"{trust})\n'
        'prompt = tokenizer("The", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))\n"
    )


def renewed_card(text: str, name: str, plan: Plan) -> str:
    """Return a published model's card with the table of engines for the new export.

    ``text``: the card, empty if there is none. ``name``: name of the model, for a new card.
    """
    parts = (text or f"# {name}\n").rstrip("\n").split("\n## ")
    others = [part for part in parts if not part.startswith("Engines\n")]
    place = next((i for i, part in enumerate(others) if part.startswith("Licence\n")), len(others))
    others.insert(place, f"Engines\n\n{_engines(plan)}")
    return "\n\n## ".join(part.strip("\n") for part in others) + "\n"


def _temperature(path: Path, state: dict[str, Any], layout: Layout, factor: float | None) -> str:
    """Return a sentence about the fitted temperature, which the export has for ``factor`` training
    lengths, or does not have if ``factor`` is None."""
    saved = state.get("layout")
    stored = None if saved is None else Layout.from_dict(saved).training_length
    _, words = with_fitted_temperature(layout, path, stored)
    if not words:
        return ""
    fitted = f"The temperature that was fitted for the run ({words.removeprefix(', ')})"
    if factor is not None:
        length = round(factor * layout.training_length)
        return f" {fitted} is part of it as it is at {length:,} tokens, constant at all lengths."
    log.warning("%s is not exported; `generate` uses it with the checkpoint alone.", fitted)
    return f" {fitted} is no part of it: rows with `temperature` are of the run."


def _engines(plan: Plan) -> str:
    """Return a table of the inference engines that compute the model."""
    rows = [
        f"| {verdict.engine} | {'yes' if verdict.loads else 'no'} | {verdict.note} |"
        for verdict in verdicts(plan.values, plan.architecture)
    ]
    return (
        "| engine | computes this model | note |\n| --- | --- | --- |\n"
        + "\n".join(rows)
        + "\n\ntransformers was run where logits were compared; the other rows follow from the "
        "engines' sources of November 2026. llama.cpp's converter must also know the tokenizer. "
        "`max_position_embeddings` is the longest context that the model was trained with, or "
        "after a change of its positions the length that it was trained with since. vLLM takes "
        "its longest prompt from it; `--max-model-len` with VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 goes "
        "beyond."
    )


def _padding(plan: Plan, layout: Layout) -> str:
    """Return what a batch of prompts must pass if the encoding depends on the length."""
    tempered = any(not spectrum.temperature.is_constant for spectrum in layout.spectra)
    if plan.is_native or not (tempered or layout.follows_length):
        return ""
    return (
        " What attention does follows the length of the text, which the model counts in the "
        "`attention_mask`: pass the tokenizer's with every batch that is padded, on either side; "
        "without one padding counts as text."
    )


def _reason(plan: Plan) -> str:
    if plan.is_native:
        return f"The model is a `{plan.architecture}` and needs no code of its own."
    reasons = ", ".join(dict.fromkeys(plan.refusals.values()))
    return (
        f"The model comes with its code, `modeling_unrope.py`: no architecture of transformers has "
        f"a place for {reasons}."
    )

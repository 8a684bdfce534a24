"""Models by the names that users give them, and by those that reports give them."""

import json
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

import trainer
from trainer.checkpoint import (
    BEFORE_DROP,
    MANIFEST,
    check_sound,
    find_checkpoint,
    read_state,
    readers,
)
from trainer.common.errors import UserError
from trainer.common.fields import adapter
from trainer.common.files import checksum
from trainer.common.processes import cores
from trainer.config import SAME, DataConfig, RunConfig
from trainer.data.checksums import checksums_once
from trainer.data.corpus import Corpus
from trainer.data.sources import cache_directory
from trainer.data.tokenizer import SpecialTokens, same_tokens, special_tokens
from trainer.evaluation.saved_model import SavedModel, distinct
from trainer.evaluation.store import fingerprint
from trainer.interchange.pretrained import Pretrained, is_disabled_norm, read_pretrained
from trainer.interchange.published import find_pretrained, read_token_files, read_tokenizer
from trainer.model.config import ModelConfig, check_vocabulary
from trainer.model.decoder import Decoder
from trainer.positional.config import PositionalConfig
from trainer.positional.layout import Layout
from trainer.runs.directory import is_published, saved_config
from trainer.runs.phases import Phases, phases_of

# Finding


def find_model(reference: str, training_length: int | None = None) -> SavedModel:
    """Find the model that ``checkpoint=`` or ``compare=`` names.

    ``training_length``: C, from which methods and lengths count (None: the model's own).

    Raises:
        UserError: there is none, it is damaged, or transformers cannot compute ``hf:DIRECTORY`` by
            itself.
    """
    if reference.startswith("hf:"):
        return _adapted_model(reference, training_length)
    if is_published(reference):
        return _published_model(reference, training_length)
    return _trained_model(reference, training_length)


def _adapted_model(reference: str, training_length: int | None) -> SavedModel:
    """Find a model that transformers is to compute."""
    from trainer.interchange.adapted import read_adapted  # imports transformers

    path = Path(reference.removeprefix("hf:")).expanduser()
    model = read_adapted(path)
    tokenizer = read_tokenizer(path)
    files = read_token_files(path)
    computed_by = f"transformers {version('transformers')}"
    return _saved_model(
        f"{path.resolve().name}-hf",
        Pretrained(reference, model.config, model.layout, tokenizer, {}, files),
        [training_length],
        f"{computed_by} {_files_fingerprint(path)}",
        reference=reference,
        path=path,
        read=lambda device, dtype: read_adapted(path, dtype).to(device),
        computed_by=computed_by,
    )


def _published_model(reference: str, training_length: int | None) -> SavedModel:
    """Find published weights, which are called by their directory or their name on the hub."""
    path = find_pretrained(reference)
    weights = read_pretrained(reference)
    key = _files_fingerprint(path)
    name = path.resolve().name if Path(reference).expanduser().is_dir() else Path(reference).name
    return _saved_model(name, weights, [training_length], key, reference=reference, path=path)


def _trained_model(reference: str, training_length: int | None) -> SavedModel:
    """Find the checkpoint of a run."""
    path = check_sound(find_checkpoint(reference))
    state = read_state(path)
    run = saved_config(state["config"])
    step = state["step"]
    phases = phases_of(run)
    name, role = name_and_role(run, phases, step)
    if step != run.trainer.max_steps:
        checkpoint = "before its drop" if path.name == BEFORE_DROP else path.name
        name = f"{name} ({checkpoint})"
    of_run = phases.at(step - 1).length if step else None
    return _saved_model(
        name,
        read_run(path),
        [of_run, training_length],
        checksum(path / MANIFEST),
        reference=reference,
        path=path,
        home=path.parent.parent,
        run=run,
        role=role,
        is_dropped=phases.is_dropped(step),
        state=state,
    )


def _saved_model(
    name: str, weights: Pretrained, lengths: Sequence[int | None], key: str, **fields: Any
) -> SavedModel:
    """Return a model with what follows from its weights; ``lengths``: training lengths that it
    gets, one after the other. ``key``: hash that changes with the weights."""
    tokens = special_tokens(weights.require_tokenizer(), weights.token_files, weights.end_of_text)
    check_embeddings(weights.config, tokens)
    layout = weights.layout
    longest = layout.longest
    for length in filter(None, lengths):
        layout = layout.with_training_length(length)
        longest = max(longest, layout.longest)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Decoder(weights.config, layout).parameters())
    defaults: dict[str, Any] = {"home": Path("runs", name), "read": weights.decoder}
    return SavedModel(
        title=name,
        name=name,
        tokens=tokens,
        layout=layout,
        fingerprint=fingerprint(key, layout.training_length, sorted(tokens.stops)),
        parameters=parameters,
        longest_context=longest,
        **defaults | fields,
    )


def check_embeddings(config: ModelConfig, tokens: SpecialTokens) -> None:
    """Check that a model has embeddings for text; added tokens, such as a padding's, need none."""
    words = tokens.tokenizer.get_vocab(with_added_tokens=False).values()
    check_vocabulary(config, max([*words, tokens.end]) + 1)


def _before_drop(model: SavedModel) -> Path | None:
    """Return the checkpoint from just before the drop of a model; None without a drop, or if its
    sequences grew longer since."""
    if model.run is None or not model.is_dropped:
        return None
    phases = phases_of(model.run)
    before = model.path.parent / BEFORE_DROP
    if not phases.drop_step or not before.is_dir():
        return None
    last = phases.at(model.state["step"] - 1)
    dropping = phases.at(phases.drop_step - 1)
    return before if dropping.length == last.length else None


def find_models(
    references: Sequence[str], training_length: int | None = None, *, with_origins: bool = False
) -> list[SavedModel]:
    """Find models to compare, in their order, and give them distinct names.

    ``training_length``: C of all of them (None: their own). ``with_origins``: a model that dropped
    its encoding comes after its state just before the drop, unless the model that it came from is
    among them.

    Raises:
        UserError: there is no such model, one is named twice, or they have different tokenizers or
            training lengths.
    """
    models = distinct([find_model(reference, training_length) for reference in references])
    if with_origins:
        for model in [*models]:
            before = _before_drop(model)
            if before is not None and model.name not in origins(models):
                models.insert(models.index(model), find_model(str(before), training_length))
    first = models[0]
    for model in models:
        if not same_tokens(model.tokens.tokenizer, first.tokens.tokenizer):
            raise UserError(f"compare: {model.reference!r} has another tokenizer than the first.")
        if model.training_length != first.training_length:
            raise UserError(
                f"compare: {model.reference!r} has a training length of {model.training_length} "
                f"tokens, the first one of {first.training_length}; "
                "evaluation.training_length=N counts the lengths of all models from one."
            )
    return distinct(models)


def starting_weights(config: ModelConfig) -> Pretrained:
    """Return the model that a run begins with; its weights are read later."""
    if config.from_pretrained is not None and config.from_run is not None:
        raise UserError("model: expected one of from_pretrained and from_run, got both")
    if config.from_pretrained is not None:
        return read_pretrained(config.from_pretrained)
    assert config.from_run is not None
    return read_run(find_checkpoint(config.from_run))


def read_run(path: Path) -> Pretrained:
    """Return the model in a checkpoint; its weights are read later, one at a time."""
    state = read_state(path)
    config = adapter(ModelConfig).validate_python(state["model"])
    layout = Layout.from_dict(state["layout"])
    tokenizer = Tokenizer.from_str(state["tokenizer"])
    read = readers(path)
    with torch.device("meta"):
        names = [name for name, _ in Decoder(config, layout).named_parameters()]
    return Pretrained(
        str(path),
        config,
        layout,
        tokenizer,
        {name: read[f"model.{name}"] for name in names if not is_disabled_norm(name, layout)},
        token_files=state["token_files"],
        end_of_text=state["end_of_text"],
    )


def encodings_of(reference: str) -> PositionalConfig:
    """Return the encodings of the checkpoint that ``model.from_run`` names, by the run's names, or
    after a partial drop by those of the layout."""
    state = read_state(find_checkpoint(reference))
    config = saved_config(state["config"])
    positional = config.positional
    done = [phase for phase in phases_of(config) if phase.start < state["step"]]
    for change in (phase.drop for phase in done if phase.drop is not None):
        if change.of_what:
            return encodings_in(Layout.from_dict(state["layout"]), positional)
        windows = change.windows or positional.windows
        positional = replace(positional, layers=[change.to], heads={}, windows=windows)
    return positional


def encodings_in(layout: Layout, positional: PositionalConfig) -> PositionalConfig:
    """Return ``positional`` with the names of the encodings in a layout, and its windows."""
    layers = layout.layers if len(layout.distinct) > 1 else layout.layers[:1]
    names = []
    heads: dict[str, float] = {}
    for layer in layers:
        (first, _), *others = layer.groups
        names.append(first.encoding)
        heads |= {spectrum.encoding: count / len(layer.spectra) for spectrum, count in others}
    windows = [layer.window for layer in layers]
    return replace(positional, layers=names, heads=heads, windows=windows)


def _files_fingerprint(path: Path) -> str:
    """Return a fingerprint of names and contents of files, of which each node may have a copy."""
    names = sorted(file.name for file in path.iterdir() if file.is_file())
    return str(checksums_once(path, names, cache_directory(DataConfig())))


# Names

ENCODING_TITLES = {
    "rope": "RoPE",
    "half_rope": "HalfRoPE",
    "high_frequency": "High-frequency RoPE",
    "rope_id": "RoPE-ID",
    "p_rope": "p-RoPE",
    "hope": "HoPE",
    "hope_published": "HoPE (published)",
    "cope": "CoPE",
    "nope": "NoPE",
    "alibi": "ALiBi",
}


def name_and_role(
    config: RunConfig, phases: Phases, step: int | None = None
) -> tuple[str, str | None]:
    """Return the name of a run in tables and its role in the papers' claims.

    The role is ``drope`` if the run has dropped RoPE from all layers and heads, otherwise its
    encoding, with ``_window`` if it has windows; None for variants, and if heads of a layer differ.
    ``step``: number of steps trained; None: all.
    """
    positional = config.positional
    depth = config.model.num_hidden_layers
    types = {name: values.get("type", name) for name, values in positional.encodings.items()}
    until = phases[-1].end if step is None else step
    done = [phase for phase in phases if phase.start < until]
    drops = [phase.drop for phase in done if phase.drop is not None]
    partial = [d for d in drops if types.get(d.to, d.to) != "nope" or d.of_what or d.windows]
    rescales = [phase.rescale for phase in done if phase.rescale is not None]
    variants = [f"rescaled ({rescale.base or rescale.method})" for rescale in rescales]
    encoding = None
    title = encodings(config)
    if not positional.heads:
        kinds = dict.fromkeys(str(types.get(name, name)) for name in positional.layers[:depth])
        encoding = "_".join(kinds)
        title = ENCODING_TITLES.get(encoding, title)
        if any(positional.windows[:depth]):
            encoding += "_window"
            title += " with windows"
    if drops and not partial:
        if encoding == "rope":
            return "DroPE", "drope"
        has_positions = encoding not in ("nope", "nope_window")
        variants.append("dropped" if has_positions else "schedule of a drop")
    if config.model.from_run is not None and encoding == "nope":
        variants.append("continued")
    for change in partial:
        windows = " and windows" if change.windows else ""
        variants.append(f"drop{change.of_what} to {change.to}{windows}")
    if config.drop.to == SAME and config.drop.at is not None:
        variants.append("schedule of a drop")
    return ", ".join([title, *variants]), None if variants else encoding


def origins(models: Sequence[SavedModel]) -> dict[str, str]:
    """Return for each model that dropped its encoding the name of the model that it came from: one
    of the same run, or else one with the same encoding that did not drop it."""
    names = {}
    for model in models:
        run = model.run
        if run is None or not model.is_dropped:
            continue
        others = [other for other in models if _keeps_encoding(other, run)]
        same_run = [other for other in others if other.path.parent == model.path.parent]
        same_seed = [other for other in others if other.run is None or other.run.seed == run.seed]
        if others:
            names[model.name] = [*same_run, *same_seed, *others][0].name
    return names


def _keeps_encoding(model: SavedModel, run: RunConfig) -> bool:
    """Whether a model is what a run began with, or has its shape and an encoding not dropped."""
    if model.run is None:
        return run.model.from_pretrained == model.reference
    same_width = model.run.model.hidden_size == run.model.hidden_size
    same_depth = model.run.model.num_hidden_layers == run.model.num_hidden_layers
    same_encoding = model.run.positional == run.positional and not model.is_dropped
    return same_width and same_depth and same_encoding


def encodings(config: RunConfig) -> str:
    """Describe the encodings that the layers of a run begin with."""
    return " + ".join(dict.fromkeys(config.positional.layers[: config.model.num_hidden_layers]))


# Pages


def without_home(value: Any) -> Any:
    """Replace the user's home directory by ``~`` in plain values, so that reports can be shared."""
    home = str(Path.home()).rstrip("/")
    if not home:
        return value
    text = json.dumps(value, ensure_ascii=False)
    # Whole names only: /home/al does not begin /home/alice.
    return json.loads(re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", "~", text))


def environment(corpus: Corpus, device: str) -> dict[str, Any]:
    """Return versions and hardware, without anything that identifies a person or a machine."""
    return {
        "unrope": trainer.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "cores": cores(),
        "corpus": corpus.fingerprint,
        "training_text_tokens": sum(len(part.train) for part in corpus.parts),
        "held_out_text_tokens": len(corpus.validation) + len(corpus.test),
    }


def provenance(models: Sequence[SavedModel]) -> dict[str, str]:
    """Return time, command and models of a page, without anything that identifies a person."""
    sources = []
    for model in models:
        source = f"{model.name}: {model.path}"
        if "step" in model.state:
            source += f", step {model.state['step']:,}"
        if model.computed_by is not None:
            source += f", computed by {model.computed_by}"
        sources.append(source)
    words = shlex.join(["python", "-m", "trainer", *sys.argv[1:]])
    return {
        "Made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "Command": without_home(words),
        "Models": without_home("; ".join(sources)),
    }

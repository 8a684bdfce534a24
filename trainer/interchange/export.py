"""Export to a directory that transformers loads: a native architecture, or ``modeling_unrope.py``.

The directory is complete and its logits agree with the decoder's, or it is not there.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from huggingface_hub.errors import StrictDataclassError
from jinja2 import Environment, PackageLoader
from tokenizers import Tokenizer
from tokenizers.processors import Sequence, TemplateProcessing
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer.common.errors import UserError
from trainer.common.files import check_is_new, partial_directory
from trainer.interchange import published
from trainer.interchange.hf_config import ARCHITECTURES, OWN, SHAPE, Architecture, from_hf_config
from trainer.interchange.hf_rope import (
    Parameters,
    rope_forms,
    rotate_alike,
    spectrum_from_rope_parameters,
)
from trainer.interchange.pretrained import is_disabled_norm
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.encodings import alibi_slopes
from trainer.positional.layout import Layout
from trainer.positional.spectrum import Spectrum

log = logging.getLogger(__name__)

COMPARED = 32
"""Last positions of a text whose logits are compared."""
DECODED = 4
"""Tokens that are generated for the comparison."""
CODE = "modeling_unrope.py"
CONFIG_FOR_LLAMA_CPP = "config_for_llama_cpp.json"
"""Written for models without rotation."""
TEXT = "The lighthouse keeper counted seventeen ships before the fog came in."


@dataclass(frozen=True)
class Tokens:
    """A tokenizer, and the id ``end`` of its end-of-text token.

    ``files``: a published model's files about its tokens, chat template and generation, see
    :func:`~trainer.interchange.published.read_token_files`. Without them, prompts begin with the
    token that began the training's sequences.
    """

    tokenizer: Tokenizer
    end: int
    files: Mapping[str, str] = field(default_factory=dict)


def export_model(
    model: Decoder,
    tokens: Tokens,
    to: Path,
    *,
    card: Mapping[str, Any] | None = None,
    context: int | None = None,
    tolerance: float = 1e-4,
) -> str:
    """Write a decoder so that transformers loads it, and compare the loaded model's logits.

    Returns the architecture; :data:`~trainer.interchange.hf_config.OWN` needs the code beside it.

    Args:
        model: float32, on the CPU.
        to: a new or empty directory.
        card: facts of the training for ``README.md``, by their names in its template; None: no
            such file.
        context: tokens that engines may read; None: the training length, or the longest that a
            rescaling of the model reaches.
        tolerance: limit of the difference.

    Raises:
        UserError: the directory is not empty, the frequencies follow the length and ``context`` is
            another, or the loaded model differs; nothing is left then.
    """
    to = to.expanduser().absolute()
    check_is_new(to)
    if not tokens.files:
        tokens = replace(tokens, tokenizer=prompting(tokens.tokenizer, tokens.end))
    values = config_of(model.config, model.layout)
    (architecture,) = values["architectures"]
    rope = values.get("rope_parameters")
    longest = model.layout.longest
    if context is not None:
        if context != longest and any(spectrum.long for spectrum in model.layout.spectra):
            raise UserError(
                f"context: expected {longest}, since frequencies follow the length, got {context}"
            )
        values["max_position_embeddings"] = context
    log.info("Written as %s", architecture)
    to.parent.mkdir(parents=True, exist_ok=True)
    with partial_directory(to) as partial:
        weights = {}
        for name, _ in model.named_parameters():
            if not is_disabled_norm(name, model.layout):
                published_name = name if name.startswith("lm_head") else f"model.{name}"
                weights[published_name] = exported(model, name, rope).contiguous()
        save_torch_state_dict(weights, partial)
        if architecture == OWN:
            shutil.copyfile(Path(__file__).with_name(CODE), partial / CODE)
        _write_settings(values, tokens, partial)
        is_still = not model.layout.rotates
        if architecture != OWN and is_still:
            _write_config_for_llama_cpp(partial)
        if card is not None:
            text = readme(card, values, to.name, is_still)
            (partial / "README.md").write_text(text, encoding="utf-8")
        difference = largest_difference(model.eval(), tokens.tokenizer, partial)
        log.info("Loaded by transformers, logits differ by %.1e of the largest", difference)
        if not difference <= tolerance:
            raise UserError(
                f"export: logits as transformers computes them differ by {difference:.1e} of the "
                f"largest, more than tolerance={tolerance:g}"
            )
        partial.rename(to)
    return architecture


def prompting(tokenizer: Tokenizer, end: int) -> Tokenizer:
    """Return the tokenizer so that it adds a single token to a prompt: in front, the one that began
    every training sequence.

    This is the end-of-text token, unless the tokenizer puts one of its own before texts.
    """
    own = published.own_first_token(tokenizer)
    added = tokenizer.num_special_tokens_to_add(is_pair=False)
    if own is not None and added == 1:
        return tokenizer
    first = end if own is None else own
    token = tokenizer.id_to_token(first)
    copy = Tokenizer.from_str(tokenizer.to_str())
    # The tokenizer's file has to hold it: transformers ignores add_bos_token beside it.
    processors: list[Any] = [
        TemplateProcessing(single=[token, "$A"], special_tokens=[(token, first)])
    ]
    if tokenizer.post_processor is not None and not added:
        processors.insert(0, tokenizer.post_processor)
    copy.post_processor = Sequence(processors)
    return copy


def config_of(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    """Return the ``config.json``, but for tokens, of the first architecture that represents a
    decoder of this shape and layout: what it says is read back and compared."""
    turning = [s for s in layout.spectra if s.rotates] or [Spectrum()]
    forms = rope_forms(turning[0], config.head_size, layout.longest)
    for rope, (name, architecture) in product(forms, ARCHITECTURES.items()):
        values = _shape(name, config, layout) | _native_values(layout, architecture, rope)
        with suppress(StrictDataclassError):  # a Llama's heads have to divide its width
            if _computes_alike(*from_hf_config(values), config, layout):
                return values
    return _shape(OWN, config, layout) | _custom_values(config, layout)


def _computes_alike(
    read: ModelConfig, read_layout: Layout, config: ModelConfig, layout: Layout
) -> bool:
    """Whether two models differ at most in scales and constant temperatures of whole layers, which
    the weights absorb."""
    if read.qkv_bias != config.qkv_bias:
        return False
    same_norms = replace(read.qk_norm, when=config.qk_norm.when) == config.qk_norm
    for theirs, layer in zip(read_layout.layers, layout.layers, strict=True):
        spectrum = layer.spectra[0]
        is_plain = spectrum.temperature.is_constant and not spectrum.alibi
        if len(layer.groups) > 1 or not is_plain or (layer.qk_norm and not same_norms):
            return False
        if (theirs.window, theirs.qk_norm) != (layer.window, layer.qk_norm):
            return False
        if not rotate_alike(theirs.spectra[0], spectrum, config.head_size, layout.longest):
            return False
    return True


def _shape(architecture: str, config: ModelConfig, layout: Layout) -> dict[str, Any]:
    """Return the keys that all architectures share."""
    return {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        **{key: getattr(config, key) for key in SHAPE},
        "head_dim": config.head_size,
        "max_position_embeddings": layout.longest,
    }


def _native_values(layout: Layout, architecture: Architecture, rope: Parameters) -> dict[str, Any]:
    """Return the keys of a published architecture."""
    values: dict[str, Any] = {"hidden_act": "silu", "rope_parameters": rope}
    # transformers 4 and engines built on it read these two keys. Without them they rotate with base
    # 10,000; a type that they do not know is an error there.
    values["rope_theta"] = rope["rope_theta"]
    if rope["rope_type"] != "default":
        values["rope_scaling"] = {key: rope[key] for key in rope if key != "rope_theta"}
    if rope["rope_type"] == "llama3":  # llama.cpp's converter looks for it here
        key = "original_max_position_embeddings"
        values[key] = rope[key]
    if architecture.nope_layers:
        values["no_rope_layers"] = [int(x.spectra[0].rotates) for x in layout.layers]
    windows = [layer.window for layer in layout.layers]
    window = next((w for w in windows if w is not None), None)
    if architecture.windows != "none":
        values["sliding_window"] = window
    if architecture.windows == "some":
        values["use_sliding_window"] = window is not None
        values["layer_types"] = ["sliding_attention" if w else "full_attention" for w in windows]
    return values


def _custom_values(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    """Return the keys of our own architecture, for :data:`CODE`."""
    if any(spectrum.long for spectrum in layout.spectra):
        raise UserError(
            "export: frequencies that follow the length have no place in an export with encodings "
            "or norms that no architecture of transformers has"
        )
    biased = any(spectrum.alibi for spectrum in layout.spectra)
    return {
        "qkv_bias": config.qkv_bias,
        "qk_norm_kind": config.qk_norm.kind,
        "qk_norm_targets": config.qk_norm.targets,
        "layout": layout.to_dict(),
        "alibi_slopes": list(alibi_slopes(config.num_attention_heads)) if biased else None,
        "auto_map": {
            "AutoConfig": "modeling_unrope.UnropeConfig",
            "AutoModel": "modeling_unrope.UnropeModel",
            "AutoModelForCausalLM": f"modeling_unrope.{OWN}",
        },
    }


def _write_settings(values: Mapping[str, Any], tokens: Tokens, directory: Path) -> None:
    """Write the configuration, the tokenizer and its settings; those of ``tokens.files`` count."""
    tokenizer = tokens.tokenizer
    own = published.own_first_token(tokenizer)
    bos = tokens.end if own is None else own
    ids: dict[str, Any] = {"bos_token_id": bos, "eos_token_id": tokens.end, "pad_token_id": None}
    generation = ids | {"pad_token_id": tokens.end}
    if tokens.files:
        config = published.settings(tokens.files, published.CONFIG)
        ids = {key: config.get(key) for key in published.TOKEN_IDS}
        generation = published.settings(tokens.files, published.GENERATION_CONFIG)
        generation.pop("max_length", None)
    token = tokenizer.id_to_token(tokens.end)
    of_tokenizer = published.settings(tokens.files, published.TOKENIZER_CONFIG)
    contents = {
        published.CONFIG: {**values, **ids, "dtype": "float32"},
        published.GENERATION_CONFIG: generation,
        published.TOKENIZER_CONFIG: {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokenizer.id_to_token(bos),
            "eos_token": token,
            "pad_token": token,
            "model_max_length": values["max_position_embeddings"],
            "model_input_names": ["input_ids", "attention_mask"],  # else token_type_ids come too
            "clean_up_tokenization_spaces": False,
            **{k: v for k, v in of_tokenizer.items() if k not in published.OF_TOKENIZER},
        },
    }
    texts = {name: json.dumps(content, indent=2) for name, content in contents.items() if content}
    texts |= {name: tokens.files[name] for name in published.COPIED if name in tokens.files}
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    tokenizer.save(str(directory / "tokenizer.json"))


def _write_config_for_llama_cpp(directory: Path) -> None:
    """Write the ``config.json`` that llama.cpp's converter needs, of a model without rotation.

    The converter knows the type ``llama3`` for a few architectures only, and leaves it out of the
    file of others, which then rotate. It writes the factor of a linear type for all.
    """
    values = json.loads((directory / published.CONFIG).read_text(encoding="utf-8"))
    for key in ("rope_scaling", "original_max_position_embeddings"):
        values.pop(key, None)
    values["rope_parameters"] = {"rope_type": "linear", "factor": 1e30, "rope_theta": 1e4}
    text = json.dumps(values, indent=2)
    (directory / CONFIG_FOR_LLAMA_CPP).write_text(text, encoding="utf-8")


def readme(card: Mapping[str, Any], values: Mapping[str, Any], name: str, is_still: bool) -> str:
    """Return the page of an export: what it is, and how engines read it, in Markdown.

    ``card``: facts of its training. ``values``: its ``config.json``. ``name``: its directory's.
    ``is_still``: it does not rotate.
    """
    loader = PackageLoader("trainer.interchange")
    page = Environment(loader=loader, trim_blocks=True, keep_trailing_newline=True)
    return page.get_template("README.md.j2").render(
        card,
        name=name,
        context=values["max_position_embeddings"],
        is_ours=values["architectures"] == [OWN],
        is_still=is_still,
        CONFIG=published.CONFIG,
        CONFIG_FOR_LLAMA_CPP=CONFIG_FOR_LLAMA_CPP,
    )


def exported(model: Decoder, name: str, rope: Parameters | None) -> Tensor:
    """Return one parameter in float32, with query and key channels in the order of ``rope``.

    Pair m, here channels m and m + M, moves to channels m and m + head_dim / 2. Scales of rotated
    channels apply to both queries and keys; the queries absorb both and the temperature, in their
    last weight, which is the gain of their norm, if any. ``rope``: None for our own code.
    """
    value = model.get_parameter(name).detach()
    kind = name.split(".")[-2]
    if kind not in ("q_proj", "k_proj", "q_norm", "k_norm") or rope is None:
        return value
    D = model.config.head_size
    layer = model.layout.layers[int(name.split(".")[1])]
    last_of_queries = "q_norm" if layer.qk_norm else "q_proj"
    spectrum = layer.spectra[0]
    pairs = len(spectrum.inv_freq) if spectrum.rotates else D // 2
    still = list(range(2 * pairs, D))
    middle = len(still) // 2
    order = [*range(pairs), *still[:middle], *range(pairs, 2 * pairs), *still[middle:]]
    heads = value.unflatten(0, (-1, D))[:, order]
    if kind == last_of_queries:
        read_back = spectrum_from_rope_parameters(rope, D, model.layout.longest)
        theirs = read_back.rotary_scale if spectrum.rotates else 1.0
        scales = [spectrum.rotary_scale if c < spectrum.rotary_dim else 1.0 for c in order]
        factors = [spectrum.temperature.scale * (scale / theirs) ** 2 for scale in scales]
        heads = heads * torch.tensor(factors).view(1, -1, *[1] * (value.dim() - 1))
    return heads.flatten(0, 1)


@torch.no_grad()
def largest_difference(model: Decoder, tokenizer: Tokenizer, directory: Path) -> float:
    """Return the largest difference between the decoder's logits and those of transformers.

    It is relative to the largest logit if that exceeds 1. Random tokens are read in one pass; then
    two prompts are continued as one padded batch with a growing and a static cache. If frequencies
    depend on the length, transformers derives those of a batch from its longest row, so then one
    prompt is continued. ``model``: on the CPU. Raise a UserError if transformers tokenizes
    differently.
    """
    from transformers import AutoTokenizer

    is_ours = (directory / CODE).is_file()
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": is_ours}
    their_tokenizer = AutoTokenizer.from_pretrained(directory, **options)
    if their_tokenizer(TEXT, verbose=False)["input_ids"] != tokenizer.encode(TEXT).ids:
        kind = type(their_tokenizer).__name__  # Qwen2's for its architecture, whatever files say
        raise UserError(f"export: transformers loads tokenizer.json as {kind}: tokens differ")
    theirs = published.load_quietly(directory, **options).eval()
    C = model.layout.training_length
    generator = torch.Generator().manual_seed(0)
    # Short texts, texts of C tokens and longer ones, if they take seconds.
    lengths = {min(17, C), min(1100, C), C, C + min(C // 2 + 1, 256)}
    cases = []
    pairs = []
    for length in sorted(n for n in lengths if n <= 2304):
        ids = torch.randint(model.vocab_size, (1, length), generator=generator)
        cases.append(ids)
        their_logits = theirs(ids, use_cache=False).logits[0, -COMPARED:]
        pairs.append((their_logits, model(ids, last=COMPARED)[0]))
    prompts = [cases[0][0, : max(1, C - DECODED)]]
    if not any(spectrum.long for spectrum in model.layout.spectra):
        prompts.append(cases[-1][0])
    batch = pad_sequence(prompts, batch_first=True, padding_side="left", padding_value=-1)
    for kind in ("dynamic", "static"):
        out = theirs.generate(
            batch.clamp(min=0),
            attention_mask=(batch >= 0).long(),
            cache_implementation=kind,
            do_sample=False,
            max_new_tokens=DECODED,
            min_new_tokens=DECODED,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for row, prompt in enumerate(prompts):
            read = torch.cat([prompt, out.sequences[row, batch.shape[1] : -1]])[None]
            cache = model.empty_cache(1, read.shape[1])
            ours = [model(read[:, : len(prompt)], cache=cache, last=1)]
            ours += [model(token[None, None], cache=cache) for token in read[0, len(prompt) :]]
            pairs.append((torch.stack([x[row] for x in out.logits]), torch.cat(ours, dim=1)[0]))
    differences = [(a - b).abs().max() / b.abs().max().clamp(min=1) for a, b in pairs]
    return float(torch.stack(differences).max())  # NaN if any is

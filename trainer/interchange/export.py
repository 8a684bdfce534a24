"""Export to a directory that transformers loads: a native architecture, or ``modeling_unrope.py``.

The directory is complete and its logits agree with the decoder's, or it is not there.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.processors import Sequence, TemplateProcessing
from torch import Tensor

from trainer.common.errors import UserError
from trainer.common.files import partial_directory
from trainer.interchange.hf_config import ARCHITECTURES, OWN, Architecture
from trainer.interchange.hf_rope import Parameters, rope_parameters, spectrum_from_rope_parameters
from trainer.interchange.pretrained import published_name, waits
from trainer.interchange.published import (
    CONFIG,
    COPIED,
    GENERATION_CONFIG,
    OF_TOKENIZER,
    TOKEN_IDS,
    TOKENIZER_CONFIG,
    settings,
)
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.encodings import alibi_slopes
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum, Temperature

log = logging.getLogger(__name__)

KEPT, DECODED, BEYOND, USUAL, LONGEST = 32, 4, 256, 512, 2304
"""Of the comparison: last positions, generated tokens, tokens beyond the training length, tokens
that are read of any model, and the most tokens."""
TEXT = "The lighthouse keeper counted seventeen ships before the fog came in."


HeadChange = tuple[tuple[int, ...], tuple[float, ...]]
"""Change of one layer's query and key channels for another arrangement of pairs: the index of our
channel for each exported channel, and factors on the exported query channels, ``[head_dim]``."""


@dataclass(frozen=True)
class Plan:
    """Form of an exported model.

    ``values``: of ``config.json``, except tokens. ``changes``: for each layer's queries
    and keys; empty if they stay unchanged.
    """

    architecture: str
    values: dict[str, Any]
    changes: tuple[HeadChange, ...] = ()


def export_model(
    model: Decoder,
    tokenizer: Tokenizer,
    end: int,
    to: Path,
    *,
    card: str = "",
    tolerance: float = 1e-4,
    token_files: Mapping[str, str] | None = None,
) -> str:
    """Write a decoder so that transformers loads it, and compare the loaded model's logits.

    Returns the architecture; :data:`~trainer.interchange.hf_config.OWN` needs the code beside it.

    Args:
        model: float32, on the CPU.
        end: id of the end-of-text token.
        to: a new or empty directory.
        card: text of ``README.md``.
        tolerance: limit of the difference.
        token_files: a published model's files about its tokens, chat template and generation, from
            :func:`~trainer.interchange.published.read_token_files`. Without them, prompts begin
            with the token that began the training's sequences.

    Raises:
        UserError: the directory is not empty, or the loaded model differs; nothing is left then.
    """
    if to.exists() and any(to.iterdir()):
        raise UserError(f"to: expected a new or empty directory, got {str(to)!r}")
    tokenizer = tokenizer if token_files else prompting(tokenizer, end)
    plan = make_plan(model.config, model.layout)
    log.info("Written as %s", plan.architecture)
    to.absolute().parent.mkdir(parents=True, exist_ok=True)
    with partial_directory(to.absolute()) as partial:
        _write_model(model, plan, partial)
        _write_settings(plan, tokenizer, end, partial, token_files or {})
        if card:
            (partial / "README.md").write_text(card, encoding="utf-8")
        custom = plan.architecture == OWN
        difference = largest_difference(model.eval(), tokenizer, partial, custom=custom)
        log.info("Loaded by transformers, logits differ by %.1e of the largest", difference)
        if not difference <= tolerance:
            raise UserError(
                f"export: logits as transformers computes them differ by {difference:.1e} of the "
                f"largest, more than tolerance={tolerance:g}"
            )
        partial.rename(to)
    return plan.architecture


def prompting(tokenizer: Tokenizer, end: int) -> Tokenizer:
    """Return the tokenizer with the token before every prompt that began every training sequence.

    It is the end-of-text token, unless the tokenizer adds one of its own.
    """
    if tokenizer.num_special_tokens_to_add(is_pair=False):
        return tokenizer
    copy, token = Tokenizer.from_str(tokenizer.to_str()), tokenizer.id_to_token(end)
    template = TemplateProcessing(single=[token, "$A"], special_tokens=[(token, end)])
    # The tokenizer's file has to hold it: transformers ignores add_bos_token beside it.
    before = [tokenizer.post_processor] if tokenizer.post_processor else []
    copy.post_processor = Sequence([*before, template])
    return copy


def make_plan(config: ModelConfig, layout: Layout) -> Plan:
    """Return the first architecture that represents a decoder of this shape and layout."""
    turning = [s for s in layout.spectra if s.rotates] or [Spectrum()]
    rope = rope_parameters(turning[0], config.head_size, layout.longest)
    for name, architecture in ARCHITECTURES.items():
        if rope is not None and _represents(architecture, name, config, layout):
            values = _native_values(config, layout, architecture, rope)
            return Plan(name, values, _changes(config, layout, rope))
    return Plan(OWN, _custom_values(config, layout))


def _represents(architecture: Architecture, name: str, config: ModelConfig, layout: Layout) -> bool:
    """Whether an architecture has a place for everything but the frequencies."""
    norms = {layer.qk_norm for layer in layout.layers}
    turns = {layer.spectra[0].rotates for layer in layout.layers}
    windows = {layer.window for layer in layout.layers}
    # Scales and constant temperatures do not count: the weights absorb them.
    plain = {replace(s, rotary_scale=1.0, temperature=Temperature()) for s in layout.spectra}
    per_head = (config.qk_norm.kind, config.qk_norm.targets) == ("per_head", "both")
    return (
        all(s.temperature.is_constant and not s.alibi for s in layout.spectra)
        and all(len(layer.groups) == 1 for layer in layout.layers)
        and len([spectrum for spectrum in plain if spectrum.rotates]) <= 1
        and norms == {architecture.qk_norm}
        and (per_head or not architecture.qk_norm)
        and config.qkv_bias == architecture.qkv_bias
        and (len(turns) == 1 or architecture.nope_layers)
        and len(windows - {None}) <= 1
        and (windows == {None} or architecture.windows != "none")
        and (len(windows) == 1 or architecture.windows != "every")
        # transformers refuses a Llama whose heads do not divide the width.
        and (name != "LlamaForCausalLM" or not config.hidden_size % config.num_attention_heads)
    )


def _changes(config: ModelConfig, layout: Layout, rope: Parameters) -> tuple[HeadChange, ...]:
    D = config.head_size
    read_back = spectrum_from_rope_parameters(rope, D, layout.longest)
    changes = tuple(_change(layer, read_back, D) for layer in layout.layers)
    return () if set(changes) == {(tuple(range(D)), (1.0,) * D)} else changes


def _change(layer: LayerEncoding, read_back: Spectrum, head_dim: int) -> HeadChange:
    """Move pair m, here channels m and m + M, to channels m and m + head_dim / 2.

    Scales of rotated channels apply to both queries and keys; the queries absorb both.
    """
    spectrum, half = layer.spectra[0], head_dim // 2
    pairs = len(spectrum.inv_freq) if spectrum.rotates else half
    still = list(range(2 * pairs, head_dim))
    middle = len(still) // 2
    order = [*range(pairs), *still[:middle], *range(pairs, 2 * pairs), *still[middle:]]
    theirs = read_back.rotary_scale if spectrum.rotates else 1.0

    def factor(channel: int) -> float:
        ours = spectrum.rotary_scale if channel < spectrum.rotary_dim else 1.0
        scale = spectrum.temperature.scale * (ours / theirs) ** 2
        return 1.0 if math.isclose(scale, 1.0, rel_tol=1e-9) else scale

    return tuple(order), tuple(factor(channel) for channel in order)


def _shape(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": layout.longest,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _native_values(
    config: ModelConfig, layout: Layout, architecture: Architecture, rope: Parameters
) -> dict[str, Any]:
    values = _shape(config, layout) | {"hidden_act": "silu", "rope_parameters": rope}
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
    if architecture.windows == "every":
        values["sliding_window"] = window
    if architecture.windows == "some":
        values |= {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
        }
    return values


def _custom_values(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    if layout.frequencies_follow_length:
        raise UserError(
            "export: frequencies that follow the length have no place in an export with encodings "
            "or norms that no architecture of transformers has"
        )
    biased = any(spectrum.alibi for spectrum in layout.spectra)
    return _shape(config, layout) | {
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


def _write_model(model: Decoder, plan: Plan, directory: Path) -> None:
    """Write the weights, and the code if there is any."""
    from huggingface_hub import save_torch_state_dict

    weights = {
        published_name(name): exported(model, name, plan).contiguous()
        for name, _ in model.named_parameters()
        if not waits(name, model.layout)
    }
    save_torch_state_dict(weights, directory)
    if plan.architecture == OWN:
        code = "modeling_unrope.py"
        shutil.copyfile(Path(__file__).with_name(code), directory / code)


def _write_settings(
    plan: Plan,
    tokenizer: Tokenizer,
    end: int,
    directory: Path,
    token_files: Mapping[str, str],
) -> None:
    """Write the configuration, the tokenizer and its settings; those of ``token_files`` count."""
    bos = next(iter(tokenizer.encode("").ids), end)
    tokens: dict[str, Any] = {"bos_token_id": bos, "eos_token_id": end, "pad_token_id": None}
    generation = tokens | {"pad_token_id": end}
    if token_files:
        published = settings(token_files, CONFIG)
        tokens = {key: published.get(key) for key in TOKEN_IDS}
        generation = settings(token_files, GENERATION_CONFIG)
        generation.pop("max_length", None)
    token = tokenizer.id_to_token(end)
    of_tokenizer = settings(token_files, TOKENIZER_CONFIG)
    contents = {
        CONFIG: {
            "architectures": [plan.architecture],
            "model_type": plan.architecture.removesuffix("ForCausalLM").lower(),
            **plan.values,
            **tokens,
            "dtype": "float32",
        },
        GENERATION_CONFIG: generation,
        TOKENIZER_CONFIG: {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokenizer.id_to_token(bos),
            "eos_token": token,
            "pad_token": token,
            "model_max_length": plan.values["max_position_embeddings"],
            "model_input_names": ["input_ids", "attention_mask"],  # else token_type_ids come too
            "clean_up_tokenization_spaces": False,
            **{k: v for k, v in of_tokenizer.items() if k not in OF_TOKENIZER},
        },
    }
    texts = {name: json.dumps(values, indent=2) for name, values in contents.items() if values}
    texts |= {name: token_files[name] for name in COPIED if name in token_files}
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    tokenizer.save(str(directory / "tokenizer.json"))


def exported(model: Decoder, name: str, plan: Plan) -> Tensor:
    """Return one parameter in float32, with query and key channels changed as the plan says.

    Factors go to the last weight of the queries, which is the gain of their norm, if any.
    """
    value, kind = model.get_parameter(name).detach(), name.split(".")[-2]
    if kind not in ("q_proj", "k_proj", "q_norm", "k_norm") or not plan.changes:
        return value
    index = int(name.split(".")[1])
    order, factors = plan.changes[index]
    heads = value.unflatten(0, (-1, len(order)))[:, list(order)]
    if kind == ("q_norm" if model.layout.layers[index].qk_norm else "q_proj"):
        heads = heads * torch.tensor(factors).view(1, -1, *[1] * (value.dim() - 1))
    return heads.flatten(0, 1)


@torch.no_grad()
def largest_difference(
    model: Decoder, tokenizer: Tokenizer, directory: Path, *, custom: bool
) -> float:
    """Return the largest difference between the decoder's logits and those of transformers.

    It is relative to the largest logit if that exceeds 1. Random tokens are read in one pass,
    beyond the training length if that is short. Then two prompts of different lengths are continued
    as one padded batch with a cache. If frequencies depend on the length, transformers derives
    those of a batch from its longest row, so then one prompt is continued within the training
    length.

    ``model``: on the CPU. ``custom``: whether our code in the directory is needed.

    Raises:
        UserError: transformers tokenizes differently.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": custom}
    if AutoTokenizer.from_pretrained(directory, **options)(TEXT)["input_ids"] != (
        tokenizer.encode(TEXT).ids
    ):
        raise UserError("export: transformers tokenizes text differently than the run did")
    theirs: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
    theirs.eval()
    C, vocab_size = model.layout.training_length, model.vocab_size
    generator = torch.Generator().manual_seed(0)
    lengths = {min(17, C), min(USUAL, C), C, C + min(C // 2 + 1, BEYOND)}
    cases = [
        torch.randint(vocab_size, (1, n), generator=generator)
        for n in sorted(lengths)
        if n <= LONGEST
    ]
    pairs = [
        (theirs(ids, use_cache=False).logits[:, -KEPT:], model(ids, last=KEPT)) for ids in cases
    ]
    short, long = cases[0][:, : max(1, C - DECODED)], cases[-1]
    prompts = [short] if model.layout.frequencies_follow_length else [short, long]
    width = max(prompt.shape[1] for prompt in prompts)
    padding = [width - prompt.shape[1] for prompt in prompts]
    rows = [F.pad(prompt, (n, 0)) for prompt, n in zip(prompts, padding, strict=True)]
    mask = torch.arange(width) >= torch.tensor(padding)[:, None]
    out = theirs.generate(
        torch.cat(rows),
        attention_mask=mask.long(),
        do_sample=False,
        max_new_tokens=DECODED,
        min_new_tokens=DECODED,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for row, prompt in enumerate(prompts):
        read = torch.cat([prompt[0], out.sequences[row, width:-1]])[None]
        cache = model.empty_cache(1, read.shape[1])
        first = model(read[:, : prompt.shape[1]], cache=cache, last=1)
        ours = [first, *(model(x[None, None], cache=cache) for x in read[0, prompt.shape[1] :])]
        pairs.append((torch.stack([x[row] for x in out.logits]), torch.cat(ours, dim=1)[0]))
    differences = [(a - b).abs().max() / b.abs().max().clamp(min=1) for a, b in pairs]
    return float(torch.stack(differences).max())  # NaN if any is

"""An exported model as a directory: complete and verified, or absent."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.processors import Sequence, TemplateProcessing

from trainer.common.errors import UserError
from trainer.common.files import partial_directory
from trainer.interchange.export.engines import verdicts
from trainer.interchange.export.gate import TEXT, largest_difference, transformers_is_here
from trainer.interchange.export.plan import DTYPES, Plan, make_plan, round_weights, write_weights
from trainer.interchange.token_files import write_json, write_token_files
from trainer.model.decoder import Decoder

log = logging.getLogger(__name__)

CODE = Path(__file__).with_name("custom")


@dataclass(frozen=True)
class Exported:
    """Result of an export; ``difference``: see :func:`largest_difference`, None without a
    comparison."""

    plan: Plan
    difference: float | None


def check_destination(to: Path) -> None:
    """Check that a directory is new or empty."""
    if to.is_dir() and any(to.iterdir()):
        raise UserError.at(
            "to", f"{str(to)!r} is not empty; choose another directory, or remove it."
        )
    if to.exists() and not to.is_dir():
        raise UserError.at(
            "to", f"{str(to)!r} is a file; expected a directory that is new or empty."
        )


def export_model(
    model: Decoder,
    tokenizer: Tokenizer,
    end: int,
    to: Path,
    *,
    card: Callable[[Plan, float | None], str] | None = None,
    tolerance: float = 1e-4,
    dtype: str = "float32",
    token_files: Mapping[str, str] | None = None,
    as_published: bool = False,
    longest: int | None = None,
) -> Exported:
    """Write a decoder so that transformers loads it, and compare the loaded model's logits.

    Args:
        model: float32, on the CPU; its weights are rounded in place if ``dtype`` requires it.
        tokenizer: the model's.
        end: id of the end-of-text token.
        to: a new or empty directory.
        card: makes the text of ``README.md`` from the plan and the largest difference.
        tolerance: limit of the difference.
        dtype: a key of :data:`DTYPES`.
        token_files: a published model's files about its tokens, chat template and generation, from
            :func:`~trainer.interchange.token_files.read_token_files`; None: from ``tokenizer``.
        as_published: whether this is the published model itself; otherwise prompts begin as the
            training's sequences did.
        longest: ``max_position_embeddings``, beyond which engines refuse prompts, of a model whose
            last training length is shorter than its context; the training length by default.

    Raises:
        UserError: the directory cannot be written, or the loaded model differs; nothing is left
            then.
    """
    check_destination(to)
    tokenizer = tokenizer if as_published else prompting(tokenizer, end)
    layout = model.layout
    plan = make_plan(model.config, layout.with_training_length(longest or layout.training_length))
    _log_plan(plan)
    made = [parent for parent in to.absolute().parents if not parent.exists()]
    try:
        to.absolute().parent.mkdir(parents=True, exist_ok=True)
        with partial_directory(to.absolute()) as partial:
            write_files(model, plan, tokenizer, end, partial, dtype)
            if token_files:
                write_token_files(token_files, partial, as_published=as_published)
            difference = _gate(model, plan, tokenizer, partial, tolerance, dtype)
            if card is not None:
                (partial / "README.md").write_text(card(plan, difference), encoding="utf-8")
            partial.rename(to)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError.at("to", f"{str(to)!r} cannot be written ({reason}).") from error
    finally:
        for parent in made:
            with suppress(OSError):  # it holds the model
                parent.rmdir()
    return Exported(plan, difference)


def write_files(
    model: Decoder, plan: Plan, tokenizer: Tokenizer, end: int, directory: Path, dtype: str
) -> None:
    """Write everything but the card."""
    kind = plan.architecture.removesuffix("ForCausalLM").lower()
    bos = next(iter(tokenizer.encode("").ids), end)
    tokens = {"bos_token_id": bos, "eos_token_id": end}
    config = {
        "architectures": [plan.architecture],
        "model_type": kind,
        **plan.values,
        **tokens,
        "pad_token_id": None,
        "dtype": dtype,
    }
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", tokens | {"pad_token_id": end})
    token = tokenizer.id_to_token(end)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.id_to_token(bos),
        "eos_token": token,
        "pad_token": token,
        "model_max_length": plan.values["max_position_embeddings"],
        "model_input_names": ["input_ids", "attention_mask"],  # else token_type_ids come with them
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_weights(model, plan, directory, dtype)
    if not plan.is_native:
        for path in CODE.glob("*_unrope.py"):
            shutil.copyfile(path, directory / path.name)


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


def _gate(
    model: Decoder,
    plan: Plan,
    tokenizer: Tokenizer,
    directory: Path,
    tolerance: float,
    dtype: str,
) -> float | None:
    if not transformers_is_here():
        log.warning(
            "transformers is not installed (pip install 'unrope[export]'): the export was not "
            "loaded and compared"
        )
        return None
    if dtype != "float32":
        round_weights(model, plan, DTYPES[dtype])
    text_ids = tokenizer.encode(TEXT).ids
    difference = largest_difference(model.eval(), directory, text_ids, custom=not plan.is_native)
    log.info("Loaded by transformers, logits differ by %.1e of the largest", difference)
    if model.layout.frequencies_follow_length:
        C = model.layout.training_length
        log.info(
            "Compared beyond %d tokens without a cache only: transformers keeps rotated keys", C
        )
    if not difference <= tolerance:
        raise UserError.at(
            "export",
            f"logits of the export as transformers loads it differ by {difference:.1e} of the "
            f"largest, more than tolerance={tolerance:g}; nothing was kept.",
        )
    return difference


def _log_plan(plan: Plan) -> None:
    log.info("%s", ", ".join(map(str, verdicts(plan.values, plan.architecture))))
    if plan.is_native:
        log.info("Written as %s", plan.architecture)
        return
    log.info("Written with its own code, because no architecture of transformers represents it:")
    for reason in dict.fromkeys(plan.refusals.values()):
        names = [n.removesuffix("ForCausalLM") for n, r in plan.refusals.items() if r == reason]
        log.info("%s: no place for %s", ", ".join(names), reason)

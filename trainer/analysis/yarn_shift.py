"""How YaRN changes the attention of heads, positional and semantic ones (DroPE Sec. 4.1,
Fig. 7 and 8).

The text is read twice in a row: on its second reading every token has occurred before, a known
number of tokens back, and a head that attends by content finds it, or what followed it. Half of the
training length lies between, so that no position is beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads, capture
from trainer.analysis.rescaled_attention import (
    attention_around,
    attention_by_distance,
    attention_shift,
)
from trainer.model.language_model import LanguageModel
from trainer.positional.rescaling import yarn_turns

FACTOR = 2.0
REACH = 8
KEPT = 1024
"""Tokens whose queries and keys are held, of all layers."""


@dataclass(frozen=True)
class YarnShift:
    """``half``: tokens that are repeated, one more than the distance to what followed them.

    ``[layers, query heads]``: ``recall``, attention on a token's first occurrence and on the token
    behind it, ``uniform`` of uniform attention; ``shift``, attention that lies on other keys under
    YaRN, by queries of the second reading. ``positional`` and ``semantic``: (layer, head) of the
    highest positional bias and of the highest recall among the others, of those that rotate.
    ``profile``: mean attention of the former by distance; ``around``: of the latter from 8 tokens
    before to 8 behind the occurrence; both as ``trained`` and under ``yarn``.
    """

    half: int
    uniform: float
    recall: Array
    shift: Array
    positional: tuple[int, int]
    semantic: tuple[int, int]
    profile: dict[str, Array]
    around: dict[str, Array]


@torch.no_grad()
def yarn_shift(model: LanguageModel, ids: Tensor, bias: Array) -> YarnShift | None:
    """Read the beginning of ``ids`` ``[B, T]`` twice in a row, as trained and under YaRN, s = 2.

    Args:
        model: a decoder; one without rotation, or with a single head that rotates, has no result.
        ids: each text behind a beginning-of-text token.
        bias: positional bias ``[layers, query heads]``, the larger of both kinds.

    Returns:
        None also for texts of fewer than 19 tokens.
    """
    half = (min(ids.shape[1], model.layout.training_length, KEPT) - 1) // 2
    rotating = rotating_heads(model)
    if rotating.sum() < 2 or half <= REACH:
        return None
    texts = ids[: max(1, KEPT // (2 * half + 1))]
    text = torch.cat([texts[:, : half + 1], texts[:, 1 : half + 1]], dim=1)

    trained: list[Heads] = []
    capture(model, text, lambda heads: trained.append(_encoded(heads)))
    recall = np.array(
        [
            [attention_around(heads, head, half, 1)[1:].sum() for head in range(bias.shape[1])]
            for heads in trained
        ]
    )
    positional = _highest(bias, rotating)
    rotating[positional] = False
    semantic = _highest(recall, rotating)

    shift: list[Array] = []
    scaled: dict[int, Heads] = {}

    def compare(heads: Heads) -> None:
        queries = slice(half + 1, 2 * half + 1)
        shift.append(attention_shift(trained[heads.layer], heads, queries))
        if heads.layer in (positional[0], semantic[0]):
            scaled[heads.layer] = _encoded(heads)

    with model.using(model.layout.rescaled(yarn_turns, FACTOR, "all")):
        capture(model, text, compare)
    readings = {"trained": dict(enumerate(trained)), "yarn": scaled}
    return YarnShift(
        half,
        float((2 / np.arange(half + 2, 2 * half + 2)).mean()),
        recall,
        np.array(shift),
        positional,
        semantic,
        {
            name: attention_by_distance(of[positional[0]], positional[1], half)
            for name, of in readings.items()
        },
        {
            name: attention_around(of[semantic[0]], semantic[1], half, REACH)
            for name, of in readings.items()
        },
    )


def rotating_heads(model: LanguageModel) -> Array:
    """Which query heads rotate, ``[layers, query heads]``."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    of_keys = [[s.rotates for s in layer.spectra] for layer in model.layout.layers]
    return np.repeat(np.array(of_keys), group, axis=1)


def _highest(values: Array, among: Array) -> tuple[int, int]:
    layer, head = np.unravel_index(np.where(among, values, -np.inf).argmax(), values.shape)
    return int(layer), int(head)


def _encoded(heads: Heads) -> Heads:
    """Without what stands before the encoding, which would be held as well."""
    q, k = heads.rotated_q, heads.rotated_k
    return replace(heads, q=q, k=k, rotated_q=q, rotated_k=k)

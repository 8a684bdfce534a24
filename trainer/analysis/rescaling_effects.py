"""The effect of rescaled frequencies on a head's attention (DroPE Sec. 4.1, Fig. 6, 7, 8, 11).

For YaRN, a text is read twice in a row: in the second reading every token has occurred before, a
known number of tokens back. A head that attends by content finds that occurrence, or the token
after it. The distance is half the training length, so that no position is beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.arrays import Array
from trainer.analysis.attention import head_attention
from trainer.analysis.capture import Heads, NeedlePrompt, capture
from trainer.model.language_model import LanguageModel
from trainer.positional.rescaling import (
    Rescaling,
    ntk_aware,
    ntk_by_parts_turns,
    position_interpolation,
    yarn_turns,
)
from trainer.positional.spectrum import Spectrum

BLOCK = 256
METHODS: dict[str, Rescaling] = {
    "pi": position_interpolation,
    "ntk": ntk_aware,
    "yarn": ntk_by_parts_turns,
}
"""Rescalings in Fig. 6 and 11 (Eq. 9 to 11; the last has a ramp over the frequency)."""


def scaling_factors(spectrum: Spectrum, training_length: int, factor: float) -> dict[str, Array]:
    """Compute gamma ``[pairs]`` of Eq. 3, the factor on every frequency, for each of
    :data:`METHODS`.

    Frequencies are taken at a length of C tokens. Pairs that do not rotate have the factor 1.
    """
    inv_freq = spectrum.at(training_length, training_length).inv_freq
    before = np.array(inv_freq)
    still = before == 0
    return {
        name: np.where(
            still,
            1.0,
            np.array(rescaling(inv_freq, training_length).frequencies(inv_freq, factor))
            / np.where(still, 1.0, before),
        )
        for name, rescaling in METHODS.items()
    }


def attention_by_distance(heads: Heads, head: int, distances: int) -> Array:
    """Average attention ``[distances]`` on the key 0, 1, 2, ... tokens back, over queries with such
    a key (Fig. 7)."""
    T = heads.q.shape[2]
    distances = min(distances, T)
    total = torch.zeros(distances, dtype=torch.float64)
    back = torch.arange(distances, device=heads.q.device)
    for start in range(0, T, BLOCK):
        stop = min(start + BLOCK, T)
        attention = head_attention(heads, head, slice(start, stop))
        j = torch.arange(start, stop, device=back.device)[:, None] - back
        picked = attention.gather(-1, j.clamp(min=0).expand(len(attention), -1, -1))
        total += (picked * (j >= 0)).double().sum(dim=(0, 1)).cpu()
    return (total / (heads.q.shape[0] * torch.arange(T, T - distances, -1))).numpy()


def attention_around(heads: Heads, head: int, half: int, reach: int) -> Array:
    """Average attention ``[2 reach + 1]`` of repeated tokens on keys around their first occurrence.

    The last ``half`` tokens of the texts repeat the ``half`` tokens before them. ``reach``: number
    of keys before and after the first occurrence, less than ``half``. Entry ``reach`` is the
    occurrence, the next one the token after it.
    """
    T = heads.q.shape[2]
    attention = head_attention(heads, head, slice(T - half, T))
    first = T - 2 * half
    diagonals = [
        attention.diagonal(first + offset, -2, -1).double().mean()
        for offset in range(-reach, reach + 1)
    ]
    return torch.stack(diagonals).cpu().numpy()


def attention_shift(heads: Heads, others: Heads, queries: slice) -> Array:
    """Compute the total variation distance ``[Hq]``, 0 to 1, between a layer's attention in two
    readings of the same texts, mean over some queries."""

    def shift(head: int) -> Tensor:
        first, second = (head_attention(reading, head, queries) for reading in (heads, others))
        return (first - second).abs().sum(dim=-1).mean() / 2

    shifts = [shift(head) for head in range(heads.q.shape[1])]
    return torch.stack(shifts).double().cpu().numpy()


FACTOR = 2.0
REACH = 8
KEPT = 1024
"""Largest number of tokens whose queries and keys are kept, in all layers."""


@dataclass(frozen=True)
class YarnShift:
    """Attention as trained and under YaRN on a text read twice (Fig. 7 and 8).

    ``half``: number of repeated tokens. ``recall`` ``[layers, query heads]``: attention on a
    token's first occurrence and on the token after it; ``uniform``: the same for uniform attention.
    ``shift`` ``[layers, query heads]``: attention that moves to other keys under YaRN, by queries
    of the second reading. ``positional`` and ``semantic``: (layer, head) of the rotating head with
    the highest positional bias, and of the head with the highest recall among the others.
    ``profile``: mean attention of the positional head by distance; ``near_repeat``: of the semantic
    head from 8 tokens before the occurrence to 8 after it; each as ``trained`` and under ``yarn``.
    """

    half: int
    uniform: float
    recall: Array
    shift: Array
    positional: tuple[int, int]
    semantic: tuple[int, int]
    profile: dict[str, Array]
    near_repeat: dict[str, Array]


@torch.no_grad()
def yarn_shift(model: LanguageModel, ids: Tensor, bias: Array) -> YarnShift | None:
    """Read the beginning of ``ids`` ``[B, T]`` twice in a row, as trained and under YaRN with s =
    2.

    ``bias``: positional bias ``[layers, query heads]``, the larger of both kinds. Returns None if
    fewer than two heads rotate, or the texts have fewer than 19 tokens.
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
        half=half,
        uniform=float((2 / np.arange(half + 2, 2 * half + 2)).mean()),
        recall=recall,
        shift=np.array(shift),
        positional=positional,
        semantic=semantic,
        profile={
            name: attention_by_distance(layers[positional[0]], positional[1], half)
            for name, layers in readings.items()
        },
        near_repeat={
            name: attention_around(layers[semantic[0]], semantic[1], half, REACH)
            for name, layers in readings.items()
        },
    )


def rotating_heads(model: LanguageModel) -> Array:
    """Return which query heads rotate, ``[layers, query heads]``."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    key_heads = [[s.rotates for s in layer.spectra] for layer in model.layout.layers]
    return np.repeat(np.array(key_heads), group, axis=1)


def _highest(values: Array, among: Array) -> tuple[int, int]:
    layer, head = np.unravel_index(np.where(among, values, -np.inf).argmax(), values.shape)
    return int(layer), int(head)


def _encoded(heads: Heads) -> Heads:
    """Keep only the encoded tensors, to free the others."""
    q, k = heads.rotated_q, heads.rotated_k
    return replace(heads, q=q, k=k, rotated_q=q, rotated_k=k)


@dataclass(frozen=True)
class NeedleShift:
    """Attention of needle prompts' last token as ``trained`` and under ``yarn`` (Fig. 8).

    ``head``: (layer, query head) of the rotating head that attends most to the needle. ``tokens``:
    tokens of a prompt. ``offsets``: tokens from the needle's first. ``on_needle``: sums over the
    needle.
    """

    head: tuple[int, int]
    tokens: int
    offsets: range
    curves: dict[str, Array]
    on_needle: dict[str, float]


@torch.no_grad()
def needle_shift(model: LanguageModel, prompt: NeedlePrompt) -> NeedleShift:
    """Read the prompts as trained and under YaRN with s = 2, in a model that rotates."""
    needle, T = prompt.needle, prompt.ids.shape[1]
    shown = slice(max(0, needle.start - REACH), min(T, needle.stop + REACH))
    inside = slice(needle.start - shown.start, needle.stop - shown.start)

    def last_token() -> Array:
        """Return ``[layers, query heads, shown]``, mean over the prompts."""
        attention: list[Array] = []

        def on_layer(heads: Heads) -> None:
            rows = [
                head_attention(heads, head, slice(T - 1, T))[:, 0, shown].double().mean(dim=0)
                for head in range(heads.q.shape[1])
            ]
            attention.append(torch.stack(rows).cpu().numpy())

        capture(model, prompt.ids, on_layer)
        return np.stack(attention)

    trained = last_token()
    with model.using(model.layout.rescaled(yarn_turns, FACTOR, "all")):
        scaled = last_token()
    place = _highest(trained[..., inside].sum(axis=-1), rotating_heads(model))
    curves = {"trained": trained[place], "yarn": scaled[place]}
    return NeedleShift(
        head=place,
        tokens=T,
        offsets=range(shown.start - needle.start, shown.stop - needle.start),
        curves=curves,
        on_needle={name: float(curve[inside].sum()) for name, curve in curves.items()},
    )

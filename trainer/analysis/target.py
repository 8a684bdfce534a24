"""An analysis measures the queries and keys of one layer at a time::

    norms = read(target, lambda heads: {"key_norm": heads.k.norm(dim=-1)})["key_norm"]

gives the norms ``[layers, heads, positions]``, averaged over the texts. The figures and rows that
it returns are in :mod:`trainer.analysis.results`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.attention import Array, Heads, NeedlePrompt, by_name, capture
from trainer.common.errors import UserError
from trainer.config import AnalysisConfig
from trainer.model.language_model import LanguageModel


@dataclass(frozen=True)
class Target:
    """A model and the text that it reads.

    ``ids``: ``[B, T]`` tokens on the model's device, each row after a beginning-of-text token.
    ``config``: which heads, pairs and lengths are shown, and settings of single analyses.
    ``prompt``: needle prompts within the training length, if there are any; ``question``: one as
    long as a text (None: copy the end of a text). ``choice`` ``[B, T]``: texts whose entropies
    select the pairs to attenuate (None: ``ids``).
    """

    name: str
    model: LanguageModel
    ids: Tensor
    config: AnalysisConfig = field(default_factory=AnalysisConfig)
    prompt: NeedlePrompt | None = None
    question: NeedlePrompt | None = None
    choice: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens of a text."""
        return self.ids.shape[1]

    @property
    def training_length(self) -> int:
        """The model's training length C."""
        return self.model.layout.training_length

    @property
    def context_length(self) -> int:
        """Tokens that the model is configured for, or that ``config`` says: the C of the bounds of
        offset features, "the configured max position embeddings" (Rotary Offset Features, Sec. 4).
        """
        return self.config.context_length or self.model.layout.longest

    @property
    def prefix(self) -> Tensor | None:
        """First C tokens of the texts if the model reads them differently without the later ones,
        because its temperatures or frequencies follow the length."""
        C = self.training_length
        layout = self.model.layout
        differs = self.length > C and layout.at(C) != layout.at(self.length)
        return self.ids[:, :C] if differs else None

    @property
    def shown_layers(self) -> list[int]:
        """Layers of which heads are shown if none are chosen: the first, the middle, the last, and
        the first one without rotation."""
        layout = self.model.layout
        last = len(layout.layers) - 1
        still = [i for i in range(last + 1) if not layout.of_layers([i]).rotates]
        return sorted({0, last // 2, last, *still[:1]})

    def require(self, tokens: int) -> None:
        """Raise :class:`NotApplicableError` if a text is shorter than ``tokens``."""
        if self.length < tokens:
            raise NotApplicableError(
                f"analysis.length: expected {tokens} or more, got {self.length}"
            )


class NotApplicableError(UserError):
    """An analysis does not apply to a model or a text; kind ``all`` leaves it out."""


def stacked(layers: Sequence[Mapping[str, Tensor]]) -> dict[str, Array]:
    """Return means over texts ``[layers, ...]``, float64, from each layer's values ``[B, ...]``."""
    means = {}
    for name, values in by_name(layers).items():
        means[name] = np.stack([x.double().mean(dim=0).cpu().numpy() for x in values])
    return means


def read(
    target: Target, measure: Callable[[Heads], Mapping[str, Tensor]], of_whole: Collection[str] = ()
) -> dict[str, Array]:
    """Read the texts, and return means over them ``[layers, ..., positions]`` of what ``measure``
    gives.

    The target's prefix, if it has one, is read by itself, and gives the first positions, except of
    the names ``of_whole``.
    """
    means = stacked(capture(target.model, target.ids, measure))
    if target.prefix is not None:
        within = stacked(capture(target.model, target.prefix, measure))
        for name in within.keys() - of_whole:
            means[name][..., : within[name].shape[-1]] = within[name]
    return means


def position_edges(length: int, per_octave: int = 16) -> list[int]:
    """Return the edges of buckets of positions: one bucket for each of the first ``per_octave``
    positions, and ``per_octave`` buckets for every doubling of the position after that."""
    steps = range(per_octave * length.bit_length())
    edges = {*range(per_octave), *(round(per_octave * 2 ** (n / per_octave)) for n in steps)}
    return [*sorted(edge for edge in edges if edge < length), length]


def bucket_means(values: Tensor, edges: list[int]) -> Tensor:
    """Return means ``[..., len(edges) - 1]`` of ``values`` ``[..., T]`` between edges, float64."""
    bounds = torch.tensor(edges, device=values.device)
    sums = torch.nn.functional.pad(values.double().cumsum(dim=-1), (1, 0))[..., bounds]
    return sums.diff(dim=-1) / bounds.diff()

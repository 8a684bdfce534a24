"""The analyses of one model by the names that ``+analysis=`` takes, in the order of the page.

``drop`` compares two models and is not among them: see :mod:`trainer.analysis.drop`.
"""

from __future__ import annotations

from trainer.analysis.clusters_figures import ClusterFigures
from trainer.analysis.frequency_entropy_figures import FrequencyEntropyFigures
from trainer.analysis.matrix_entropy_figures import MatrixEntropyFigures
from trainer.analysis.offset_features_figures import OffsetFeatureFigures
from trainer.analysis.positional_bias_figures import PositionalBiasFigures
from trainer.analysis.sinks import SinkFigures
from trainer.analysis.synthetic import SyntheticFigures
from trainer.analysis.topic import Topic

TOPICS: dict[str, type[Topic]] = {
    topic.key: topic
    for topic in (
        ClusterFigures,
        SinkFigures,
        SyntheticFigures,
        FrequencyEntropyFigures,
        OffsetFeatureFigures,
        MatrixEntropyFigures,
        PositionalBiasFigures,
    )
}


def analysis(topic: type[Topic]) -> type[Topic]:
    """Register a user's topic under its key; used in a file that ``plugins`` names."""
    TOPICS[topic.key] = topic
    return topic

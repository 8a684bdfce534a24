"""The studies of one model by the names that ``+analysis=`` takes, in the order of the page.

``drop`` compares two models and is not among them: see :mod:`trainer.analysis.drop`.
"""

from __future__ import annotations

from trainer.analysis.clusters.study import ClustersStudy
from trainer.analysis.frequency_entropy.study import FrequencyEntropyStudy
from trainer.analysis.matrix_entropy.study import MatrixEntropyStudy
from trainer.analysis.offset_features.study import OffsetFeaturesStudy
from trainer.analysis.positional_bias.study import PositionalBiasStudy
from trainer.analysis.settings import ANALYSES
from trainer.analysis.sinks import SinksStudy
from trainer.analysis.studies.study import Study
from trainer.analysis.synthetic import SyntheticStudy
from trainer.common.plugins import REGISTRIES

STUDIES: dict[str, type[Study]] = {
    study.key: study
    for study in (
        ClustersStudy,
        SinksStudy,
        SyntheticStudy,
        FrequencyEntropyStudy,
        OffsetFeaturesStudy,
        MatrixEntropyStudy,
        PositionalBiasStudy,
    )
}
REGISTRIES["analysis.kind"] = STUDIES


def analysis(study: type[Study]) -> type[Study]:
    """Register a user's study under its key; used in a file that ``plugins`` names."""
    STUDIES[study.key] = study
    if study.key not in ANALYSES:
        ANALYSES.append(study.key)
    return study

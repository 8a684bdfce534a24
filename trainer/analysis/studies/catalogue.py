"""The studies of one model by the names that ``+analysis=`` takes, in the order of a page.

``drop`` compares two models and is no study of one: :mod:`trainer.analysis.studies.drop`.
"""

from __future__ import annotations

from trainer.analysis.names import ANALYSES
from trainer.analysis.studies.clusters import ClustersStudy
from trainer.analysis.studies.frequency_entropy import FrequencyEntropyStudy
from trainer.analysis.studies.matrix_entropy import MatrixEntropyStudy
from trainer.analysis.studies.offset_features import OffsetFeaturesStudy
from trainer.analysis.studies.positional_bias import PositionalBiasStudy
from trainer.analysis.studies.sinks import SinksStudy
from trainer.analysis.studies.study import Study
from trainer.analysis.studies.synthetic import SyntheticStudy

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


def analysis(study: type[Study]) -> type[Study]:
    """Register a study of the user's own under its key, from a file that ``plugins`` names."""
    STUDIES[study.key] = study
    if study.key not in ANALYSES:
        ANALYSES.append(study.key)
    return study

"""Helpers of tests for spectra and layouts."""

from functools import partial

from trainer.positional import rotation
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.rescaling import rescaled
from trainer.positional.rotation import head_groups


def slowed(method, spectrum, factor, training_length, **options):
    """The spectrum rescaled by a method of trainer.positional.rescaling."""
    return rescaled(spectrum, partial(method, **options), training_length, factor)


def one_layer(training_length, *spectra, **others):
    """A layout of one layer with a spectrum for every key-value head."""
    return Layout(training_length, (LayerEncoding(spectra, **others),))


def encode(q, k, groups):
    return rotation.encode(q, groups, tempered=True), rotation.encode(k, groups)


def encoded(q, k, layout, positions, lengths):
    """Queries and keys of the only layer of a layout, as they meet."""
    (groups,) = head_groups(layout, positions, lengths)
    return encode(q, k, groups)

"""A layout: spectra over layers and heads, as plain data."""

import json

from hypothesis import given
from hypothesis import strategies as st

from tests.positional.test_spectrum import spectra
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum

layers = st.builds(
    LayerEncoding,
    st.lists(spectra, min_size=1, max_size=4).map(tuple),
    st.none() | st.integers(1, 4096),
    st.booleans(),
)
layouts = st.lists(layers, min_size=1, max_size=4).map(tuple).map(Layout)

A, B = Spectrum(64, (0.5,)), Spectrum(64)


@given(layouts)
def test_a_layout_survives_json(layout):
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout


def test_a_spectrum_that_many_heads_share_is_written_once():
    layout = Layout((LayerEncoding((A, B, A)),) * 5)
    assert len(layout.to_dict()["spectra"]) == 2
    assert layout.spectra == (A, B)


def test_neighbouring_heads_with_one_spectrum_are_one_group():
    assert LayerEncoding((A, A, B, A)).groups == ((A, 2), (B, 1), (A, 1))


@given(layouts)
def test_groups_spell_out_the_heads(layout):
    for layer in layout.layers:
        assert tuple(s for s, count in layer.groups for _ in range(count)) == layer.spectra


def test_a_change_reaches_every_head_and_leaves_windows_and_norms():
    layout = Layout((LayerEncoding((A, B), 16, True), LayerEncoding((B, B))))
    changed = layout.map(lambda spectrum: A if spectrum == B else B)
    assert changed == Layout((LayerEncoding((B, A), 16, True), LayerEncoding((A, A))))


def test_equal_layouts_are_equal_keys():
    assert len({Layout((LayerEncoding((Spectrum(64, (0.5,)),)),)) for _ in range(3)}) == 1

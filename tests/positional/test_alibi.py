"""ALiBi: the published slopes and the biased attention."""

import pytest
import torch

from tests.reference import attention_layer, watch_attention
from trainer.positional.encodings import alibi_slopes


def test_eight_heads_have_the_slopes_of_the_paper():
    assert alibi_slopes(8) == (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256)


@pytest.mark.parametrize("heads", [1, 2, 3, 9, 12, 16, 25])
def test_slopes_are_those_of_the_published_code(heads):
    """github.com/ofirpress/attention_with_linear_biases, ``get_slopes``."""

    def published(n):
        if (n & (n - 1)) == 0:
            start = 2 ** (-8 / n)
            return [start * start**i for i in range(n)]
        closest = 1 << (n.bit_length() - 1)
        return published(closest) + published(2 * closest)[0::2][: n - closest]

    assert alibi_slopes(heads) == pytest.approx(published(heads), rel=1e-12)


def test_biased_attention_equals_a_float64_loop(tiny_decoder):
    model = tiny_decoder(layers=["alibi"], model={"num_hidden_layers": 1})
    x, y = watch_attention(model, torch.arange(40))
    slopes = [2**-2, 2**-4, 2**-6, 2**-8]
    expected = attention_layer(
        x, model.layers[0].self_attn, 4, 2, bias=lambda head, i, j: -slopes[head] * (i - j)
    )
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)


def test_only_the_heads_with_alibi_are_biased(tiny_decoder):
    model = tiny_decoder(layers=["nope"], heads={"alibi": 0.5}, model={"num_hidden_layers": 1})
    x, y = watch_attention(model, torch.arange(40))
    slopes = [0, 0, 2**-6, 2**-8]
    expected = attention_layer(
        x, model.layers[0].self_attn, 4, 2, bias=lambda head, i, j: -slopes[head] * (i - j)
    )
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)

"""Circular variances and radii against a plain loop over tokens."""

from __future__ import annotations

import cmath

import numpy as np
import torch

from trainer.analysis.capture import Heads
from trainer.analysis.offset_features.measure import AngleStability
from trainer.positional.layout import LayerEncoding
from trainer.positional.spectrum import Spectrum

HALF = Spectrum((1.0, 0.1))
"""Two pairs in heads of six channels."""
STILL = Spectrum((1.0, 0.0, 0.01))


def layer(seed, texts=2):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(texts, heads, 7, 6, generator=generator) for heads in (4, 2))
    encoding = LayerEncoding.of((HALF, STILL))
    return Heads(3, encoding, q + 1, k, q, k, 64)


def test_every_moving_pair_against_a_loop():
    found, both = AngleStability(), [layer(0), layer(1)]
    for one in both:
        found.update(one)
    result = found.result()
    expected = []
    for of_keys in (False, True):
        for head in range(2 if of_keys else 4):
            spectrum = (HALF, STILL)[head if of_keys else head // 2]
            pairs = len(spectrum.inv_freq)
            for pair in range(pairs):
                if not spectrum.inv_freq[pair]:
                    continue
                points = [
                    complex(row[pair], row[pair + pairs])
                    for one in both
                    for text in (one.k if of_keys else one.q)
                    for row in text[head].double()
                ]
                mean = sum(points) / len(points)
                direction = sum(cmath.rect(1, cmath.phase(p)) for p in points) / len(points)
                expected.append((of_keys, 3, head, pair, abs(mean), 1 - abs(direction)))
    columns = list(zip(*expected, strict=True))
    for name, values in zip(("of_keys", "layer", "head", "pair"), columns[:4], strict=True):
        np.testing.assert_array_equal(getattr(result, name), values)
    np.testing.assert_allclose(result.radius, columns[4], rtol=1e-5)
    np.testing.assert_allclose(result.variance, columns[5], rtol=1e-4)


def test_a_fixed_angle_has_no_variance_and_opposite_ones_cancel():
    still = torch.ones(1, 2, 8, 6)
    turned = still * torch.tensor([1.0, -1.0]).repeat(4)[None, None, :, None]
    encoding = LayerEncoding.of((HALF, HALF))
    one = Heads(0, encoding, still, turned, still, turned, 64)
    found = AngleStability()
    found.update(one)
    result = found.result()
    np.testing.assert_allclose(result.variance[~result.of_keys], 0, atol=1e-6)
    np.testing.assert_allclose(result.variance[result.of_keys], 1, atol=1e-6)

"""The published parameter counts, digit for digit (paper, section 4)."""

import jax
import jax.numpy as jnp
import pytest

from interdomain_jax import MIXERS, Decoder, InterdomainAttention

SIZES = {
    "125m": dict(d_model=768, num_layers=12, num_heads=12, head_dim=64),
    "350m": dict(d_model=1024, num_layers=24, num_heads=16, head_dim=64),
    "760m": dict(d_model=1536, num_layers=24, num_heads=16, head_dim=96),
    "1_3b": dict(d_model=2048, num_layers=24, num_heads=32, head_dim=64),
}
PUBLISHED = {
    "softmax": (134_105_856, 373_867_520, 777_856_512, 1_345_423_360),
    "interdomain": (135_416_208, 377_360_768, 781_498_752, 1_352_406_784),
    "s4d": (135_425_424, 377_385_344, 781_523_328, 1_352_455_936),
}


def count_parameters(size: str, mixer: str, **settings) -> int:
    model = Decoder(vocab_size=32_000, state_dim=64, mixers=(mixer,), **SIZES[size], **settings)
    variables = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 4), jnp.int32))
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


@pytest.mark.fast
@pytest.mark.parametrize("mixer", PUBLISHED)
@pytest.mark.parametrize("size", SIZES)
def test_published_models(size, mixer):
    published = dict(zip(SIZES, PUBLISHED[mixer], strict=True))[size]
    assert count_parameters(size, mixer, scan_layers=True) == published


def test_unscanned_layers_count_the_same():
    assert count_parameters("125m", "interdomain") == PUBLISHED["interdomain"][0]


def test_the_cubes_published_range():
    """Over the six state-space cells at 125M: 135,379,344 to 135,462,288."""
    cells = [name for name, make in MIXERS.items() if isinstance(make(num_heads=1, head_dim=2), InterdomainAttention)]
    counts = [count_parameters("125m", cell, scan_layers=True) for cell in cells]
    assert len(cells) == 6
    assert (min(counts), max(counts)) == (135_379_344, 135_462_288)

"""The configs: each builds its model, and says the truth about it."""

import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.modules.mixers import MIXERS
from interdomain_jax.sharding import mesh_config

CONFIGS = Path(__file__).parents[1] / "configs"
PUBLISHED = ("125m", "350m", "760m", "1_3b")


def load(name):
    """Loads a config by its path, as the flag does: the names are not all Python identifiers."""
    spec = importlib.util.spec_from_file_location(f"config_{name}", CONFIGS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["tiny", "small", *PUBLISHED])
def test_every_mixer_builds(name):
    fields = {field.name for field in dataclasses.fields(Decoder)} - {"parent", "name"}
    for mixers in [*MIXERS, "interdomain,softmax"]:
        config = load(name).get_config(mixers)
        assert set(config.model) == fields
        assert Decoder(**config.model).mixers == tuple(mixers.split(","))


@pytest.mark.parametrize("name", ["tiny", "small", *PUBLISHED])
def test_every_field_has_a_comment(name):
    commented = re.compile(r"^ +#.*\n +config\.([\w.]+) = ", re.MULTILINE)
    common = set(commented.findall((CONFIGS / "common.py").read_text()))
    # The mesh is a config of its own, which `eval.py` takes too.
    mesh = commented.findall(inspect.getsource(mesh_config))
    known = common | {f"mesh.{field}" for field in mesh}
    for field, value in load(name).get_config().to_dict().items():
        names = {f"{field}.{each}" for each in value} if isinstance(value, dict) else {field}
        assert names <= known, names - known


@pytest.mark.parametrize(
    ("name", "tokens", "peak"),
    [("125m", 2.5e9, 3e-3), ("350m", 7e9, 1.5e-3), ("760m", 15e9, 1e-3), ("1_3b", 26e9, 1e-3)],
)
def test_the_published_recipe(name, tokens, peak):
    """Paper sections 4 and 5; the docstring's number of parameters is that of the model."""
    module = load(name)
    config = module.get_config()
    tokens_per_step = config.data.batch_size * config.data.sequence_length
    assert tokens_per_step == 524_288
    assert abs(config.num_steps * tokens_per_step - tokens) <= tokens_per_step / 2
    assert abs(config.optimizer.warmup_steps * tokens_per_step - 375e6) <= tokens_per_step / 2
    assert config.optimizer.peak_learning_rate == peak
    assert (config.seed, config.model.vocab_size) == (42, 32_000)
    assert (config.model.dtype, config.model.param_dtype) == ("bfloat16", "float32")

    model = Decoder(**config.model)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), jnp.int32))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    (stated,) = re.findall(r"([\d,]+) parameters", module.__doc__)
    assert count == int(stated.replace(",", ""))

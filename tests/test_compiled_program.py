"""What a compiled program costs, against counts by hand and XLA's own figures."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from interdomain_jax.compiled_program import CollectiveCosts, group_size, program_costs
from interdomain_jax.topologies import absent_devices, compiler_options, missing_compiler

ROOT = Path(__file__).parents[1]
LAYERS, WIDTH, ROWS = 5, 64, 8

PROGRAMS = f"""
import functools, json
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
LAYERS, WIDTH, ROWS = {LAYERS}, {WIDTH}, {ROWS}

def gathered(weights, x):
    def layer(x, weight):
        with jax.named_scope("gather_weight"):
            weight = lax.all_gather(weight, "fsdp", tiled=True)
        return jnp.tanh(x @ weight), None
    return lax.scan(layer, x, weights)[0]

def exchanged(x):
    x = lax.psum(x, "data")
    x = lax.psum_scatter(x, "fsdp", tiled=True)
    x = lax.all_to_all(x, ("data", "fsdp"), 1, 0, tiled=True)
    with jax.named_scope("halo"):
        x = lax.ppermute(x, "fsdp", [(i, i + 1) for i in range(3)])
    return lax.psum(x, ())

def text(function, in_specs, *shapes):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=P(("data", "fsdp")), check_vma=False)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(mapped).lower(*arguments).compile().as_text()

rows = P(("data", "fsdp"))
print(json.dumps({{
    "gathered": text(gathered, (P(None, "fsdp"), rows), (LAYERS, WIDTH, WIDTH), (8 * ROWS, WIDTH)),
    "exchanged": text(exchanged, (rows,), (8 * 32, WIDTH)),
}}))
"""


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """The programs above, compiled for eight devices."""
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAMS],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(finished.stdout.splitlines()[-1])


def text_of(function, *shapes):
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()


def test_a_loop_counts_as_often_as_it_turns(texts):
    costs = program_costs(texts["gathered"])
    assert costs.flops == LAYERS * 2 * ROWS * WIDTH * WIDTH
    sent = 4 * WIDTH * WIDTH * 3 // 4
    assert costs.collectives == {"all-gather": CollectiveCosts(LAYERS, LAYERS * sent)}
    (gather,) = costs.every_collective
    assert (gather.trips, gather.bytes, gather.group_size) == (LAYERS, sent, 4)
    assert "gather_weight" in gather.op_name
    assert costs.loops_of_unknown_length == 0


def test_a_loop_without_the_compilers_word_is_read_from_its_condition(texts):
    bare = re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", texts["gathered"])
    assert bare != texts["gathered"]
    assert program_costs(bare) == program_costs(texts["gathered"])


def test_a_loop_whose_length_depends_on_data_counts_once():
    grow = lambda x: jax.lax.while_loop(lambda x: jnp.sum(x) < 1e6, lambda x: x @ x, x)
    costs = program_costs(text_of(grow, (16, 16)))
    assert costs.flops == 2 * 16**3
    assert costs.loops_of_unknown_length == 1


def test_loops_in_loops_multiply():
    inner = lambda x, w: jax.lax.fori_loop(2, 5, lambda _, x: jnp.tanh(x @ w), x)
    nested = lambda x, ws: jax.lax.scan(lambda x, w: (inner(x, w), None), x, ws)[0]
    assert program_costs(text_of(nested, (4, 16), (7, 16, 16))).flops == 7 * 3 * 2 * 4 * 16 * 16


def test_each_collective_costs_what_a_ring_sends(texts):
    array = 4 * 32 * WIDTH
    assert program_costs(texts["exchanged"]).collectives == {
        "all-reduce": CollectiveCosts(1, 2 * array // 2),
        "reduce-scatter": CollectiveCosts(1, array * 3 // 4),
        "all-to-all": CollectiveCosts(1, array // 4 * 7 // 8),
        "collective-permute": CollectiveCosts(1, array // 4),
    }


def test_collectives_are_found_by_their_scope(texts):
    chosen = [x.kind for x in program_costs(texts["exchanged"]).every_collective if "halo" in x.op_name]
    assert chosen == ["collective-permute"]


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("replica_groups={{0,1},{2,3}}, dimensions={0}", 2),
        ("replica_groups={}, dimensions={0}", 16),
        ("replica_groups=[2,8]<=[16]", 8),
        ("replica_groups=[4,4]<=[4,4]T(1,0), dimensions={0}", 4),
        ("replica_groups=mesh['a'=2,'b'=8] {'b'}, use_global_device_ids=true", 8),
        ("replica_groups=mesh['a'=2,'b'=8], device_ids=([4,4]T(1,0)) {'a','b'}, dimensions={0}", 16),
        ("replica_groups=mesh['a'=2,'b'=8] {'b':(1)4}, dimensions={0}", 4),
        ("source_target_pairs={{0,1},{1,0}}, metadata={}", 2),
        ("source_target_pairs={{0,0},{1,1}}, metadata={}", 1),
    ],
)
def test_groups_are_read_in_every_spelling(attributes, size):
    assert group_size(", channel_id=1, " + attributes, 16) == size


@pytest.mark.parametrize("options", [{"padding": "SAME"}, {"padding": ((2, 1),), "lhs_dilation": (3,)}])
def test_convolutions_agree_with_the_compiler(options):
    convolve = lambda x, w: jax.lax.conv_general_dilated(
        x, w, (1,), dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=2, **options
    )
    compiled = jax.jit(convolve).lower(jnp.zeros((3, 20, 8)), jnp.zeros((4, 4, 6))).compile()
    assert program_costs(compiled.as_text()).flops == compiled.cost_analysis()["flops"]


def test_memory_traffic_is_operands_and_results():
    assert program_costs(text_of(lambda x, y: jnp.exp(x) * y + 1, (1000,), (1000,))).bytes_accessed == 3 * 4000


def test_of_stacked_layers_a_turn_reads_its_own():
    """Twice the layers is twice the traffic; a turn that read every layer's weights would make it four times."""

    def gradient(weights, x):
        loss = lambda weights: jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0])
        return jax.grad(loss)(weights)

    few, many = (program_costs(text_of(gradient, (n, 128, 128), (2, 128))).bytes_accessed for n in (8, 16))
    assert 1.9 < many / few < 2.1


def gradient_of_layers(weights, x):
    """Weights [L, F, D] and [L, D, F], gathered for each layer; their gradients, summed over the rows."""

    def layer(x, pair):
        up, down = pair
        with jax.named_scope("mixer"):
            return x + jnp.maximum(x @ up, 0) @ down, None

    return jax.grad(lambda weights: jnp.mean(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2))(weights)


def compile_for_slices(num_slices: int) -> str:
    layers, width, hidden, rows = 6, 512, 2048, 16
    devices = np.array(absent_devices("v5e:2x2", num_slices))
    mesh = Mesh(devices.reshape(2, -1), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    place = lambda shape, *spec: jax.ShapeDtypeStruct(
        shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    weights = (
        place((layers, width, hidden), None, "fsdp"),
        place((layers, hidden, width), None, None, "fsdp"),
    )
    x = place((rows, 256, width), ("data", "fsdp"))
    shardings = jax.tree.map(lambda weight: weight.sharding, weights)
    compiled = jax.jit(gradient_of_layers, out_shardings=shardings).lower(weights, x).compile()
    return compiled.as_text()


@pytest.mark.compiled
@pytest.mark.skipif(missing_compiler("v5e") is not None, reason=f"{missing_compiler('v5e')} is not installed")
class TestCompiledForTPU:
    """Its loops are not annotated, products are convolutions, and collectives hide in fusions."""

    def test_every_layer_counts_and_each_collective_once(self):
        costs = program_costs(compile_for_slices(1))
        product = 2 * (4 * 256) * 512 * 2048
        assert costs.flops == 6 * 6 * product
        assert costs.loops_of_unknown_length == 0
        weight = 2 * 512 * 2048
        collectives = costs.collectives
        # Both weights of a layer, forward and backward, each by two devices; then their gradients, to their owners.
        assert collectives["all-gather"] == CollectiveCosts(6 * 4, 6 * 4 * weight // 2)
        assert collectives["reduce-scatter"].bytes == 6 * 2 * weight // 2
        # What is left of the gradients, over the axis `data`.
        assert collectives["all-reduce"].bytes == 6 * 2 * (weight // 2)
        assert {"all-gather", "reduce-scatter", "all-reduce"} == set(collectives)
        assert all("mixer" in collective.op_name for collective in costs.every_collective)

    def test_what_goes_to_another_slice_is_told_apart(self):
        costs = program_costs(compile_for_slices(2))
        assert costs.flops == 6 * 6 * 2 * (2 * 256) * 512 * 2048
        # A quarter of each gradient, for the other slice to add.
        assert costs.collectives["send"].bytes == 6 * 2 * (2 * 512 * 2048) // 4


@pytest.mark.compiled
@pytest.mark.skipif(missing_compiler("h100") is not None, reason=f"{missing_compiler('h100')} is not installed")
def test_asynchronous_collectives_of_gpus_count_once():
    devices = np.array(absent_devices("h100:4"))
    mesh = Mesh(devices, ("fsdp",), axis_types=(AxisType.Auto,))
    place = lambda spec: jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=NamedSharding(mesh, spec))
    lowered = jax.jit(lambda x, w: x @ w).lower(place(PartitionSpec("fsdp")), place(PartitionSpec("fsdp")))
    costs = program_costs(lowered.compile(compiler_options=compiler_options(devices[0])).as_text())
    assert costs.flops == 2 * 128 * 512 * 512
    assert costs.collectives == {"all-gather": CollectiveCosts(1, 3 * 4 * 128 * 512)}

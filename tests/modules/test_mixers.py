"""The mixers: against the paper's steps in NumPy, causal, and the same whole or in pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interdomain_jax import MIXERS, InterdomainAttention, SoftmaxAttention
from tests.numerics import paper_coefficients, relative_rms
from tests.quick import quick_jit

HEADS, WIDTH, MODES, D_MODEL = 2, 4, 8, 8
ROPE_BASE = 20.0


def make(name, **settings):
    if name != "softmax":
        settings = {"state_dim": MODES} | settings
    return MIXERS[name](num_heads=HEADS, head_dim=WIDTH, rope_base=ROPE_BASE, **settings)


def initialised(mixer, x, seed=0):
    """Parameters moved off their initial values, so that no scale is one and no bias zero."""
    params = quick_jit(mixer.init)(jax.random.key(seed), x)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    noisy = [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, noisy)


def numpy_rope(x):
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None, None] * ROPE_BASE ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), first * np.sin(angle) + second * np.cos(angle)], axis=-1
    )


def numpy_mixer(p, x, *, dual, query, rope):
    """Steps 1 to 8 of the paper's section 2 and the controls of section 3, as written, in float64."""
    p = jax.tree.map(np.float64, p)
    x = np.float64(x)

    def projected(name, convolve, rotate):
        y = x @ p[name]["kernel"]
        if convolve:
            taps = p[f"{name}_convolution"]["kernel"]
            padded = np.pad(y, [(0, 0), (3, 0), (0, 0)])
            y = sum(taps[i] * padded[:, i : i + x.shape[1]] for i in range(4))
        y = y.reshape(*x.shape[:2], -1, WIDTH)
        return numpy_rope(y) if rotate and rope else y

    def xi(y):
        y = y / (1 + np.exp(-y))
        return y / np.linalg.norm(y, axis=-1, keepdims=True)

    def input_norm(y, name):
        return y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + 1e-5) * p[f"{name}_scale"] + p[f"{name}_bias"]

    k, v = projected("key", True, True), projected("value", not dual, False)
    z = (
        np.concatenate([input_norm(xi(k) if dual else k, "key"), input_norm(v, "value")], axis=-1)
        * p["channel_weights"]
    )
    a = -np.exp(p["log_neg_a_real"]) + 1j * p["a_imag"]
    delta_a = np.exp(p["log_delta"])[:, None] * a

    class Discretised:
        log_decay, angle = delta_a.real, delta_a.imag

        class input_weight:
            real, imag = ((np.exp(delta_a) - 1) / a).real, ((np.exp(delta_a) - 1) / a).imag

        class readout:
            real, imag = p["readout_real"], p["readout_imag"]

    coefficients, _ = paper_coefficients(z, Discretised, np.zeros((len(x), HEADS, 2, MODES, 2 * WIDTH)))
    weights = p.get("mode_weights", np.ones((HEADS, MODES)))
    if query:
        u, gamma = np.split(coefficients, 2, axis=-1)
        q = xi(projected("query", True, True))
        out = np.einsum("bthr,bthmr,hm,bthmd->bthd", q, u, weights, gamma).real
    else:
        out = np.einsum("hm,bthmc->bthc", weights, coefficients).real
    return out.reshape(*x.shape[:2], -1) @ p["output"]["kernel"]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("interdomain", dict(dual=True, query=True, rope=True)),
        ("interdomain_no_rope", dict(dual=True, query=True, rope=False)),
        ("single_query", dict(dual=False, query=True, rope=True)),
        ("dual_linear", dict(dual=True, query=False, rope=True)),
        ("s4d", dict(dual=False, query=False, rope=False)),
        ("s4d_rope", dict(dual=False, query=False, rope=True)),
    ],
)
def test_every_cell_of_the_cube_is_the_papers(name, cell):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 13, D_MODEL)), jnp.float32)
    mixer = make(name, chunk_size=4)
    variables = initialised(mixer, x)
    out, cache = jax.jit(mixer.apply)(variables, x)
    assert cache is None
    assert relative_rms(out, numpy_mixer(variables["params"], x, **cell)) < 1e-5


def test_softmax_attention_against_numpy():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(2, 9, D_MODEL)), jnp.float32)
    mixer = make("softmax")
    variables = initialised(mixer, x)
    p = jax.tree.map(np.float64, variables["params"])
    q, k, v = ((np.float64(x) @ p[n]["kernel"]).reshape(2, 9, HEADS, WIDTH) for n in ("query", "key", "value"))
    scores = np.einsum("bthd,bshd->bhts", numpy_rope(q), numpy_rope(k)) / np.sqrt(WIDTH)
    scores = np.where(np.tril(np.ones((9, 9), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhts,bshd->bthd", weights, v).reshape(2, 9, -1) @ p["output"]["kernel"]
    assert relative_rms(jax.jit(mixer.apply)(variables, x)[0], expected) < 1e-5


@pytest.mark.parametrize("name", MIXERS)
def test_causal_by_gradient_and_every_parameter_learns(name):
    x = jax.random.normal(jax.random.key(2), (1, 12, D_MODEL))
    mixer = make(name, chunk_size=4) if name != "softmax" else make(name)
    variables = initialised(mixer, x)

    def output_at_six(variables, x):
        return mixer.apply(variables, x)[0][0, 6].sum()

    by_variables, by_x = quick_jit(jax.grad(output_at_six, argnums=(0, 1)))(variables, x)
    np.testing.assert_array_equal(by_x[:, 7:], 0)
    assert (np.abs(by_x[:, :7]).max(axis=-1) > 0).all()
    for path, gradient in jax.tree_util.tree_leaves_with_path(by_variables):
        assert np.abs(gradient).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", MIXERS)
def test_a_sequence_in_pieces_equals_the_whole(name):
    """Three of the tokens while decoding."""
    x = jax.random.normal(jax.random.key(3), (2, 16, D_MODEL))
    mixer = make(name)
    variables = initialised(mixer, x)
    whole, _ = quick_jit(mixer.apply)(variables, x)
    cache, pieces = mixer.init_cache(2, 16), []
    step = quick_jit(lambda piece, cache: mixer.apply(variables, piece, cache=cache))
    for number, piece in enumerate(jnp.split(x, [5, 6, 7, 8, 9, 10, 11], axis=1)):
        if number == 3:
            cache = mixer.begin_decoding(variables["params"], cache)
        if number == 6:
            cache = mixer.end_decoding(cache)
        y, cache = step(piece, cache)
        pieces.append(y)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=1e-5)
    np.testing.assert_array_equal(cache.progress.position, 16)


@pytest.mark.parametrize("name", ["interdomain", "softmax"])
def test_grouped_heads_equal_repeated_ones(name):
    """Two query heads of one key/value head equal two key/value heads with the same parameters (MQA)."""
    x = jax.random.normal(jax.random.key(4), (2, 10, D_MODEL))
    shared = make(name, num_kv_heads=1)
    variables = initialised(shared, x)

    def repeated(path, leaf):
        module, leaf_name = path[-2].key, path[-1].key
        if module.startswith(("key", "value")):
            return jnp.concatenate([leaf, leaf], axis=-1)
        if module in ("query", "query_convolution", "output") or leaf_name == "channel_weights":
            return leaf
        return jnp.repeat(leaf, 2, axis=0)

    separate = jax.tree_util.tree_map_with_path(repeated, variables)
    together, apart = (quick_jit(m.apply)(v, x)[0] for m, v in ((shared, variables), (make(name), separate)))
    np.testing.assert_allclose(together, apart, rtol=1e-4, atol=1e-5)


def test_output_gate_is_silu():
    x = jax.random.normal(jax.random.key(5), (1, 6, D_MODEL))
    gated = make("interdomain", output_gate=True)
    variables = initialised(gated, x)
    params = dict(variables["params"])
    gate = params.pop("gate")["kernel"]
    identity = {"kernel": jnp.eye(HEADS * WIDTH)}
    plain = quick_jit(make("interdomain").apply)({"params": params | {"output": identity}}, x)[0]
    expected = (plain * jax.nn.silu(x @ gate)) @ params["output"]["kernel"]
    np.testing.assert_allclose(quick_jit(gated.apply)(variables, x)[0], expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_computes_in_bfloat16_and_keeps_its_state_in_float32():
    x = jax.random.normal(jax.random.key(6), (2, 20, D_MODEL))
    half = make("interdomain", dtype=jnp.bfloat16)
    variables = quick_jit(make("interdomain").init)(jax.random.key(0), x)
    out, cache = jax.jit(half.apply)(variables, x, cache=half.init_cache(2, 20))
    assert out.dtype == jnp.bfloat16
    assert cache.state.dtype == jnp.float32
    assert relative_rms(out.astype(jnp.float32), jax.jit(make("interdomain").apply)(variables, x)[0]) < 3e-2


def test_initial_values_are_the_papers():
    x = jnp.zeros((1, 4, 64))
    mixer = InterdomainAttention(num_heads=512, head_dim=2, state_dim=4)
    params = quick_jit(mixer.init)(jax.random.key(0), x)["params"]
    np.testing.assert_allclose(params["log_neg_a_real"], np.log(0.5), rtol=1e-6)
    np.testing.assert_allclose(params["a_imag"][0], 4 / np.pi * np.array([3, 1 / 3, -1 / 5, -3 / 7]), rtol=1e-6)
    log_delta = params["log_delta"]
    assert np.log(1e-3) <= log_delta.min() < np.log(1.1e-3)
    assert np.log(0.9e-1) < log_delta.max() <= np.log(1e-1)
    assert float(log_delta.mean()) == pytest.approx(np.log(1e-2), abs=0.2)
    assert float(params["query"]["kernel"].std()) == pytest.approx(0.02, rel=0.05)
    other = quick_jit(mixer.clone(delta_range=(0.5, 0.6)).init)(jax.random.key(0), x)["params"]["log_delta"]
    assert np.log(0.5) <= other.min() < other.max() <= np.log(0.6)


@pytest.mark.parametrize("name", ["interdomain", "dual_linear"])
def test_decoding_packed_rows(name):
    """Documents that end, padding between tokens, grouped heads, the hermitian read and a bfloat16 computation."""
    mixer = make(name, num_kv_heads=1, read="hermitian", dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(4), (3, 10, D_MODEL))
    ids = jnp.array([[1] * 10, [1, 1, 1, 2, 2, 0, 2, 3, 0, 3], [0, 1, 1, 1, 1, 1, 0, 0, 0, 0]])
    variables = initialised(mixer, x)
    whole, _ = quick_jit(mixer.apply)(variables, x, segment_ids=ids)
    step = quick_jit(lambda x, ids, cache: mixer.apply(variables, x, segment_ids=ids, cache=cache))
    y, cache = step(x[:, :3], ids[:, :3], mixer.init_cache(3, 0))
    cache, pieces = mixer.begin_decoding(variables["params"], cache), [y]
    for t in range(3, 10):
        y, cache = step(x[:, t : t + 1], ids[:, t : t + 1], cache)
        pieces.append(y)
    assert relative_rms(jnp.concatenate(pieces, axis=1), whole) < 1e-2
    np.testing.assert_array_equal(cache.progress.position, [10, 2, 5])


def test_decoding_takes_one_token_at_a_time():
    mixer = make("interdomain")
    x = jnp.ones((1, 2, D_MODEL))
    variables = initialised(mixer, x)
    cache = mixer.begin_decoding(variables["params"], mixer.init_cache(1, 0))
    with pytest.raises(ValueError, match="a cache from begin_decoding takes tokens one by one; got 2"):
        mixer.apply(variables, x, cache=cache)


def test_a_kernel_decodes_the_state_as_it_is():
    mixer = make("interdomain").clone(implementation="pallas_tpu")
    cache = mixer.init_cache(1, 0)
    assert mixer.end_decoding(mixer.begin_decoding({}, cache)) is cache


def test_a_cache_too_short_for_the_tokens_is_refused():
    x = jnp.zeros((1, 5, D_MODEL))
    mixer = SoftmaxAttention(num_heads=HEADS, head_dim=WIDTH)
    variables = quick_jit(mixer.init)(jax.random.key(0), x)
    with pytest.raises(ValueError, match="5 tokens do not fit a cache of length 4"):
        mixer.apply(variables, x, cache=mixer.init_cache(1, 4))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("interdomain", dict(inputs="duel"), "inputs must be one of ('dual', 'single'); got 'duel'"),
        ("interdomain", dict(projection="qury"), "projection must be one of ('query', 'linear'); got 'qury'"),
        ("interdomain", dict(num_kv_heads=3), "num_kv_heads must divide num_heads = 2; got 3"),
        ("softmax", dict(num_kv_heads=0), "num_kv_heads must divide num_heads = 2; got 0"),
    ],
)
def test_bad_fields_get_one_sentence(name, change, message):
    with pytest.raises(ValueError) as error:
        make(name, **change)
    assert message in str(error.value)

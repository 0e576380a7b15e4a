"""The token mixers: interdomain attention and its controls, each a setting of one Linen module; softmax has its own.

Every mixer is called as `y, cache = mixer(x, positions=..., segment_ids=..., cache=...)`: with no cache for training,
with one for prefill and decoding, where any number of tokens may follow any other. The cells of the paper's mechanism
cube are settings of `InterdomainAttention`, listed in `MIXERS`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype, Initializer
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from interdomain_jax.array_types import Activations, Complex, Positions, SegmentIds, State
from interdomain_jax.modules.layers import (
    CONVOLUTION_WIDTH,
    MATRIX_INIT,
    MIXER_INPUTS,
    ROPE_BASE,
    ShortConvolution,
    apply_rope,
    check_heads,
    convolve,
    normalize_l2,
    normalize_rms,
    project,
)
from interdomain_jax.modules.placement import Progress, no_progress, place_tokens
from interdomain_jax.modules.softmax import SoftmaxAttention
from interdomain_jax.ops.decoding import (
    DecodingState,
    begin_interdomain,
    begin_linear,
    end_decoding,
    interdomain_step,
    linear_step,
)
from interdomain_jax.ops.dynamics import Dynamics, Read, discretize, s4d_inv
from interdomain_jax.ops.interdomain import Implementation, interdomain_attention, linear_contraction
from interdomain_jax.ops.shards import over_mesh

DELTA_RANGE = (1e-3, 1e-1)
"""Range of the initial step lengths (paper, section 2, step 6), for contexts of 4,096 tokens."""

# How a mixer's parameters lie on axes, see `over_mesh`; all others have one entry a head.
_PARAMETER_AXES = {
    "channel_weights": "C",
    "key_convolution": "K H",
    "value_convolution": "K H",
    "query_convolution": "K H",
}


class RecurrentCache(NamedTuple):
    """What a recurrent mixer carries from call to call; its size does not depend on the tokens seen.

    Attributes:
        state: [B, Hkv, 2, M, R + D] float32, the state after the last token; while decoding in another form.
        convolutions: for each convolved projection, the last three inputs of the present document, [B, 3, width].
        progress: how far each row has come.
    """

    state: State | DecodingState
    convolutions: dict[str, Activations]
    progress: Progress


class InterdomainAttention(nn.Module):
    """Interdomain attention and, by its settings, every state-space cell of the mechanism cube (paper, sections 2, 3).

    Attributes:
        num_heads: query heads H.
        head_dim: width D of a head's values; the key and query features have the same width, as in every published run.
        num_kv_heads: heads Hkv of keys, values and states; None for one each. Query heads share a state in groups; a
            linear contraction reads each state by itself, and ignores it.
        state_dim: complex modes M of a state.
        delta_range: between which the initial step lengths of the heads are log-uniform. A head with step length delta
            starts with a memory of 2 / delta tokens.
        inputs: "dual", keys through the feature map beside raw values; "single", two generic convolved projections.
        projection: "query", each token reads the state through its own features; "linear", a learned fixed contraction.
        rope: whether queries and keys (the first half of a single input) are rotated.
        rope_base: of the rotations.
        read: how the real output is taken from complex coefficients, see `interdomain_attention`.
        output_gate: multiplies the output by SiLU(W_g x); off in the published runs.
        chunk_size: tokens in a chunk; None for the default. Changes the speed and nothing else.
        implementation: of the op; None for the best on this platform.
        norm_epsilon: of the input RMSNorm.
        kernel_init: initializer of every projection but W_O.
        output_init: initializer of W_O.
        dtype: of the computation; the recurrent state is float32 whatever it is.
        param_dtype: of the parameters.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    state_dim: int = 64
    delta_range: tuple[float, float] = DELTA_RANGE
    inputs: Literal["dual", "single"] = "dual"
    projection: Literal["query", "linear"] = "query"
    rope: bool = True
    rope_base: float = ROPE_BASE
    read: Read = "bilinear"
    output_gate: bool = False
    chunk_size: int | None = None
    implementation: Implementation | None = None
    norm_epsilon: float = 1e-5
    kernel_init: Initializer = MATRIX_INIT
    output_init: Initializer = MATRIX_INIT
    dtype: Dtype = jnp.float32
    param_dtype: Dtype = jnp.float32

    def __post_init__(self) -> None:
        for field, choices in (("inputs", ("dual", "single")), ("projection", ("query", "linear"))):
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} must be one of {choices}; got {getattr(self, field)!r}.")
        check_heads(self.num_heads, self.head_dim, self.num_kv_heads)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: Activations,
        *,
        positions: Positions | None = None,
        segment_ids: SegmentIds | None = None,
        cache: RecurrentCache | None = None,
    ) -> tuple[Activations, RecurrentCache | None]:
        """Mixes the tokens of each document.

        Args:
            x: [B, T, d_model].
            positions: [B, T], for RoPE; by default those of the tokens in their documents, behind the cache's.
            segment_ids: [B, T], the document of each token; 0 is padding, which may lie anywhere, changes nothing and
                gives zeros. None goes on with the document of the cache.
            cache: of the tokens before, as the last call, `init_cache` or `begin_decoding` returned it; None for
                training.

        Returns:
            [B, T, d_model] in `dtype`, and the cache after the last token that is not padding, or None if none was
            given.

        Raises:
            ValueError: several tokens for a cache of `begin_decoding`.
        """
        batch, length, d_model = x.shape
        decodes = cache is not None and isinstance(cache.state, DecodingState)
        if decodes and length != 1:
            raise ValueError(f"a cache from begin_decoding takes tokens one by one; got {length}.")
        if segment_ids is not None:
            x = jnp.where((segment_ids != 0)[..., None], x, 0)
        kv_heads, width = self._kv_heads, self.head_dim
        inputs, parameters = {}, {}
        for name, convolved in self._projections.items():
            num_heads = self.num_heads if name == "query" else kv_heads
            y = project(name, num_heads * width, self.kernel_init, self.dtype, self.param_dtype)(x)
            inputs[name] = checkpoint_name(y, MIXER_INPUTS)
            if convolved:
                taps = ShortConvolution(self.param_dtype, name=f"{name}_convolution")(num_heads * width)
                parameters[f"{name}_convolution"] = taps
        parameters |= self._input_norm() | self._dynamics()
        # Everything between the projections runs on each device's own rows, heads and tokens.
        state_axes = DecodingState._make(["B H", "B H", *["H"] * 4]) if decodes else "B H"
        cache_axes = "B" if cache is None else RecurrentCache._make((state_axes, "B K H", "B"))
        parameter_axes = {name: _PARAMETER_AXES.get(name, "H") for name in parameters}
        mix = over_mesh(
            self._mix,
            batch=batch,
            length=length,
            heads=kv_heads,
            in_axes=("B T H", parameter_axes, "B T", "B T", cache_axes),
            out_axes=("B T H", cache_axes),
            always=(self.implementation or "").startswith("pallas"),
        )
        out, cache = mix(inputs, parameters, positions, segment_ids, cache)
        if self.output_gate:
            out = out * nn.silu(project("gate", out.shape[-1], self.kernel_init, self.dtype, self.param_dtype)(x))
        return project("output", d_model, self.output_init, self.dtype, self.param_dtype)(out), cache

    @nn.nowrap
    def _mix(
        self,
        inputs: Mapping[str, Array],
        parameters: Mapping[str, Array],
        positions: Positions | None,
        segment_ids: SegmentIds | None,
        cache: RecurrentCache | None,
        *,
        axis_name: str | None,
    ) -> tuple[Array, RecurrentCache | None]:
        """From projections [B, T, H D] by name to the heads' outputs [B, T, H D], and the cache after them."""
        batch, length = inputs["key"].shape[:2]
        placement = place_tokens(None if cache is None else cache.progress, segment_ids, batch, length, axis_name)
        positions = placement.positions if positions is None else placement.arrange(positions)
        previous = {} if cache is None else cache.convolutions
        convolutions = {}

        def convolved(name: str, *, rotate: bool = False) -> Array:
            y = placement.arrange_inputs(inputs[name])
            if (taps := parameters.get(f"{name}_convolution")) is not None:
                y, convolutions[name] = convolve(y, taps, placement, previous.get(name))
            y = y.reshape(batch, length, -1, self.head_dim)
            return apply_rope(y, positions, self.rope_base) if rotate and self.rope else y

        k, v = convolved("key", rotate=True), convolved("value")
        k = k if self.inputs == "single" else feature_map(k)
        weights = jnp.split(parameters["channel_weights"], 2)
        k, v = (
            _normalize_half(
                x, parameters[f"{name}_scale"], parameters[f"{name}_bias"], w, self.norm_epsilon, self.dtype
            )
            for name, x, w in zip(("key", "value"), (k, v), weights, strict=True)
        )
        asks = self.projection == "query"
        tokens: tuple[Array, ...]
        if asks:
            tokens = (feature_map(convolved("query", rotate=True)).astype(self.dtype), k, v)
        else:
            tokens = (jnp.concatenate([k, v], axis=-1),)
        state = None if cache is None else cache.state
        if isinstance(state, DecodingState):
            step: Callable[..., tuple[Array, DecodingState]] = interdomain_step if asks else linear_step
            real = None if placement.real is None else placement.real[:, 0]
            out, state = step(*tokens, state, real=real, continues=placement.continues)
        else:
            op: Callable[..., tuple[Array, State]] = linear_contraction
            if asks:
                op = partial(interdomain_attention, read=self.read)
            if state is not None and placement.continues is not None:
                state = jnp.where(placement.continues[:, None, None, None, None], state, 0)
            out, state = op(
                *tokens,
                layer_dynamics(parameters),
                initial_state=state,
                segment_ids=placement.segment_ids,
                padding_is_last=True,
                chunk_size=self.chunk_size,
                implementation=self.implementation,
                axis_name=axis_name,
            )
        out = placement.restore_outputs(out.reshape(batch, length, -1))
        return out, None if cache is None else RecurrentCache(state, convolutions, placement.progress)

    @nn.nowrap
    def init_cache(self, batch_size: int, max_length: int) -> RecurrentCache:
        """The cache before the first token. `max_length` plays no part: the state has a fixed size."""
        heads = {"query": self.num_heads}
        return RecurrentCache(
            jnp.zeros((batch_size, self._kv_heads, 2, self.state_dim, 2 * self.head_dim), jnp.float32),
            {
                name: jnp.zeros(
                    (batch_size, CONVOLUTION_WIDTH - 1, heads.get(name, self._kv_heads) * self.head_dim), self.dtype
                )
                for name, convolved in self._projections.items()
                if convolved
            },
            no_progress(batch_size),
        )

    @nn.nowrap
    def begin_decoding(self, params: Mapping[str, Array], cache: RecurrentCache) -> RecurrentCache:
        """The cache in a form in which single tokens are read fastest, for these parameters; see `ops/decoding.py`."""
        assert not isinstance(cache.state, DecodingState), "decoding has begun"
        # A kernel writes a state where it lies.
        if (self.implementation or "").startswith("pallas"):
            return cache
        dynamics = layer_dynamics(params)
        if self.projection == "query":
            return cache._replace(state=begin_interdomain(cache.state, dynamics, self.head_dim, self.read))
        return cache._replace(state=begin_linear(cache.state, dynamics))

    @nn.nowrap
    def end_decoding(self, cache: RecurrentCache) -> RecurrentCache:
        """Undoes `begin_decoding`."""
        return cache._replace(state=end_decoding(cache.state)) if isinstance(cache.state, DecodingState) else cache

    @property
    def _projections(self) -> dict[str, bool]:
        """The projections by name, and whether they are convolved."""
        names = {"key": True, "value": self.inputs == "single"}
        return names | {"query": True} if self.projection == "query" else names

    @property
    def _kv_heads(self) -> int:
        # The controls contract each state by itself, so nothing there is shared.
        if self.num_kv_heads is None or self.projection == "linear":
            return self.num_heads
        return self.num_kv_heads

    def _input_norm(self) -> dict[str, Array]:
        """RMSNorm with a scale and an additive bias per head on each half, then B's real weight per channel."""
        shape = (self._kv_heads, self.head_dim)
        channels = self.param("channel_weights", nn.initializers.ones, (2 * self.head_dim,), self.param_dtype)
        parameters = {"channel_weights": channels}
        for name in ("key", "value"):
            for part, init in (("scale", nn.initializers.ones), ("bias", nn.initializers.zeros)):
                parameters[f"{name}_{part}"] = self.param(f"{name}_{part}", init, shape, self.param_dtype)
        return parameters

    def _dynamics(self) -> dict[str, Array]:
        modes, heads = self.state_dim, self._kv_heads
        eigenvalues = s4d_inv(modes)
        low, high = np.log(self.delta_range)
        log_delta = self.param(
            "log_delta",
            lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, low, high),
            (heads,),
            self.param_dtype,
        )
        log_neg_a_real = self.param(
            "log_neg_a_real", _every_head(np.log(-eigenvalues.real)), (heads, modes), self.param_dtype
        )
        a_imag = self.param("a_imag", _every_head(eigenvalues.imag), (heads, modes), self.param_dtype)
        parameters = {"log_delta": log_delta, "log_neg_a_real": log_neg_a_real, "a_imag": a_imag}
        # Complex entries of variance 1/M, so that C keeps the size of the state.
        readout_init = nn.initializers.normal((2 * modes) ** -0.5)
        for name in ("readout_real", "readout_imag"):
            parameters[name] = self.param(name, readout_init, (heads, modes, modes), self.param_dtype)
        # The published counts give these weights to the cells with a single input; elsewhere C alone weighs the modes.
        if self.inputs == "single":
            parameters["mode_weights"] = self.param(
                "mode_weights", nn.initializers.ones, (heads, modes), self.param_dtype
            )
        return parameters


def layer_dynamics(parameters: Mapping[str, Array]) -> Dynamics:
    """The dynamics that a recurrent mixer's parameters stand for, float32 at least; `ops.describe` takes them.

    Args:
        parameters: of one `InterdomainAttention` or `S4DMixer`, by name; others among them are not looked at.
    """
    names = ("log_delta", "log_neg_a_real", "a_imag", "readout_real", "readout_imag")
    wide = {
        name: jnp.asarray(parameters[name], jnp.promote_types(parameters[name].dtype, jnp.float32))
        for name in (*names, "mode_weights")
        if name in parameters
    }
    readout = Complex(wide["readout_real"], wide["readout_imag"])
    return discretize(wide["log_delta"], wide["log_neg_a_real"], wide["a_imag"], readout, wide.get("mode_weights"))


class S4DMixer(InterdomainAttention):
    """The S4D-only control: a single generic input, a learned linear contraction, no RoPE (paper, section 3)."""

    inputs: Literal["dual", "single"] = "single"
    projection: Literal["query", "linear"] = "linear"
    rope: bool = False


MIXERS: dict[str, Callable[..., nn.Module]] = {
    "interdomain": InterdomainAttention,
    "interdomain_no_rope": partial(InterdomainAttention, rope=False),
    "single_query": partial(InterdomainAttention, inputs="single"),
    "dual_linear": partial(InterdomainAttention, projection="linear"),
    "s4d": S4DMixer,
    "s4d_rope": partial(S4DMixer, rope=True),
    "softmax": SoftmaxAttention,
}
"""Every mixer and cell of the mechanism cube by name."""


# What these two work out in float32 is worked out again in the backward pass: kept, it would be most of what a mixer
# keeps in bfloat16 training.


@jax.checkpoint
def feature_map(x: Array) -> Array:
    """xi(x) = SiLU(x) / ||SiLU(x)||_2 over the last axis, in float32 (paper, section 2, step 4)."""
    return normalize_l2(nn.silu(x.astype(jnp.promote_types(x.dtype, jnp.float32))))


@partial(jax.checkpoint, static_argnums=(4, 5))
def _normalize_half(half: Array, scale: Array, bias: Array, weights: Array, epsilon: float, dtype: Dtype) -> Array:
    return ((normalize_rms(half, epsilon) * scale + bias) * weights).astype(dtype)


def _every_head(values: np.ndarray) -> Initializer:
    return lambda key, shape, dtype: jnp.broadcast_to(jnp.asarray(values, dtype), shape)

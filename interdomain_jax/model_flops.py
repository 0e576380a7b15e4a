"""The arithmetic of a model, by formula: what model flops utilisation (MFU) divides by a chip's peak.

A multiplication and an addition are two flops. Counted are the matrix products and the taps of the short convolutions;
not the rest (norms, activations, rotations, the embedding's look-up), nor what is worked out a second time.
"""

from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.modules.layers import CONVOLUTION_WIDTH, swiglu_hidden_dim
from interdomain_jax.modules.mixers import MIXERS, InterdomainAttention
from interdomain_jax.ops.chunk_sizes import default_chunk_size
from pallas_kernels.block_sizes import block_sizes
from pallas_kernels.tables import token_flops


def forward_flops(model: Decoder, context_length: int) -> float:
    """Flops of one token's forward pass, averaged over the positions of a context of T tokens, one document.

    Every matrix of I x O takes 2 I O. Of softmax attention the causal half is counted, (T + 1) / 2 keys a token. A
    recurrent mixer is counted in its chunked form, whatever implementation runs, with the chunk size of the device that
    is compiled for; the squares of a chunk, tokens by tokens, count as whole, for they are multiplied so.

    Args:
        model: the model; its `num_kv_heads` may group the query heads of any mixer but those with a linear contraction.
        context_length: T, tokens.

    Raises:
        ValueError: `context_length` is below 1.
    """
    if context_length < 1:
        raise ValueError(f"context_length must be at least 1, got {context_length}")
    mixers = sum(_mixer_flops(model, name, context_length) for name in model.mixers) / len(model.mixers)
    swiglu = 2 * 3 * model.d_model * (model.mlp_dim or swiglu_hidden_dim(model.d_model))
    unembedding = 2 * model.d_model * model.vocab_size
    return model.num_layers * (mixers + swiglu) + unembedding


def train_step_flops(model: Decoder, *, tokens: int, context_length: int) -> float:
    """Flops of a training step: three forward passes, as the backward pass takes two; recomputation is not counted.

    Args:
        model: the model.
        tokens: tokens in the step, over all rows, micro-batches and devices.
        context_length: T, tokens of a row.

    Raises:
        ValueError: `context_length` is below 1.
    """
    return 3 * forward_flops(model, context_length) * tokens


def _mixer_flops(model: Decoder, name: str, context_length: int) -> float:
    mixer = MIXERS[name](num_heads=model.num_heads, head_dim=model.head_dim, num_kv_heads=model.num_kv_heads)
    heads, width, modes = model.num_heads, model.head_dim, model.state_dim
    kv_heads = model.num_kv_heads or heads
    if not isinstance(mixer, InterdomainAttention):
        # Scores, and the sum of values.
        mixing = 2 * 2 * heads * width * (context_length + 1) / 2
        return mixing + 2 * model.d_model * width * (2 * heads + 2 * kv_heads)

    chunk_size = min(_chunk_size(model, mixer), context_length)
    if mixer.projection == "query":
        mixing = token_flops(
            heads=heads, kv_heads=kv_heads, key_dim=width, value_dim=width, state_dim=modes, chunk_size=chunk_size
        )
        projected, convolved, out = heads + 2 * kv_heads, heads + kv_heads, heads
    else:
        # Every head has a state, writes it, and gives out all its channels: the sum over the chunk, and the read.
        kv_heads = heads
        mixing = heads * 2 * width * (2 * chunk_size + 8 * modes)
        projected, convolved, out = 2 * heads, heads, 2 * heads
    if mixer.inputs == "single":
        convolved += kv_heads
    if model.output_gate:
        projected += out
    return mixing + 2 * model.d_model * width * (projected + out) + 2 * CONVOLUTION_WIDTH * width * convolved


def _chunk_size(model: Decoder, mixer: InterdomainAttention) -> int:
    sizes = model.state_dim, 2 * model.head_dim
    if model.chunk_size is not None:
        return model.chunk_size
    if model.implementation in ("pallas_tpu", "pallas_gpu") and mixer.projection == "query":
        return block_sizes(*sizes).chunk_size
    return default_chunk_size(*sizes)

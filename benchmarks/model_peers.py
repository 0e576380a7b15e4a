"""Public language models in JAX of the size of ours, and their training step: penzai's Llama and mamba2-jax's model.

Their steps have the loss, the optimizer's arithmetic and the rates of ours; what `training/step.py` does besides
(metrics, checksums, updates skipped for what is not finite) they leave out.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from interdomain_jax.modules.layers import swiglu_hidden_dim
from interdomain_jax.training.optimizer import learning_rate_schedule

MODELS = {
    "penzai": "penzai's Llama, of the same widths and layers as `softmax`, with a loss and an optimizer around it; "
    "scores of whole rows in memory, no fused attention",
    "mamba2": "mamba2-jax's `Mamba2ForCausalLM` at its fastest chunk size, with a state as large as ours in each layer "
    "and as many layers as come nearest to our parameters; its layers have no MLP and share B and C among the heads",
}
"""The peers of the trainer, and what they do and do not do."""

MAMBA2_CHUNK_SIZES = (64, 128)


class PeerModel(NamedTuple):
    """Parameters, and the function (parameters, tokens [B, T]) -> logits [B, T, V]."""

    params: Any
    logits: Callable[[Any, jax.Array], jax.Array]


def penzai_llama(model: ConfigDict) -> PeerModel:
    """Penzai's Llama with the fields of a softmax decoder."""
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=model.num_heads,
        query_head_multiplier=1,
        embedding_dim=model.d_model,
        projection_dim=model.head_dim,
        mlp_hidden_dim=swiglu_hidden_dim(model.d_model),
        num_decoder_blocks=model.num_layers,
        vocab_size=model.vocab_size,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        parameter_dtype=jnp.float32,
        activation_dtype=jnp.float32,
    )
    built = llamalike_common.build_llamalike_transformer(config, init_base_rng=jax.random.key(0))
    skeleton, params = pz.unbind_params(built, freeze=True)

    def logits(params: Any, tokens: jax.Array) -> jax.Array:
        bound = pz.bind_variables(skeleton, params, unfreeze_as_copy=True)
        out: jax.Array = bound(pz.nx.wrap(tokens).tag("batch", "seq")).unwrap("batch", "seq", "vocabulary")
        return out

    return PeerModel(params, logits)


def mamba2(model: ConfigDict, parameters: int, chunk_size: int) -> PeerModel:
    """Mamba-2's language model, as wide as ours, with about as many parameters and states as large."""
    from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

    state = model.num_heads * 2 * model.state_dim * 2 * model.head_dim
    config = partial(
        Mamba2Config,
        vocab_size=model.vocab_size,
        hidden_size=model.d_model,
        head_dim=model.head_dim,
        state_size=state // Mamba2Config(hidden_size=model.d_model).intermediate_size,
        chunk_size=chunk_size,
        tie_word_embeddings=False,
    )

    def count(layers: int) -> int:
        make = lambda: Mamba2ForCausalLM(config(num_hidden_layers=layers), rngs=nnx.Rngs(0))
        return _size(nnx.state(nnx.eval_shape(make), nnx.Param))

    # All layers have as many.
    layers = max(1, 1 + round((parameters - count(1)) / (count(2) - count(1))))
    built = Mamba2ForCausalLM(config(num_hidden_layers=layers), rngs=nnx.Rngs(0))
    graph, params = nnx.split(built)
    return PeerModel(params, lambda params, tokens: nnx.merge(graph, params)(tokens)["logits"])


def make_step(peer: PeerModel, config: ConfigDict) -> tuple[jax.stages.Wrapped, Any]:
    """The update `(state, batch) -> (state, loss)`, which consumes the state, and the first state."""
    schedule = learning_rate_schedule(
        config.optimizer.peak_learning_rate,
        final=config.optimizer.final_learning_rate,
        warmup_steps=config.optimizer.warmup_steps,
        num_steps=config.num_steps,
    )
    adamw = optax.adamw(
        schedule,
        b1=config.optimizer.beta1,
        b2=config.optimizer.beta2,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
    )
    optimizer = optax.chain(optax.clip_by_global_norm(config.optimizer.clip_norm), adamw)

    def loss(params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        logits = peer.logits(params, batch["inputs"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))

    def step(state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, jax.Array]:
        params, moments = state
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return jax.jit(step, donate_argnums=0), (peer.params, jax.jit(optimizer.init)(peer.params))


def _size(tree: Any) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))

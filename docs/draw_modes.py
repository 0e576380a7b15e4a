"""Draws the modes and lag kernels that a layer starts with, for both reads: docs/images/modes*.png.

Run as

    python docs/draw_modes.py
"""

import io
from pathlib import Path

import jax
import jax.numpy as jnp
from PIL import Image

from interdomain_jax import InterdomainAttention, layer_dynamics
from interdomain_jax.mode_chart import draw_modes
from interdomain_jax.ops import describe
from interdomain_jax.ops.dynamics import Read

IMAGES = Path(__file__).parent / "images"
READS: dict[Read, str] = {"bilinear": "modes.png", "hermitian": "modes_hermitian.png"}


def main() -> None:
    """Writes both pictures."""
    layer = InterdomainAttention(num_heads=4, head_dim=64, state_dim=64)
    params = jax.jit(layer.init)(jax.random.key(0), jnp.zeros((1, 1, 256)))["params"]
    dynamics = layer_dynamics(params)
    fast_to_slow = jnp.argsort(-params["log_delta"]).tolist()
    for read, name in READS.items():
        title = f"A layer at its start: 4 heads from fast to slow, 64 modes each, {read} read"
        figure = draw_modes(describe(dynamics, read=read), title=title, heads=fast_to_slow)
        drawn = io.BytesIO()
        figure.savefig(drawn)
        # A palette of 256 colours halves the file, and nothing is lost that an eye can see.
        Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)


if __name__ == "__main__":
    main()

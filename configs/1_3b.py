"""The paper's 1.3B model on 26 B tokens: 1,352,406,784 parameters.

    python train.py --config=configs/1_3b.py --workdir=runs/1_3b

The controls differ in the mixer alone: `--config=configs/1_3b.py:softmax` and `:s4d`.
A larger accumulation_steps needs less memory; a batch of 128 sequences takes at most 128 / accumulation_steps
devices.

Expect, on FineWeb-Edu with the Llama 2 tokenizer, these validation losses (perplexities) of the
paper; other text and another tokenizer give other numbers.

    interdomain  2.077 (7.98)
    softmax      2.155 (8.63)
    s4d          2.212
"""

from ml_collections import ConfigDict

from configs import common


def get_config(mixers: str = "interdomain") -> ConfigDict:
    """Returns the config with this mixer, or comma-separated pattern of mixers, in its layers."""
    return common.published_config(
        mixers,
        name="1_3b",
        d_model=2048,
        num_layers=24,
        num_heads=32,
        head_dim=64,
        tokens=26e9,
        peak_learning_rate=1e-3,
    )

"""The paper's 350M model on 7 B tokens: 377,360,768 parameters.

    python train.py --config=configs/350m.py --workdir=runs/350m

The controls differ in the mixer alone: `--config=configs/350m.py:softmax` and `:s4d`.
A larger accumulation_steps needs less memory.

Expect, on FineWeb-Edu, a validation perplexity 13 to 16 % below that of s4d, and below that of
softmax; the paper prints no figure for this size.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(mixers: str = "interdomain") -> ConfigDict:
    """Returns the config with this mixer, or comma-separated pattern of mixers, in its layers."""
    return common.published_config(
        mixers,
        name="350m",
        d_model=1024,
        num_layers=24,
        num_heads=16,
        head_dim=64,
        tokens=7e9,
        peak_learning_rate=1.5e-3,
    )

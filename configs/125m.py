"""The paper's 125M model on 2.5 B tokens: 135,416,208 parameters.

    python train.py --config=configs/125m.py --workdir=runs/125m

The controls differ in the mixer alone: `--config=configs/125m.py:softmax` and `:s4d`.
The mechanism cube takes the names of `modules.mixers.MIXERS` in the same place.

Expect, on FineWeb-Edu with the Llama 2 tokenizer, these validation losses (perplexities) of the
paper; other text and another tokenizer give other numbers.

    interdomain          2.8020 (16.48)
    interdomain_no_rope  2.8038 (16.51)
    softmax              2.8122 (16.65)
    single_query         2.8298 (16.94)
    s4d                  2.9561 (19.22)
    s4d_rope             2.9844 (19.77)
    dual_linear          3.0048 (20.18)
"""

from ml_collections import ConfigDict

from configs import common


def get_config(mixers: str = "interdomain") -> ConfigDict:
    """Returns the config with this mixer, or comma-separated pattern of mixers, in its layers."""
    return common.published_config(
        mixers,
        name="125m",
        d_model=768,
        num_layers=12,
        num_heads=12,
        head_dim=64,
        tokens=2.5e9,
        peak_learning_rate=3e-3,
    )

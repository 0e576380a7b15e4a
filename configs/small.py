"""The models of `experiments.text`: a million parameters, twenty minutes on one CPU core.

    python -m interdomain_jax.data.train_tokenizer --corpus=stdlib_text --vocab_size=4096 --output=runs/4096.model
    python train.py --config=configs/small.py --workdir=runs/small

Another mixer or cell of the mechanism cube: `--config=configs/small.py:s4d`.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(mixers: str = "interdomain") -> ConfigDict:
    """Returns the config with this mixer, or comma-separated pattern of mixers, in its layers."""
    config = common.base_config(mixers)
    config.name = "small"
    config.model.vocab_size = 4096
    config.model.d_model = 96
    config.model.num_layers = 2
    config.model.num_heads = 3
    config.model.head_dim = 32
    config.model.state_dim = 32
    # The slowest heads of the paper, 1e-3 at 4,096 tokens, brought to a context of 256: what a head never forgets in
    # training piles up in longer contexts.
    config.model.delta_range = (1.6e-2, 1e-1)
    # 0.02 sqrt(768 / 96), for the reason given in `configs/tiny.py`.
    config.model.init_std = 0.057
    # Two layers compile fast and fit in memory as they are.
    config.model.scan_layers = False
    config.model.remat = "none"
    # On purpose: CPUs are slow in bfloat16.
    config.model.dtype = "float32"
    # Pieces found in the corpus itself; the command above makes the file, and always the same one.
    config.data.tokenizer = "runs/4096.model"
    config.data.sequence_length = 256
    # 4,096 tokens an update...
    config.data.batch_size = 16
    # ...of which 2,442 are 10 million, the whole corpus once.
    config.num_steps = 2_442
    # The paper's peak rate of its smallest model.
    config.optimizer.peak_learning_rate = 3e-3
    # 15 % of the run, the share of the paper's smallest model.
    config.optimizer.warmup_steps = 366
    config.eval_every = 500
    config.eval_tokens = 65_536
    config.checkpoint_every = 500
    config.checkpoints_to_keep = 1
    return config

"""The demo: a byte-level model of about a million parameters, minutes on two CPU cores.

    python train.py --config=configs/tiny.py --workdir=runs/tiny
    python eval.py --workdir=runs/tiny

Another mixer: `--config=configs/tiny.py:s4d`; a pattern of mixers:
`--config=configs/tiny.py:interdomain,softmax`.

Expect about 1.74 nats per byte (perplexity 5.7) on the whole validation split with interdomain, and 1.80 (6.0) with
s4d.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(mixers: str = "interdomain") -> ConfigDict:
    """Returns the config with this mixer, or comma-separated pattern of mixers, in its layers."""
    config = common.base_config(mixers)
    config.name = "tiny"
    # 256 bytes and the end of a document.
    config.model.vocab_size = 257
    config.model.d_model = 128
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.head_dim = 32
    config.model.state_dim = 32
    # 0.02 sqrt(768 / 128): what a projection puts out then starts as large as in the 125M model, where SiLU bends. With
    # 0.02 this narrow model starts nearly linear and learns far slower, whatever its mixer.
    config.model.init_std = 0.05
    # Four layers compile fast and fit in memory as they are.
    config.model.scan_layers = False
    config.model.remat = "none"
    # On purpose: CPUs are slow in bfloat16.
    config.model.dtype = "float32"
    config.data.tokenizer = "bytes"
    config.data.sequence_length = 512
    # 2,048 tokens an update: at a budget of minutes, many small updates learn more than few large ones.
    config.data.batch_size = 4
    # The paper's peak rate of its smallest model.
    config.optimizer.peak_learning_rate = 3e-3
    # A tenth of the run; the paper gives warm-up 15 % of the run at 125M and 1.4 % at 1.3B.
    config.optimizer.warmup_steps = 40
    # 257 logits a token are few.
    config.vocab_chunks = 1
    config.num_steps = 400
    config.eval_every = 100
    config.eval_tokens = 65_536
    config.checkpoint_every = 100
    return config

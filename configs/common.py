"""What every experiment's config holds: the recipe of the paper (section 5), field by field."""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from interdomain_jax.sharding import mesh_config


def base_config(mixers: str) -> ConfigDict:
    """Returns the fields that all experiments share; each experiment fills in the rest.

    Args:
        mixers: one mixer or cell of the mechanism cube, or a comma-separated pattern that repeats
            over the layers: `interdomain,interdomain,interdomain,softmax`.
    """
    config = ConfigDict()

    # Names the run in figures and tables.
    config.name = ""

    # The fields of `modules.Decoder`, one to one.
    config.model = ConfigDict()
    # Rows of the embedding; at least the number of ids of the tokenizer.
    config.model.vocab_size = 32_000
    # Width of the residual stream.
    config.model.d_model = 0
    # Number of layers.
    config.model.num_layers = 0
    # Query heads of a mixer.
    config.model.num_heads = 0
    # Key/value heads; None for as many as query heads, as in the published runs.
    config.model.num_kv_heads = placeholder(int)
    # Width of a head's queries, keys and values.
    config.model.head_dim = 64
    # Hidden width of the SwiGLU layers; None for (2/3)(4 d_model) rounded up to a multiple of 128, as in the paper.
    config.model.mlp_dim = placeholder(int)
    # Base of the rotations (RoPE): the larger, the slower the later pairs of channels turn. Llama 2's.
    config.model.rope_base = 10_000.0
    # Complex modes M of a head's state.
    config.model.state_dim = 64
    # Range of the heads' first step lengths, log-uniform; a head begins with a memory of 2 / step tokens. The paper's,
    # for a context of 4,096.
    config.model.delta_range = (1e-3, 1e-1)
    # The repeating pattern of mixers.
    config.model.mixers = tuple(mixers.split(","))
    # How two complex coefficients become a real output: "bilinear" as printed, or "hermitian".
    config.model.read = "bilinear"
    # Tokens in a chunk of the recurrence; None for the default. It changes the speed alone.
    config.model.chunk_size = placeholder(int)
    # Implementation of the op; None for the best on the platform at hand.
    config.model.implementation = placeholder(str)
    # Multiplies the mixer's output by a learned gate; off in the published runs.
    config.model.output_gate = False
    # Compiles one layer and loops over it.
    config.model.scan_layers = True
    # What a layer keeps for its backward pass, which computes the rest once more: "none" recomputes nothing; "dots"
    # keeps the products with weight matrices; "mixer_inputs" the queries, keys and values; "full" the input alone.
    config.model.remat = "full"
    # Standard deviation of the matrices' first entries; those that write into the residual stream divide it by
    # sqrt(2 num_layers).
    config.model.init_std = 0.02
    # Added to the mean square in every RMSNorm; not in the paper, the value of Llama 2.
    config.model.norm_epsilon = 1e-5
    # Compute dtype; the recurrent state and the loss are float32 in any case.
    config.model.dtype = "bfloat16"
    # Dtype of the parameters and of Adam's moments.
    config.model.param_dtype = "float32"

    config.data = ConfigDict()
    # Directories of prepared corpora, or "stdlib_text", which needs no download and is prepared on first use. The paper
    # trains on FineWeb-Edu.
    config.data.corpora = ("stdlib_text",)
    # Of several corpora, the share of the rows that each has, in any unit.
    config.data.weights = ()
    # Where "stdlib_text" is kept.
    config.data.directory = "~/tensorflow_datasets"
    # "bytes", "mistral", or the path of a SentencePiece .model or a Hugging Face tokenizer.json.
    # "mistral" is an open model of 32,000 pieces, in place of the Llama 2 tokenizer of the paper,
    # which is gated.
    config.data.tokenizer = "mistral"
    # Context: tokens in a training sequence.
    config.data.sequence_length = 4096
    # Sequences in an optimizer update, over all devices: 128 x 4,096 = 524,288 tokens.
    config.data.batch_size = 128
    # How documents fill sequences: "concatenate", all end to end and cut, as in the paper; or "best_fit", which cuts
    # none that fits into one.
    config.data.packing = "concatenate"
    # Whether each document is a context of its own, instead of following the one before in the same sequence. The paper
    # speaks of packed sequences and of no reset.
    config.data.reset = False

    config.optimizer = ConfigDict()
    # Updates of linear warm-up.
    config.optimizer.warmup_steps = 0
    # Rate at the end of warm-up.
    config.optimizer.peak_learning_rate = 0.0
    # Rate of the last update, where the cosine arrives.
    config.optimizer.final_learning_rate = 1e-5
    # Bound on the peak of the SSM group: Delta, A, C, scales and biases of the input RMSNorm.
    config.optimizer.ssm_peak_learning_rate = 1e-3
    # Decoupled decay of matrices and embeddings.
    config.optimizer.weight_decay = 0.1
    # Bound on the global norm of the gradient.
    config.optimizer.clip_norm = 1.0
    # Decay of Adam's first moment; the paper follows Gu & Dao (2024) in both.
    config.optimizer.beta1 = 0.9
    # Decay of Adam's second moment.
    config.optimizer.beta2 = 0.95
    # Added to the root of Adam's second moment; not in the paper, the customary value.
    config.optimizer.eps = 1e-8

    # What Adam's moments are kept in; "bfloat16" halves them.
    config.optimizer.moment_dtype = "float32"

    # How the devices are laid out, see `interdomain_jax/sharding.py`; -1 in one place for as many as are left.
    config.mesh = mesh_config()

    # Optimizer updates in the whole run; the schedule ends here.
    config.num_steps = 0
    # Micro-batches in an update: more of them need less memory and give the same result. Must
    # divide data.batch_size, the quotient a multiple of mesh.data x mesh.fsdp.
    config.accumulation_steps = 1
    # Chunks of the vocabulary that the loss works through: more of them need less memory and give the same result. 8
    # make 4,000 columns of logits at a time, computed once more in the backward pass.
    config.vocab_chunks = 8
    # Seeds the parameters and the order of the documents.
    config.seed = 42
    # Validates every so many updates, and at the end...
    config.eval_every = 500
    # ...on this many tokens from the start of the validation split.
    config.eval_tokens = 10_485_760
    # Saves a checkpoint every so many updates, at the end, and where the validation loss is the smallest so far...
    config.checkpoint_every = 1000
    # ...and when the last one is so many minutes old; 0 for never.
    config.checkpoint_minutes = 15.0
    # Latest checkpoints to keep...
    config.checkpoints_to_keep = 2
    # ...and others, those with the smallest validation losses.
    config.best_checkpoints_to_keep = 1
    # Updates in a row that may be skipped, because a loss or gradient was not finite or a spike, before the run stops.
    config.max_skipped_in_a_row = 10

    config.spikes = ConfigDict()
    # What to do about a spike of the loss: "none"; "skip" its update; or "rewind" to the last checkpoint and go on from
    # there with the data behind the spike.
    config.spikes.action = "none"
    # A loss is a spike if it lies so many standard deviations above the mean of the last 100 or so.
    config.spikes.threshold = 8.0

    # Ends a run in which nothing has moved for so many seconds; compiling, saving and restoring count as one move each.
    config.hang_seconds = 1800.0
    # Off a terminal, logs a line every so many updates; tokens/s is an average over as many.
    config.log_every = 10
    return config


def published_config(
    mixers: str,
    *,
    name: str,
    d_model: int,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    tokens: float,
    peak_learning_rate: float,
) -> ConfigDict:
    """Returns the config of a model size of the paper (section 4).

    Args:
        mixers: as in `base_config`.
        name: of the size.
        d_model: width of the residual stream.
        num_layers: number of layers.
        num_heads: heads of a mixer.
        head_dim: width of a head.
        tokens: the training budget, warm-up included.
        peak_learning_rate: rate at the end of warm-up.
    """
    config = base_config(mixers)
    config.name = name
    config.model.d_model = d_model
    config.model.num_layers = num_layers
    config.model.num_heads = num_heads
    config.model.head_dim = head_dim
    tokens_per_step = config.data.batch_size * config.data.sequence_length
    config.num_steps = round(tokens / tokens_per_step)
    # The paper warms up over 375 M tokens: 715 updates.
    config.optimizer.warmup_steps = round(375e6 / tokens_per_step)
    config.optimizer.peak_learning_rate = peak_learning_rate
    # 16 sequences at a time: a chunk of their logits takes 16 x 4,096 x 4,000 x 4 bytes = 1.0 GB over all devices. Not
    # the paper's, which does not say; results do not depend on it.
    config.accumulation_steps = 8
    return config

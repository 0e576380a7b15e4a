"""Reading prompts and generating text with a trained model.

* `generator`: prompts in chunks, decoding in one compiled loop, for a batch of requests.
* `decode`: what of it is compiled.
* `sampling`: from logits to tokens.
* `states`: what a model knows of what it has read, as a value.
* `texts`: between texts and ids.
"""

from interdomain_jax.inference.generator import Completion, Generator, Request
from interdomain_jax.inference.sampling import Sampling
from interdomain_jax.inference.states import State

__all__ = ["Completion", "Generator", "Request", "Sampling", "State"]

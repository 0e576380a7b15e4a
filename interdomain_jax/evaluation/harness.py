"""The adapter for EleutherAI's lm-evaluation-harness (`pip install '.[harness]'`): its model "interdomain".

    python -m interdomain_jax.evaluation.lm_eval --model interdomain --model_args workdir=runs/tiny --tasks arc_easy

or, importing this module first, `lm_eval.simple_evaluate(model="interdomain", model_args={"workdir": "runs/tiny"})`.
"""

import functools
import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from lm_eval import models  # noqa: F401  (the harness looks for its own only while none is registered)
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, CacheHook
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from interdomain_jax import scoring, sharding, strict_json
from interdomain_jax.checksums import checksums
from interdomain_jax.data.tokenizers import Tokenizer, fingerprint, utf8_bytes
from interdomain_jax.evaluation.likelihoods import Continuation, Likelihood, continuation_likelihoods
from interdomain_jax.experiment import check_rows, require_positive
from interdomain_jax.inference import Generator, Request, Sampling
from interdomain_jax.inference.texts import TextStream
from interdomain_jax.trained import Trained, find_trained

# Tokens to generate where a task does not say, as for the harness's other models.
_MAX_NEW_TOKENS = 256
_MAX_NEW_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Beside the answers in a cache: what they depend on.
_SETTINGS = "interdomain settings"


class Generation(NamedTuple):
    """A text to generate.

    Attributes:
        request: of the generator.
        until: texts; where the first one begins, the text ends, however it is cut into tokens.
    """

    request: Request
    until: tuple[str, ...]


@register_model("interdomain")
class InterdomainLM(LM):
    """A checkpoint of a run as a model of the harness.

    Every text begins behind `prefix_token`, contexts and prompts too. In several processes all make the same calls with
    the same requests; generation needs all devices in one process.

    Args:
        workdir: of the run.
        checkpoint: "latest", "best" or the number of a step.
        batch_size: rows of a batch, rounded up to what the mesh splits evenly; "auto" for as many tokens as a training
            step reads at a time. Results do not depend on it.
        max_length: most tokens that the model reads at once, its window; None for the training context. Contexts are
            cut from the left, as the harness does it for other models.
        prefix_token: id; None for that of the end of a document, behind which documents begin in training.
        max_batch_size, device: for the harness, which gives them to every model. JAX's own settings choose the devices.
        mesh_sizes: `data`, `fsdp`, `tensor` and `seq`, as `sharding.make_mesh` takes them.

    Raises:
        FileNotFoundError: there is no run or no checkpoint, or its tokenizer's file is gone.
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        workdir: str,
        checkpoint: str = "latest",
        batch_size: int | str = 8,
        max_length: int | None = None,
        prefix_token: int | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **mesh_sizes: int,
    ):
        unknown = sorted(set(mesh_sizes) - set(sharding.AXES))
        if unknown:
            raise ValueError(
                f"the model has no argument {unknown[0]!r}; a mesh has the axes {', '.join(sharding.AXES)}"
            )
        # The harness makes an int of the number of a step, and a float of -1.
        sizes = sharding.mesh_config().to_dict() | {axis: int(size) for axis, size in mesh_sizes.items()}
        trained = find_trained(workdir, sizes, str(checkpoint))
        self._begin(trained, trained.restore_params, batch_size, max_length, prefix_token)

    @classmethod
    def of(
        cls,
        trained: Trained,
        params: Any,
        *,
        batch_size: int | str,
        max_length: int | None = None,
        prefix_token: int | None = None,
    ) -> "InterdomainLM":
        """The model of parameters at hand, on the mesh of `trained`; the other arguments are those of the class."""
        model = cls.__new__(cls)
        model._begin(trained, lambda: params, batch_size, max_length, prefix_token)
        return model

    def _begin(
        self,
        trained: Trained,
        read_params: Callable[[], Any],
        batch_size: int | str,
        max_length: int | None,
        prefix_token: int | None,
    ) -> None:
        super().__init__()
        config, mesh, tokenizer = trained.config, trained.mesh, trained.tokenizer
        self.max_length = config.data.sequence_length if max_length is None else max_length
        self.prefix_token = tokenizer.eos_id if prefix_token is None else prefix_token
        require_positive("max_length", self.max_length)
        self.batch_size = _rows(batch_size, trained, self.max_length)
        if self.max_length % mesh.shape["seq"]:
            raise ValueError(f"max_length is {self.max_length}; mesh.seq={mesh.shape['seq']} must divide it")
        if not 0 <= self.prefix_token < config.model.vocab_size:
            raise ValueError(
                f"prefix_token is {self.prefix_token}; it must be at least 0 and below the {config.model.vocab_size} "
                "ids of the vocabulary"
            )
        check_rows(config, mesh)
        self._trained = trained
        self._params = read_params()
        self._score = scoring.make_token_score_function(trained.model, mesh, vocab_chunks=config.vocab_chunks)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """All that the answers depend on, as plain values."""
        trained = self._trained
        sums = [int(value) for value in jax.tree.leaves(jax.device_get(checksums(self._params)))]
        return {
            "step": trained.step,
            "params_checksum": hashlib.sha256(str(sums).encode()).hexdigest()[:16],
            "decoder": trained.config.model.to_dict(),
            "tokenizer": trained.config.data.tokenizer,
            "tokenizer_fingerprint": fingerprint(trained.tokenizer),
            "prefix_token": self.prefix_token,
            "max_length": self.max_length,
        }

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into the `config` of its results, beside its own."""
        trained = self._trained
        mesh = {axis: int(size) for axis, size in trained.mesh.shape.items()}
        return {"workdir": str(trained.workdir), "mesh": mesh} | self.settings

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Takes the cache of answers that the harness has opened, its keys the requests alone.

        Raises:
            ValueError: it holds the answers of another model, or of this one with other settings.
        """
        answers, settings = cache_hook.dbdict, strict_json.dumps(self.settings)
        if answers is not None:
            if len(answers) and answers.get(_SETTINGS) != settings:
                raise ValueError(
                    f"the cache {answers.filename} holds answers of another checkpoint, or of this one with another "
                    "prefix_token or max_length; name another file with use_cache"
                )
            answers[_SETTINGS] = settings
        super().set_cache_hook(cache_hook)

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-likelihoods, in nats, of continuations behind contexts, and whether each is the greedy one.

        Args:
            requests: their arguments are two texts, (context, continuation); either may be empty.
            disable_tqdm: shows no progress.
        """
        encoded = [_encode_pair(self._trained.tokenizer, self.prefix_token, *request.args) for request in requests]
        answer = lambda likelihood: (likelihood.log_likelihood, likelihood.is_greedy)
        return self._likelihoods("loglikelihood", requests, encoded, answer, disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihoods, in nats, of whole texts, each token scored once.

        Args:
            requests: their arguments are one text each.
            disable_tqdm: shows no progress.
        """
        encode = self._trained.tokenizer.encode
        encoded = [Continuation([self.prefix_token], encode(request.args[0]).tolist()) for request in requests]
        answer = lambda likelihood: likelihood.log_likelihood
        return self._likelihoods("loglikelihood_rolling", requests, encoded, answer, disable_tqdm)

    def _likelihoods(
        self,
        name: str,
        requests: Sequence[Instance],
        encoded: Sequence[Continuation],
        answer: Callable[[Likelihood], Any],
        disable_tqdm: bool,
    ) -> list[Any]:
        """An answer to each request, in their order; each is cached as soon as all its windows are scored."""
        windows, owners = [], []
        for number, continuation in enumerate(encoded):
            own = _windows(continuation, self.max_length)
            windows += own
            owners += [number] * len(own)
        missing = [0] * len(requests)
        for number in owners:
            missing[number] += 1
        totals = [Likelihood(0.0, True)] * len(requests)
        scored = continuation_likelihoods(
            self._score,
            self._params,
            windows,
            self._trained.mesh,
            batch_size=self.batch_size,
            max_length=self.max_length,
        )
        for window, likelihood in tqdm(
            scored, desc=name, total=len(windows), unit="row", disable=disable_tqdm or jax.process_index() > 0
        ):
            number = owners[window]
            total = totals[number]
            totals[number] = Likelihood(
                total.log_likelihood + likelihood.log_likelihood, total.is_greedy and likelihood.is_greedy
            )
            missing[number] -= 1
            if not missing[number]:
                self.cache_hook.add_partial(name, requests[number].args, answer(totals[number]))
        return [answer(total) for total in totals]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generated texts, up to the first of the texts that end them.

        Args:
            requests: their arguments are a text and the settings of a task's `generation_kwargs`: `until`,
                `max_gen_toks`, `do_sample` and the fields of `Sampling`.
            disable_tqdm: shows no progress.

        Raises:
            ValueError: a setting is unknown, or leaves no room for the context.
        """
        seen: Counter[str] = Counter()
        generations = []
        for request in requests:
            context, settings = request.args
            generations.append(self._generation(context, settings, seen[context]))
            seen[context] += 1
        # Together what takes about as long.
        order = sorted(
            range(len(requests)),
            key=lambda n: (generations[n].request.max_new_tokens, len(generations[n].request.prompt)),
            reverse=True,
        )
        texts = [""] * len(requests)
        with tqdm(desc="generate_until", total=len(requests), disable=disable_tqdm) as progress:
            for first in range(0, len(order), self.batch_size):
                group = order[first : first + self.batch_size]
                for number, text in zip(group, self._generate([generations[n] for n in group]), strict=True):
                    texts[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                progress.update(len(group))
        return texts

    def _generation(self, context: str, settings: Mapping[str, Any], repeat: int) -> Generation:
        left = dict(settings)
        until = left.pop("until", None) or []
        lengths = [int(left.pop(name)) for name in _MAX_NEW_TOKENS_NAMES if name in left]
        max_new_tokens = lengths[0] if lengths else _MAX_NEW_TOKENS
        do_sample = left.pop("do_sample", None)
        # Drawing at a temperature that is not named is drawing from the model itself.
        temperature = left.pop("temperature", float(bool(do_sample)))
        filters = {name: left.pop(name) for name in Sampling._fields if name in left}
        if left.pop("num_beams", 1) != 1 or left:
            name = next(iter(left), "num_beams")
            raise ValueError(
                f"the setting {name} of generate_until is not known here; there are until, {_MAX_NEW_TOKENS_NAMES[0]}, "
                f"do_sample, {', '.join(Sampling._fields)}"
            )
        if max_new_tokens >= self.max_length:
            raise ValueError(
                f"max_gen_toks is {max_new_tokens}; it must be below max_length, {self.max_length}, to leave room for "
                "the context"
            )
        prompt = [self.prefix_token, *self._trained.tokenizer.encode(context).tolist()]
        request = Request(
            prompt[-(self.max_length - max_new_tokens) :],
            max_new_tokens,
            Sampling(temperature=0.0 if do_sample is False else float(temperature), **filters),
            # The same whatever the other requests are, but for its own repeats.
            (zlib.crc32(utf8_bytes(context)) + repeat) % 2**32,
            stop=((self._trained.tokenizer.eos_id,),),
        )
        return Generation(request, tuple(text for text in ([until] if isinstance(until, str) else until) if text))

    def _generate(self, generations: Sequence[Generation]) -> list[str]:
        streams = [TextStream(self._trained.tokenizer, request.prompt, until) for request, until in generations]
        texts = [""] * len(generations)

        def on_tokens(row: int, tokens: list[int]) -> bool:
            texts[row] += streams[row].push(tokens)
            return streams[row].stopped

        self._generator.generate([each.request for each in generations], on_tokens=on_tokens)
        return [text + stream.finish() for text, stream in zip(texts, streams, strict=True)]

    @functools.cached_property
    def _generator(self) -> Generator:
        trained = self._trained
        return Generator(
            trained.model, self._params, trained.mesh, batch_size=self.batch_size, max_length=self.max_length
        )


def _rows(batch_size: int | str, trained: Trained, max_length: int) -> int:
    """Rows of a batch, as `InterdomainLM` takes them, in number a multiple of what the mesh splits them into.

    Raises:
        ValueError: `batch_size` is neither a number of at least 1 nor "auto".
    """
    parts = sharding.row_parts(trained.mesh)
    if batch_size == "auto":
        config = trained.config
        rows = config.data.batch_size // config.accumulation_steps
        wanted = max(1, rows * config.data.sequence_length // max_length)
    elif str(batch_size).isdecimal() and int(batch_size):
        wanted = int(batch_size)
    else:
        raise ValueError(f"batch_size is {batch_size!r}; it must be a number of at least 1, or 'auto'")
    return -(-wanted // parts) * parts


def _encode_pair(tokenizer: Tokenizer, prefix_token: int, context: str, continuation: str) -> Continuation:
    """The ids of a context and its continuation, cut apart as the harness does it.

    The two are encoded as one text, and the continuation is what comes after as many tokens as the context has; space
    at the end of the context is part of the continuation. If a token spans the cut so that none is left for it, the
    continuation is encoded alone.
    """
    before = context.rstrip()
    context_ids = tokenizer.encode(before).tolist()
    ids = tokenizer.encode(context + continuation).tolist()[len(context_ids) :]
    if not ids:
        ids = tokenizer.encode(context[len(before) :] + continuation).tolist()
    return Continuation([prefix_token, *context_ids], ids)


def _windows(continuation: Continuation, max_length: int) -> list[Continuation]:
    """Windows of the model that together score each token once.

    One, its context cut from the left, where the tokens fit; if not, the harness's windows, of which each but the first
    has new tokens behind a context that fills it up.
    """
    context, tokens = continuation
    if len(tokens) <= max_length:
        return [Continuation(context[-(max_length + 1 - len(tokens)) :], tokens)]
    rolling = get_rolling_token_windows(list(tokens), context[-1], max_length, 1)
    return [Continuation(*make_disjoint_window(window)) for window in rolling]

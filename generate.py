"""Generates text with a trained model.

    python generate.py --workdir=runs/tiny --prompt='def main():' --max_new_tokens=200
    python generate.py --workdir=runs/tiny --prompts=prompts.jsonl --samples=4 --temperature=0.8 --output=out.jsonl
    echo 'import os' | python generate.py --workdir=runs/tiny --prompts=-
    python generate.py --workdir=runs/tiny --interactive --prompt="$(cat document.txt)"
    python generate.py --input=tiny.safetensors --tokenizer=bytes --prompt='def main():'
    python generate.py --workdir=runs/tiny --prompt="$(cat document.txt)" --save_state=document.state
    python generate.py --workdir=runs/tiny --state=document.state --prompts=questions.jsonl

A file of prompts has a JSON object with the field "prompt" on each line; standard input has a prompt on each line. Text
goes to standard output as it comes, or as JSON lines to `--output`; speeds go to standard error.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from absl import app, flags
from etils import epath
from jax.sharding import Mesh
from ml_collections import config_flags

from interdomain_jax import cli, sharding, strict_json
from interdomain_jax import workdir as workdirs
from interdomain_jax.data.tokenizers import Tokenizer, load_tokenizer
from interdomain_jax.export import read_exported
from interdomain_jax.inference import Generator, Request, Sampling
from interdomain_jax.inference.states import State, Storage, load_state, save_state, take_rows
from interdomain_jax.inference.texts import TextStream, prompt_ids
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.trained import find_trained

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "latest", "'latest', 'best' (on validation), or the number of a step.")
_INPUT = flags.DEFINE_string("input", None, "In place of a run, an exported file, or the directory of a Llama.")
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "That of --input, as the field data.tokenizer of a config names it."
)
_PROMPT = flags.DEFINE_multi_string("prompt", [], "A text to go on from; may be given several times.")
_PROMPTS = flags.DEFINE_string(
    "prompts", None, "A file of JSON lines with the field 'prompt', or - for standard input."
)
_INTERACTIVE = flags.DEFINE_bool(
    "interactive", False, "Asks for lines; each goes on behind all that was said, --prompt first."
)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Tokens to generate, at most.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 1, "Completions of each prompt.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Divides the logits; 0 takes the most likely token.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Draws from the k most likely tokens; 0 for all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Draws from the most likely tokens of this probability together.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "Draws from tokens at least so likely, as a share of the most likely one.")
_PENALTY = flags.DEFINE_float("repetition_penalty", 1.0, "Makes tokens that have been seen less likely; 1 for none.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the first completion; the next ones count on.", lower_bound=0)
_STOP = flags.DEFINE_multi_string("stop", [], "A text that ends a completion, beside the end of a document.")
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", None, "Completions at a time; all, up to 16, if not given.", lower_bound=1
)
_MAX_LENGTH = flags.DEFINE_integer(
    "max_length",
    None,
    "Tokens that softmax layers hold, prompts and completions together; what is needed, or 4096 with "
    "--interactive, if not given.",
    lower_bound=1,
)
_CHUNK_SIZE = flags.DEFINE_integer("chunk_size", 512, "Tokens of the prompts read at a time: a power of two.")
_SAVE_STATE = flags.DEFINE_string("save_state", None, "A file for the state behind --prompt; nothing is generated.")
_STATE_STORAGE = flags.DEFINE_enum(
    "state_storage", "float32", get_args(Storage), "Of --save_state: bfloat16 takes half the room, and rounds."
)
_STATE = flags.DEFINE_string("state", None, "A file that --save_state wrote: every prompt goes on behind it.")
_OUTPUT = flags.DEFINE_string("output", None, "A file for JSON lines: prompt, completion, tokens, log-probabilities.")
_MESH = config_flags.DEFINE_config_dict("mesh", sharding.mesh_config(), "The layout of the devices.")


class Source(NamedTuple):
    """What generates: a model and the tokenizer it reads with, and what gives its parameters on the mesh."""

    model: Decoder
    tokenizer: Tokenizer
    mesh: Mesh
    params: Callable[[], Any]


def find_source() -> Source:
    """The run or the exported model of the flags.

    Raises:
        FileNotFoundError: there is no such run, checkpoint or file.
        ValueError: flags that do not go together, or what is there cannot be read.
    """
    if (_WORKDIR.value is None) == (_INPUT.value is None):
        raise ValueError("give one of --workdir, the directory of a run, and --input, an exported model")
    if (_INPUT.value is None) != (_TOKENIZER.value is None):
        raise ValueError("--input and --tokenizer go together; a run knows its own tokenizer")
    if _INPUT.value is not None and flags.FLAGS["checkpoint"].present:
        raise ValueError("--checkpoint chooses among those of a run; --input has one set of parameters")
    if _INPUT.value is None:
        trained = find_trained(_WORKDIR.value, _MESH.value, _CHECKPOINT.value)
        return Source(trained.model, trained.tokenizer, trained.mesh, trained.restore_params)
    tokenizer, mesh = load_tokenizer(_TOKENIZER.value), sharding.make_mesh(_MESH.value)
    loaded = read_exported(_INPUT.value, mesh=mesh)
    if loaded.model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"--tokenizer={_TOKENIZER.value} has {tokenizer.vocab_size} ids; the model of --input has "
            f"{loaded.model.vocab_size}, and must have at least as many"
        )
    return Source(loaded.model, tokenizer, mesh, lambda: loaded.params)


def read_prompts() -> list[str]:
    """The prompts of the flags, in order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line of it has no prompt, or there are more than a conversation begins with.
    """
    prompts = list(_PROMPT.value)
    if _INTERACTIVE.value and (len(prompts) > 1 or _PROMPTS.value is not None):
        raise ValueError("--interactive goes on behind one --prompt at most, and takes no --prompts")
    if _PROMPTS.value == "-":
        return prompts + [line.removesuffix("\n") for line in sys.stdin]
    if _PROMPTS.value is not None:
        prompts += prompts_of_file(Path(_PROMPTS.value))
    return prompts


def prompts_of_file(path: Path) -> Iterator[str]:
    """The field "prompt" of each line.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no JSON object with that field.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--prompts={path} does not exist")
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str):
            raise ValueError(f"line {number} of {path} must be a JSON object with the field 'prompt', a text")
        yield prompt


def ids_of(tokenizer: Tokenizer, text: str, behind: State | None) -> list[int]:
    """The ids of a text at the start, or behind what a state has read."""
    return prompt_ids(tokenizer, text) if behind is None else tokenizer.encode(text).tolist()


def requests_of(tokenizer: Tokenizer, prompts: Sequence[str], behind: State | None) -> list[Request]:
    """So many samples of each prompt."""
    sampling = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value, _MIN_P.value, _PENALTY.value)
    sampling.check()
    return [
        Request(
            ids_of(tokenizer, prompt, behind),
            _MAX_NEW_TOKENS.value,
            sampling,
            _SEED.value + number,
            stop=((tokenizer.eos_id,),),
        )
        for number, prompt in enumerate(prompt for prompt in prompts for _ in range(_SAMPLES.value))
    ]


def main(_: list[str]) -> None:
    with cli.exit_on_bad_input():
        prompts = read_prompts()
        if not prompts and not _INTERACTIVE.value:
            raise ValueError("there is no prompt: give --prompt, --prompts or --interactive")
        if _SAVE_STATE.value and (len(prompts) != 1 or _INTERACTIVE.value):
            raise ValueError("--save_state saves the state behind one --prompt, and generates nothing")
        if _SAVE_STATE.value and _OUTPUT.value:
            raise ValueError("--save_state generates nothing that --output could hold; leave one of them out")
        if flags.FLAGS["state_storage"].present and not _SAVE_STATE.value:
            raise ValueError("--state_storage says how --save_state writes; give that too")
        for flag, path in (("--save_state", _SAVE_STATE.value), ("--output", _OUTPUT.value)):
            if path is not None:
                workdirs.require_writable(flag, epath.Path(path).absolute().parent)
        source = find_source()
        behind = None if _STATE.value is None else load_state(Path(_STATE.value), source.model)
        requests = requests_of(source.tokenizer, prompts, behind)
        max_length = _MAX_LENGTH.value or (4096 if _INTERACTIVE.value else _needed(requests, behind))
        parts = sharding.row_parts(source.mesh)
        wanted = _BATCH_SIZE.value or min(16, max(1, len(requests)))
        generator = Generator(
            source.model,
            source.params(),
            source.mesh,
            batch_size=-(-wanted // parts) * parts,
            max_length=max_length,
            chunk_size=_CHUNK_SIZE.value,
        )
        if not _INTERACTIVE.value:
            generator.check(requests, behind)
        start = None
        if behind is not None and (_INTERACTIVE.value or _SAVE_STATE.value):
            start = generator.fork(behind, [0])
    if _INTERACTIVE.value:
        converse(source.tokenizer, generator, prompts, start)
    elif _SAVE_STATE.value:
        state = take_rows(generator.read([requests[0].prompt], start), [0])
        save_state(Path(_SAVE_STATE.value), source.model, state, storage=_STATE_STORAGE.value)
        print(f"{int(state.length[0]):,} tokens read; the state has {state.bytes / 2**20:.2f} MiB", file=sys.stderr)
    else:
        complete(source.tokenizer, generator, prompts, requests, behind)


def _needed(requests: Sequence[Request], behind: State | None) -> int:
    """Tokens of the longest prompt and its completion, behind a state."""
    read = 0 if behind is None else int(behind.length[0])
    return read + max(len(request.prompt) for request in requests) + _MAX_NEW_TOKENS.value


def complete(
    tokenizer: Tokenizer,
    generator: Generator,
    prompts: Sequence[str],
    requests: Sequence[Request],
    behind: State | None,
) -> None:
    """Writes a completion of each request, the first ones as they come."""
    streams = [TextStream(tokenizer, request.prompt, _STOP.value) for request in requests]
    texts = [""] * len(requests)
    # One text at a time can be seen while it grows.
    shows = len(requests) == 1 and _OUTPUT.value is None
    if shows:
        print(prompts[0], end="", flush=True)
    started, first_token = time.perf_counter(), 0.0

    def on_tokens(number: int, tokens: list[int]) -> None:
        nonlocal first_token
        first_token = first_token or time.perf_counter() - started
        if not streams[number].stopped:
            tell(number, streams[number].push(tokens))

    def tell(number: int, text: str) -> None:
        texts[number] += text
        if shows:
            print(text, end="", flush=True)

    completions = generator.generate(requests, behind=behind, on_tokens=on_tokens)
    seconds = time.perf_counter() - started
    for number, stream in enumerate(streams):
        tell(number, stream.finish())
    if shows:
        print()
    elif _OUTPUT.value is None:
        for number, text in enumerate(texts):
            print(f"{prompts[number // _SAMPLES.value]}{text}\n")
    else:
        lines = [
            strict_json.dumps(
                {
                    "prompt": prompts[number // _SAMPLES.value],
                    "completion": texts[number],
                    "seed": requests[number].seed,
                    **completion._asdict(),
                    "finish_reason": "stop" if streams[number].stopped else completion.finish_reason,
                }
            )
            for number, completion in enumerate(completions)
        ]
        output = Path(_OUTPUT.value)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("\n".join(lines) + "\n")
    tokens = sum(len(completion.tokens) for completion in completions)
    print(
        f"{tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s, compilation included; "
        f"the first after {first_token:.2f} s",
        file=sys.stderr,
    )


def converse(tokenizer: Tokenizer, generator: Generator, prompts: Sequence[str], state: State | None) -> None:
    """Goes on behind each line that is typed, and behind all that was said before, until there is no more.

    The state comes before the first line, and of `prompts` the one, if there is one.
    """
    if prompts:
        with cli.exit_on_bad_input():
            state = generator.read([ids_of(tokenizer, prompts[0], state)], state)
    for number in itertools.count():
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        ids = prompt_ids(tokenizer, line) if state is None else tokenizer.encode(f"\n{line}\n").tolist()
        (request,) = requests_of(tokenizer, [line], state)[:1]
        stream = TextStream(tokenizer, ids, _STOP.value)
        started = time.perf_counter()
        with cli.exit_on_bad_input():
            state = generator.read([ids], state)
            show = lambda _, tokens, stream=stream: print(stream.push(tokens), end="", flush=True)
            (completion,), state = generator.go_on(
                state, [request._replace(seed=request.seed + number)], show, stream_every=4
            )
        print(stream.finish())
        seconds = time.perf_counter() - started
        print(
            f"[{len(ids)} tokens read and {len(completion.tokens)} generated in {seconds:.2f} s; the state has "
            f"{state.bytes / 2**20:.2f} MiB]",
            file=sys.stderr,
        )


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)

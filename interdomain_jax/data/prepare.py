"""Prepares a corpus for training: tokenises its texts, and writes them as files of token ids with a manifest.

python -m interdomain_jax.data.prepare --corpus=stdlib_text --tokenizer=mistral --output=/data/stdlib --num_workers=2

An Apache Beam pipeline; `--runner` says where it runs, on this machine if it is not given. Start it again after an
interruption, with the same flags: what is complete is kept, and the files are the same, byte for byte, as those of a
run that was not interrupted, with any number of workers.
"""

import importlib.util
from collections.abc import Mapping, Sequence

from absl import app, flags, logging
from etils import epath

from interdomain_jax import cli
from interdomain_jax.data import preparation, source_flags
from interdomain_jax.data.preparation import Run, Task
from interdomain_jax.data.preparation_progress import show_progress
from interdomain_jax.data.token_files import Manifest
from interdomain_jax.workdir import require_writable

_TOKENIZER = flags.DEFINE_string(
    "tokenizer", "mistral", "'bytes', 'mistral', or the path of a .model or tokenizer.json; that of data.tokenizer."
)
_OUTPUT = flags.DEFINE_string("output", None, "The directory of the prepared corpus, or gs://...", required=True)
_RUNNER = flags.DEFINE_string("runner", "DirectRunner", "The Beam runner, such as DataflowRunner or FlinkRunner.")
_NUM_WORKERS = flags.DEFINE_integer("num_workers", 1, "Processes of the DirectRunner.", lower_bound=1)
_BEAM_OPTIONS = flags.DEFINE_multi_string(
    "beam_option", [], "An option of Beam or its runner, as in --beam_option=--project=mine; as often as needed."
)
_SHARD_MIB = flags.DEFINE_integer(
    "shard_mib", None, "MiB of text in a shard, about; 64 if not given, and 4 of stdlib_text.", lower_bound=1
)


def beam_run(options: Sequence[str]) -> Run:
    """Does tasks on Apache Beam, with these of its options.

    Raises:
        ValueError: Beam is not installed.
    """
    if importlib.util.find_spec("apache_beam") is None:
        raise ValueError("Apache Beam is not installed: pip install 'interdomain-jax[data]'")

    def run(tasks: Sequence[Task]) -> None:
        # Imported here, for it takes seconds; it warns of what it could not import for clouds that are not used.
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.ERROR)
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions

        logging.set_verbosity(verbosity)
        with beam.Pipeline(options=PipelineOptions(list(options))) as pipeline:
            # Without the shuffle a runner would give all tasks to one worker.
            _ = pipeline | beam.Create(tasks) | beam.Reshuffle() | beam.Map(Task.do)

    return run


def _summary(manifests: Mapping[str, Manifest]) -> str:
    lines = []
    for split, manifest in manifests.items():
        shards = manifest.shards
        skipped = sum(sum(shard.skipped.values()) for shard in shards)
        lines.append(
            f"{split}: {sum(s.documents for s in shards):,} documents, {sum(s.tokens for s in shards):,} tokens, "
            f"{sum(s.bytes for s in shards):,} bytes; {skipped:,} texts skipped, {sum(s.cut for s in shards):,} cut"
        )
    return "\n".join(lines)


def main(_: list[str]) -> None:
    """Prepares the corpus that the flags name, and prints what was written."""
    with cli.exit_on_bad_input():
        output = epath.Path(_OUTPUT.value).expanduser()
        require_writable("--output", output)
        options = [f"--runner={_RUNNER.value}", *_BEAM_OPTIONS.value]
        if _RUNNER.value == "DirectRunner":
            mode = "in_memory" if _NUM_WORKERS.value == 1 else "multi_processing"
            options += [f"--direct_num_workers={_NUM_WORKERS.value}", f"--direct_running_mode={mode}"]
        run = beam_run(options)
        part_bytes = None if _SHARD_MIB.value is None else _SHARD_MIB.value << 20
        plans = preparation.plan(source_flags.source_from_flags(), output, _TOKENIZER.value, part_bytes=part_bytes)
        with show_progress(plans):
            manifests = preparation.carry_out(plans, run)
        preparation.remove_unfinished(output)
    print(_summary(manifests))
    print(f"train on it with --config.data.corpora=\"('{output}',)\" --config.data.tokenizer={_TOKENIZER.value}")


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)

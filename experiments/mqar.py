"""Tiny models, softmax, interdomain with either read and s4d, learn to recall: MQAR at a size for two CPU cores.

    python -m experiments.mqar
    python -m experiments.mqar --seeds=0,1,2 --learning_rates=1e-3

Each run trains the whole decoder, two layers of a mixer, with the trainer's own update on sequences of several lengths
at once, none of them read twice, and tests it on others, also longer ones and with more pairs. Writes `mqar.json`,
`mqar.md` and `mqar.png` into `--output`, after each run; those that the file has already, of the same setting, are
not done again.
"""

import shlex
import sys

import jax
from absl import app, flags
from etils import epath

from experiments.mqar_report import as_markdown, saved_runs, write
from experiments.mqar_runs import MODELS, TEST_LENGTHS_AND_PAIRS, TRAINING_LENGTHS_AND_PAIRS, mqar_config, run
from interdomain_jax import cli, sharding
from interdomain_jax import workdir as workdirs
from interdomain_jax.evaluation.records import machine
from interdomain_jax.training.optimizer import make_optimizer

_MODELS = flags.DEFINE_list("models", [*MODELS], "Kinds of models.")
_LEARNING_RATES = flags.DEFINE_list("learning_rates", ["3e-3", "1e-2"], "Peak rates; a model is shown at its best one.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1"], "Of the parameters and of all sequences.")
_NUM_STEPS = flags.DEFINE_integer("num_steps", 1_200, "Updates of a run.", lower_bound=2)
_OUTPUT = flags.DEFINE_string("output", "experiments/results", "Directory of the results.")


def main(_: list[str]) -> None:
    output, num_steps = epath.Path(_OUTPUT.value), _NUM_STEPS.value
    with cli.exit_on_bad_input():
        if not {*_MODELS.value} <= {*MODELS}:
            raise ValueError(f"--models={','.join(_MODELS.value)}; they must be names from {tuple(MODELS)}")
        rates, seeds = [float(rate) for rate in _LEARNING_RATES.value], [int(seed) for seed in _SEEDS.value]
        for rate in rates:
            make_optimizer(num_steps=num_steps, **mqar_config("s4d", rate, num_steps).optimizer)
        workdirs.require_writable("--output", output)
    config = mqar_config("s4d", rates[0], num_steps)
    same = {
        "num_steps": num_steps,
        "batch_size": config.data.batch_size,
        "vocab_size": config.model.vocab_size,
        "training": TRAINING_LENGTHS_AND_PAIRS,
        "test": TEST_LENGTHS_AND_PAIRS,
    }
    header = same | {"command": shlex.join(["python", "-m", "experiments.mqar", *sys.argv[1:]]), "machine": machine()}
    mesh = sharding.make_mesh(sharding.mesh_config(), jax.devices()[:1])
    asked = [(model, rate, seed) for seed in seeds for model in _MODELS.value for rate in rates]
    runs = [each for each in saved_runs(output / "mqar.json", same) if each[:3] in asked]
    for model, rate, seed in asked:
        if (model, rate, seed) not in [each[:3] for each in runs]:
            runs.append(run(model, rate, seed, num_steps=num_steps, mesh=mesh))
        write(output, runs, header)
    print(as_markdown(runs, header))


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)

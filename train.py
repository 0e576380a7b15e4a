"""Trains a language model.

    python train.py --config=configs/tiny.py --workdir=runs/tiny

Any field of the config can be given as a flag, such as `--config.num_steps=1000`. On SIGTERM the run is saved and ends
with exit code 0; the same command line goes on where a run stopped, however it did.

    python train.py --config=configs/1_3b.py --config.mesh.fsdp=8 --compile_only --topology=v5e:2x4

compiles the step for devices that are not there, and says what it needs.
"""

from absl import app, flags
from etils import epath
from ml_collections import config_flags
from rich.console import Console

from interdomain_jax import cli
from interdomain_jax.preemption import Notice
from interdomain_jax.training import loop
from interdomain_jax.training.compile_only import compile_only
from interdomain_jax.training.step_report import print_report

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, path.py[:mixers].")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run, local or gs://; created if missing.")
_PROFILE_FROM = flags.DEFINE_integer(
    "profile_from", 0, "First step that the profiler captures; 0 for none.", lower_bound=0
)
_PROFILE_STEPS = flags.DEFINE_integer("profile_steps", 3, "Steps that the profiler captures.", lower_bound=1)
_COMPILE_ONLY = flags.DEFINE_bool("compile_only", False, "Compiles the step for --topology, reports on it, and ends.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "Devices to compile for: 'v5e:16x16', 'v5p:4x4x4', 'h100:8'.")
_NUM_SLICES = flags.DEFINE_integer("num_slices", 1, "TPU slices of that topology.")
flags.mark_flag_as_required("config")


def main(_: list[str]) -> None:
    if _COMPILE_ONLY.value:
        with cli.exit_on_bad_input():
            if _TOPOLOGY.value is None:
                raise ValueError("--compile_only needs --topology, such as --topology=v5e:16x16")
            print_report(compile_only(_CONFIG.value, _TOPOLOGY.value, _NUM_SLICES.value), Console())
        return
    notice = Notice()
    notice.listen()
    with cli.end_of_run(notice):
        with cli.exit_on_bad_input(), notice.interrupts():
            if _WORKDIR.value is None:
                raise ValueError("--workdir is not given; it must name the directory of the run")
            cli.join_processes(epath.Path(_WORKDIR.value), notice)
            run = loop.prepare(_CONFIG.value, _WORKDIR.value)
        first = _PROFILE_FROM.value
        profiled_steps = range(first, first + _PROFILE_STEPS.value) if first else range(0)
        loop.train(run, notice=notice, profiled_steps=profiled_steps)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)

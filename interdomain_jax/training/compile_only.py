"""The exact training step of a config, compiled for devices that are not there."""

import re
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from interdomain_jax import sharding
from interdomain_jax.experiment import build_experiment, check_batch, check_fields
from interdomain_jax.hardware import chip
from interdomain_jax.model_flops import train_step_flops
from interdomain_jax.topologies import absent_devices, compiler_options
from interdomain_jax.training.optimizer import make_optimizer
from interdomain_jax.training.step import lower_train_step
from interdomain_jax.training.step_report import StepReport, step_report


class OutOfMemoryError(ValueError):
    """The compiler found no way to run the step within a device's memory."""


def compile_only(
    config: ConfigDict, topology: str, num_slices: int = 1, *, options: Mapping[str, Any] | None = None
) -> StepReport:
    """Compiles the step that `train.py` would run on a topology, and reports what it needs.

    Nothing is initialised, read or written. A step of the 1.3B model takes about a minute.

    Args:
        config: of the experiment; `config.mesh` lays out the devices.
        topology: as `topologies.absent_devices` reads it.
        num_slices: as many TPU slices of that topology.
        options: more options for the compiler: {"exec_time_optimization_effort": -1.0} makes it several times as fast,
            and a program that fuses less.

    Raises:
        ValueError: a field is out of range, or the topology is not one.
        OutOfMemoryError: the step does not fit the devices' memory.
    """
    check_fields(config)
    devices = absent_devices(topology, num_slices)
    kind = chip(devices[0].device_kind)
    assert kind is not None, f"{devices[0].device_kind} has no figures in hardware.py"
    model = build_experiment(config).model
    optimizer = make_optimizer(num_steps=config.num_steps, **config.optimizer)
    mesh = sharding.make_mesh(config.mesh, devices)
    check_batch(config, mesh)
    lowered = lower_train_step(config, model, optimizer, mesh)
    context_length = config.data.sequence_length
    tokens = config.data.batch_size * context_length
    return step_report(
        _compile(lowered, devices[0], topology, options or {}),
        mesh=mesh,
        chip=kind,
        tokens=tokens,
        # The chunk size that is counted is that of the mesh's devices.
        model_flops=sharding.on_mesh(train_step_flops, mesh)(model, tokens=tokens, context_length=context_length),
    )


def _compile(
    lowered: jax.stages.Lowered, device: jax.Device, topology: str, options: Mapping[str, Any]
) -> jax.stages.Compiled:
    try:
        return lowered.compile(compiler_options={**compiler_options(device), **options})
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message:
            raise
        # "Used 20.15G of 15.75G hbm", or "HLO temporaries (21.91G) exceeds available HBM (15.75G)".
        figures = re.search(r"([\d.]+[KMGT])\)? (?:of|exceeds available HBM) \(?([\d.]+[KMGT])", message)
        needed = f": it needs {figures[1]}iB of {figures[2]}iB" if figures else ""
        raise OutOfMemoryError(
            f"the step does not fit a device of {topology}{needed}; a larger accumulation_steps or mesh needs less"
        ) from error

"""The published models, each on topologies that it might be trained on."""

import importlib
from collections.abc import Mapping
from typing import NamedTuple

from ml_collections import ConfigDict

from interdomain_jax.sharding import AXES


class Row(NamedTuple):
    """A model on a topology.

    Attributes:
        config: a file of `configs/`.
        topology: as `topologies.absent_devices` reads it.
        mesh: sizes of the mesh's axes, others 1.
        accumulation_steps: micro-batches in a step.
        num_slices: as many TPU slices.
        sequence_length: context, instead of the config's.
        batch_size: sequences in a step, instead of the config's.
        implementation: of the mixer, instead of the config's.
    """

    config: str
    topology: str
    mesh: Mapping[str, int]
    accumulation_steps: int = 1
    num_slices: int = 1
    sequence_length: int | None = None
    batch_size: int | None = None
    implementation: str | None = None

    @property
    def name(self) -> str:
        """What `--rows` chooses by."""
        slices = f"{self.num_slices} x " if self.num_slices > 1 else ""
        context = f" {self.sequence_length:,}" if self.sequence_length else ""
        kernels = f" {self.implementation}" if self.implementation else ""
        return f"{self.config} {slices}{self.topology}{context}{kernels}"


# A batch of 128 sequences is spread over 128 devices at most; with more, a sequence is cut too. Sixteen parts of the
# parameters fit every chip, and pieces much smaller than a tile are sent padded or as a sum.
ROWS = (
    Row("125m", "v5e:2x2", {"fsdp": 4}, accumulation_steps=4),
    Row("125m", "v5e:2x2", {"fsdp": 4}, accumulation_steps=4, implementation="pallas_tpu"),
    Row("350m", "v5e:4x4", {"fsdp": 16}, accumulation_steps=2),
    Row("760m", "v5e:8x8", {"data": 4, "fsdp": 16}),
    Row("1_3b", "v5e:16x16", {"data": 8, "fsdp": 16, "seq": 2}),
    Row("1_3b", "v5e:16x16", {"data": 8, "fsdp": 16, "seq": 2}, implementation="pallas_tpu"),
    Row("1_3b", "v4:4x4x4", {"data": 4, "fsdp": 16}),
    Row("1_3b", "v5p:4x4x4", {"data": 4, "fsdp": 16}),
    Row("1_3b", "v5p:4x4x4", {"data": 4, "fsdp": 16}, implementation="pallas_tpu"),
    Row("1_3b", "v6e:8x8", {"data": 4, "fsdp": 16}),
    Row("1_3b", "v5e:16x16", {"data": 8, "fsdp": 16, "seq": 4}, num_slices=2),
    Row("1_3b", "v5p:4x4x4", {"seq": 64}, sequence_length=2**20, batch_size=1),
    Row("1_3b", "v5p:4x4x4", {"seq": 64}, sequence_length=2**20, batch_size=1, implementation="pallas_tpu"),
    Row("125m", "h100:8", {"fsdp": 8}, accumulation_steps=2),
    Row("1_3b", "h100:8", {"fsdp": 8}, accumulation_steps=4),
)


def config_of(row: Row) -> ConfigDict:
    """The row's config, as its flags would make it."""
    config = importlib.import_module(f"configs.{row.config}").get_config()
    config.mesh = {axis: row.mesh.get(axis, 1) for axis in AXES}
    config.accumulation_steps = row.accumulation_steps
    config.model.implementation = row.implementation
    config.data.sequence_length = row.sequence_length or config.data.sequence_length
    config.data.batch_size = row.batch_size or config.data.batch_size
    return config

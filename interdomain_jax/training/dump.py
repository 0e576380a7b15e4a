"""What is needed to do a step once more: the state before it, its batch, and where that came from."""

from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from interdomain_jax import checkpoints as storage
from interdomain_jax import workdir as workdirs
from interdomain_jax.data.loader import Batch
from interdomain_jax.training import checkpoints as checkpointing
from interdomain_jax.training.state import TrainState

DIRECTORY = "nonfinite"


def dump_step(
    workdir: epath.Path, config: ConfigDict, state: TrainState, batch: Batch, rows: list[int], position: Any
) -> epath.Path:
    """Writes `<workdir>/nonfinite/<step>`, a workdir of its own, and returns it; every process calls it.

    Args:
        workdir: of the run.
        config: of the run.
        state: after a step that was skipped, and so with the parameters from before it.
        batch: this process's rows of it.
        rows: their numbers in the global batch.
        position: of the data, after the batch.
    """
    dump = workdir / DIRECTORY / str(int(state.step))
    dump.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        workdirs.save_config(dump, config)
    with (dump / f"batch_{jax.process_index()}.npz").open("wb") as file:
        arrays: dict[str, Any] = {"rows": rows, **batch}
        np.savez(file, **arrays)
    with storage.open_checkpoints(dump) as checkpoints:
        if int(state.step) not in checkpoints.all_steps():
            checkpointing.save(checkpoints, state, position, config)
    return dump


def load_batch(dump: epath.Path) -> Batch:
    """The global batch of a dump, from the parts that its processes wrote.

    Raises:
        ValueError: a part is missing.
    """
    parts = []
    for path in sorted(dump.glob("batch_*.npz")):
        with path.open("rb") as file:
            parts.append(dict(np.load(file)))
    # Processes whose devices hold the same rows have written the same.
    rows, first = np.unique(np.concatenate([part.pop("rows") for part in parts]), return_index=True)
    if len(rows) != rows[-1] + 1:
        raise ValueError(
            f"{dump} holds rows {rows.tolist()} of the batch; there must be a batch_<n>.npz of each process"
        )
    return {name: np.concatenate([part[name] for part in parts])[first] for name in parts[0]}

"""Which code this is."""

import functools
import importlib.metadata
import subprocess
from pathlib import Path

__version__ = "0.1.0"


@functools.cache
def code_version() -> dict[str, str | None]:
    """The versions of this package and of those that results depend on, and the commit if this is a git checkout.

    A commit with changes that are not committed ends in "-dirty".
    """
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"interdomain_jax": __version__, "commit": _commit(), **versions}


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None

"""What the tests of evaluation share."""

import jax
import pytest


@pytest.fixture(scope="module")
def quick_programs():
    """Programs here are compiled fast and run slower: most of the time is compiling."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)

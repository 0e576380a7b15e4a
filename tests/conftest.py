"""Settings that every test runs under."""

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs are small, and both cores are taken: cut into pieces, to be compiled side by side, they take longer.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_parallel_codegen_split_count=1"

import hypothesis
import pytest

hypothesis.settings.register_profile("default", max_examples=15, deadline=None, derandomize=True)
hypothesis.settings.register_profile("thorough", max_examples=300, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes that tests start keep compiled programs: of many starts of a run only the first compiles."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """Sets the largest size of a file in bytes: what lies beyond cannot be written, as on a full disk; -1 for none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size < 0 else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

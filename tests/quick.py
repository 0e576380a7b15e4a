"""Programs that compile two to four times as fast and run slower, for tests of logic: most of their time is compiling.

Another code generator makes them, so what is to hold of the programs that users run is tested under plain `jax.jit`.
"""

import functools
import os
from collections.abc import Callable

import jax

UNOPTIMISED: dict[str, int | bool] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
EMITTERS = "xla_cpu_use_fusion_emitters"


@functools.cache
def compiler_options() -> dict[str, int | bool]:
    """For `jax.jit`. The older emitters of fusions are the faster ones to compile; jax 0.12 has them no more."""
    options = UNOPTIMISED | {EMITTERS: False}
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:
        return UNOPTIMISED
    return options


def quick_jit(function: Callable) -> Callable:
    """`jax.jit`, quick to compile."""
    return jax.jit(function, compiler_options=compiler_options())


def quick_environment(flags: str = "") -> dict[str, str]:
    """The environment of a process that compiles every program quickly, with further flags of XLA."""
    emitters = f"--{EMITTERS}=false" if EMITTERS in compiler_options() else ""
    return environment_with(f"{flags} {emitters}") | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def environment_with(flags: str) -> dict[str, str]:
    """The environment of this process with further flags of XLA."""
    return os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}

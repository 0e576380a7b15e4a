"""What the command-line mains share: flags, and bad input told in one sentence."""

import contextlib
import difflib
import functools
import itertools
import logging as python_logging
import os
import re
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from absl import flags, logging
from etils import epath
from ml_collections import ConfigDict, config_flags

from interdomain_jax.errors import RunError
from interdomain_jax.preemption import Notice, Preempted
from interdomain_jax.watchdog import Watchdog

_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Joins the processes of a TPU pod, a Slurm job or the coordinator below into one run."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator_address", None, "host:port of process 0, where the cluster does not tell; with the next two flags."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Processes in all.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "The number of this process, from 0.")
_PEER_TIMEOUT = flags.DEFINE_integer(
    "peer_timeout",
    60,
    "Seconds of silence after which a process counts as dead and the others end; five times that to join and to leave.",
    lower_bound=1,
)


def join_processes(workdir: epath.Path, notice: Notice) -> None:
    """Joins the processes of the run, as the flags say; call it before anything asks JAX for devices.

    If one of them does not come in time, the process ends, and names it.

    Args:
        workdir: of the run, where processes tell of themselves.
        notice: ends the waiting.

    Raises:
        ValueError: flags that do not go together.
    """
    address, count, number = _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
    if address is None and count is None and number is None:
        if not _DISTRIBUTED.value:
            return
    elif address is None or count is None or number is None:
        raise ValueError("--coordinator_address, --num_processes and --process_id go together; give all three or none")
    elif not 0 <= number < count:
        raise ValueError(f"--process_id is {number}; it must be at least 0 and below --num_processes, {count}")
    # SIGTERM is ours: JAX's own service would take it, and tell only those that ask between two steps.
    jax.config.update("jax_enable_preemption_service", False)
    timeout = 5 * _PEER_TIMEOUT.value
    watchdog = Watchdog(
        workdir,
        limit=timeout,
        limit_name="five times --peer_timeout",
        # Before they have joined, the processes of a pod do not know their numbers.
        process=socket.gethostname() if number is None else str(number),
        processes=[] if count is None else [str(process) for process in range(count)],
    )
    with watchdog:
        watchdog.beat(0, "waiting for the other processes to join")
        join = functools.partial(
            jax.distributed.initialize,
            address,
            count,
            number,
            # JAX ends the process too, without a name; it is to come second.
            initialization_timeout=timeout + 60,
            heartbeat_timeout_seconds=_PEER_TIMEOUT.value,
            shutdown_timeout_seconds=timeout,
        )
        notice.wait_for(join)


@contextlib.contextmanager
def end_of_run(notice: Notice) -> Iterator[None]:
    """Ends the process as a run ends: with 0 if it was asked to, with 1 and one sentence where that says it all.

    Then threads that still compile or read, and processes that wait for this one, are not waited for.

    Raises:
        SystemExit: as it came, where this process is the only one.
    """
    try:
        yield
    except Preempted:
        # The others may be in the middle of anything; they are told by themselves, or end when they miss this one.
        logging.info("asked to stop before a first step: nothing is lost; the same command goes on")
        _leave(0)
    except SystemExit as end:
        if not jax.distributed.is_initialized():
            raise
        print(end.code, file=sys.stderr)
        _leave(1)
    except RunError as error:
        print(f"{_program(sys.argv)}: {error}", file=sys.stderr)
        _leave(1)
    # A fault of the program keeps its traceback; at its exit JAX would wait for processes that wait for this one.
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        _leave(1)
    if jax.distributed.is_initialized():
        # All come here, and none goes before the others are done with it.
        jax.distributed.shutdown()
    if notice.is_given:
        _leave(0)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses the command line; give it to `absl.app.run(main, flags_parser=parse_flags)`.

    A flag that cannot be parsed, a config file that does not exist and an override of a field that
    the config does not have end the program with one sentence on stderr. An error raised by the
    config file's own code is a programming error and keeps its traceback.

    Returns:
        The arguments left after parsing, the program's name first.
    """
    program = _program(argv)
    try:
        _check_overrides(argv)
        remaining = flags.FLAGS(list(argv))
    except (flags.Error, _BadFlagError) as error:
        sys.exit(f"{program}: {error}")
    if len(remaining) > 1:
        sys.exit(f"{program}: unexpected argument {remaining[1]!r}; every option is a --flag=value")
    hush_libraries()
    return remaining


@contextlib.contextmanager
def exit_on_bad_input() -> Iterator[None]:
    """Turns what validation raises into a one-line message and exit code 1.

    Wrap only the validation that precedes a run: an exception from the run itself is a fault of the
    program, and its traceback is wanted.
    """
    try:
        yield
    except (ValueError, FileNotFoundError, RunError) as error:
        sys.exit(f"{_program(sys.argv)}: {' '.join(str(error).split())}")


def as_integers(flag: flags.FlagHolder[list[str] | None]) -> list[int] | None:
    """The values of a list flag as whole numbers, None if it is not given.

    Raises:
        ValueError: one of them is none.
    """
    if flag.value is None:
        return None
    try:
        return [int(value) for value in flag.value]
    except ValueError:
        raise ValueError(
            f"--{flag.name} is {','.join(flag.value)!r}; it must be whole numbers, separated by commas"
        ) from None


def _program(argv: Sequence[str]) -> str:
    """The name by which the user knows the program; a package that is run has it from its directory."""
    path = Path(argv[0])
    return path.parent.name if path.name == "__main__.py" else path.name


class _BadFlagError(Exception):
    """A --config flag that names a missing file or an unknown field."""


def _check_overrides(argv: Sequence[str]) -> None:
    """Checks `--config=path[:argument]` and each `--config.field=value` before absl sees them.

    Raises:
        _BadFlagError: one of them names what is not there.
    """
    specified = _value_of("config", argv)
    if specified is None:
        return
    path, *argument = specified.split(":", 1)
    if not Path(path).is_file():
        raise _BadFlagError(f"--config={path} names no file; configs/tiny.py is one to start from")
    # The config as its file gives it: parsed apart, and without the overrides on sys.argv.
    apart = flags.FlagValues()
    config = config_flags.DEFINE_config_file("config", ":".join([path, *argument]), flag_values=apart, sys_argv=[])
    apart.mark_as_parsed()
    for argument_given in argv[1:]:
        if override := re.match(r"--?(?:no)?config\.([\w.]+)", argument_given):
            _check_field(config.value, override[1])


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    """The value of `--flag=value` or `--flag value` on the command line, None where it is absent."""
    for given, following in itertools.zip_longest(argv[1:], argv[2:]):
        name, equals, value = given.partition("=")
        if name in (f"-{flag}", f"--{flag}"):
            return value if equals else following
    return None


def _check_field(config: ConfigDict, override: str) -> None:
    names = override.split(".")
    node = config
    for depth, name in enumerate(names):
        known = sorted(node) if isinstance(node, ConfigDict) else []
        if name not in known:
            parent = ".".join(["config", *names[:depth]])
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {parent}.{close[0]}?" if close else f"known: {', '.join(known)}"
            raise _BadFlagError(f"--config.{override}: {parent} has no field {name!r}; {hint}")
        node = node[name]


def hush_libraries() -> None:
    """Keeps the log to this package's own lines and everybody's warnings."""

    def is_shown(record: python_logging.LogRecord) -> bool:
        if record.name == "asyncio":
            # For each array of a damaged checkpoint, one that nobody waits for once the first cannot be read.
            return False
        return record.levelno >= python_logging.WARNING or Path(__file__).parent in Path(record.pathname).parents

    # On the handler, not a logger: JAX logs through loggers of its own, which reach the same handler.
    logging.get_absl_handler().addFilter(is_shown)

"""The notice that a machine will be taken away: SIGTERM, heard at any moment, and agreed on by all processes.

A single process may leave whatever it waits for at once. Of several, each must run the same programs in the same order;
so each gives its wish to a program that all of them run beside every step, and reads the strongest one back.
"""

import contextlib
import enum
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from interdomain_jax import sharding

Result = TypeVar("Result")


class Wish(enum.IntEnum):
    """What a process wants to happen after the step at hand; the stronger are larger."""

    GO_ON = 0
    SAVE = 1
    STOP = 2


class Preempted(BaseException):
    """The process is to end; no error, so that no `except Exception` on the way holds it up."""


class Notice:
    """Whether the process has been asked to end. Nothing asks before `listen`."""

    def __init__(self) -> None:
        self.is_given = False
        self._interrupts = False

    @property
    def wish(self) -> Wish:
        """To stop once the notice is given, to go on before."""
        return Wish.STOP if self.is_given else Wish.GO_ON

    def listen(self) -> None:
        """Takes SIGTERM for the notice from now on; for the main thread of a program."""
        signal.signal(signal.SIGTERM, self._hear)

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """Lets the notice interrupt; only around what may be left half done.

        Raises:
            Preempted: the notice comes, or has come.
        """
        self._interrupts = True
        try:
            if self.is_given:
                raise Preempted
            yield
        finally:
            self._interrupts = False

    def wait_for(self, function: Callable[[], Result]) -> Result:
        """Runs the function in a thread of its own and waits for it, for no longer than until the notice comes.

        A compilation, for one, never returns to the interpreter, so that nothing could interrupt it where it is.
        """
        outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcome.put((function(), None))
            # Whatever it is, it is raised in the thread that waits.
            except BaseException as error:
                outcome.put((None, error))

        with self.interrupts():
            threading.Thread(target=run, daemon=True).start()
            result, error = outcome.get()
        if error is not None:
            raise error
        return result

    def _hear(self, _: int, __: FrameType | None) -> None:
        self.is_given = True
        if self._interrupts:
            self._interrupts = False
            raise Preempted


class Agreement:
    """The strongest of the wishes of all processes.

    Args:
        mesh: the devices of the run.
    """

    def __init__(self, mesh: Mesh):
        one_for_each_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._wishes = {}
        for wish in Wish:
            copies = np.full(mesh.size, wish, np.int32)
            self._wishes[wish] = jax.make_array_from_callback(copies.shape, one_for_each_device, copies.__getitem__)
        self._strongest = jax.jit(jnp.max, out_shardings=sharding.replicated(mesh))

    def ask(self, wish: Wish) -> jax.Array:
        """Gives this process's wish; returns, without waiting, the number of the strongest on the device."""
        return self._strongest(self._wishes[wish])

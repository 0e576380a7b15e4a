"""What may end a run that is not a fault of the program."""


class RunError(Exception):
    """The run cannot go on; the message is a sentence for the person who started it."""


class CheckpointError(RunError):
    """A checkpoint could not be written or read; the message says which, where and why."""


class DamagedError(CheckpointError):
    """A checkpoint that cannot be read, or does not hold what was written."""


class MismatchError(CheckpointError):
    """A checkpoint of another model; the message names the arrays that differ."""


class TrainingError(RunError):
    """Training cannot go on in a useful way."""

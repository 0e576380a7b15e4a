"""The text of an optimised HLO module (`compiled.as_text()`), read into computations and their instructions."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")


class Array(NamedTuple):
    """An array of one device.

    Attributes:
        dtype: as HLO spells it, "bf16".
        shape: its sizes.
        bytes: that it takes, padding of its layout not counted.
        in_memory: whether it lies in the device's memory, not in a TPU core's own.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    in_memory: bool


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
        name: unique in its module.
        opcode: "dot", "fusion", "all-gather-start", ...
        results: its arrays, tuples flattened.
        operands: the names of the instructions it reads.
        argument: what stands in the parentheses, for `parameter(0)` and `constant(6)`.
        attributes: the rest of the line.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    argument: str
    attributes: str

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression in the attributes, or None."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    @property
    def callees(self) -> tuple[str, ...]:
        """The computations that run when it runs, once each, conditions and reducers left out."""
        if self.opcode == "while":
            return _named(self.attributes, "body")
        if self.opcode == "conditional":
            branches = self.attribute(r"branch_computations=\{([^}]*)\}")
            return (
                tuple(_NAME.findall(branches)) if branches else _named(self.attributes, r"(?:true|false)_computation")
            )
        if self.opcode == "call":
            return _named(self.attributes, "to_apply")
        return _named(self.attributes, "calls")


class Computation(NamedTuple):
    """A function of the module: its instructions by name, in order, and the one whose value it returns."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that this one reads."""
        return [self.instructions[name] for name in instruction.operands]

    def users(self, name: str) -> list[Instruction]:
        """The instructions that read this one."""
        return [user for user in self.instructions.values() if name in user.operands]

    def parameter(self, index: int) -> Instruction:
        """Its parameter of this number."""
        return next(x for x in self.instructions.values() if x.opcode == "parameter" and x.argument == str(index))


class Module(NamedTuple):
    """A program of one device, and how many devices run it."""

    computations: Mapping[str, Computation]
    entry: Computation
    num_devices: int


def parse_module(text: str) -> Module:
    """Reads the text of a module.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = None
    name, is_entry, instructions, root = "", False, dict[str, Instruction](), ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, is_entry, instructions, root = header[1], line.startswith("ENTRY"), {}, ""
        elif line.startswith("}") and instructions:
            computations[name] = Computation(name, instructions, instructions[root or next(reversed(instructions))])
            entry = computations[name] if is_entry else entry
            instructions = {}
        elif name and (start := _INSTRUCTION.match(line)):
            instructions[start[2]] = _instruction(start[2], re.sub(r"/\*.*?\*/", "", line[start.end() :]))
            root = start[2] if start[1] else root
    if entry is None:
        raise ValueError("the text is not that of an HLO module: it has no ENTRY computation.")
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text[: text.index("\n")])
    return Module(computations, entry, math.prod(int(count) for count in counts))


def _instruction(name: str, line: str) -> Instruction:
    """Reads `type opcode(operands), attributes`; the type of a tuple is in parentheses."""
    end = _closing(line, 0) if line.startswith("(") else line.index(" ")
    opens = line.index("(", end)
    closes = _closing(line, opens)
    argument = line[opens + 1 : closes - 1]
    operands = tuple(_NAME.findall(argument))
    return Instruction(name, line[end:opens].strip(), arrays(line[:end]), operands, argument, line[closes:])


def _closing(line: str, start: int) -> int:
    """The place after the parenthesis that closes the one at `start`.

    Raises:
        ValueError: none does.
    """
    depth = 0
    for match in re.compile(r"[()]").finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"a parenthesis is not closed in {line[:80]!r}.")


def arrays(text: str) -> tuple[Array, ...]:
    """The arrays of a type, such as `(bf16[2,3]{1,0:T(8,128)S(1)}, s32[])`."""
    found = []
    for dtype, sizes, layout in _ARRAY.findall(text):
        shape = tuple(int(size) for size in re.findall(r"\d+", sizes))
        # S(n): a TPU core's vector memory, scalar memory, flags; 5 is the host's. Nothing said: the device's memory.
        space = re.search(r"S\((\d+)\)", layout)
        found.append(Array(dtype, shape, math.prod(shape) * _bits(dtype) // 8, space is None or space[1] == "0"))
    return tuple(found)


def _bits(dtype: str) -> int:
    """Of an element: `bf16` has 16, `f8e4m3fn` 8."""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)
    # A complex number is named by the bits of both its parts.
    return int(digits[0]) if digits else 0


def _named(attributes: str, attribute: str) -> tuple[str, ...]:
    return tuple(re.findall(rf"\b{attribute}=%?([\w.\-]+)", attributes))

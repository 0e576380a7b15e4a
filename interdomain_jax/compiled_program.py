"""What a compiled program costs: flops, memory traffic and communication of one device in one run.

XLA's own cost analysis counts the body of a loop once, and layers are a loop. Here every computation counts as often as
it runs. `compiled.as_text()` is the program of one device, after partitioning and fusion, in the order that it runs.
"""

import json
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np

from interdomain_jax.hlo_text import Array, Computation, Instruction, Module, parse_module
from interdomain_jax.loop_trips import trip_count

CollectiveKind = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "send"]
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)

# They compute nothing and move nothing: what they name, others have written.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "after-all"),
    *("optimization-barrier", "send", "recv", "partition-id", "replica-id", "domain", "add-dependency"),
}
_FREE_CALLS = {"AllocateBuffer", "ConcatBitcast", "Sharding"}


class Collective(NamedTuple):
    """One collective operation of the program.

    Attributes:
        kind: what it does; a "send" goes to another slice, over the data centre's network instead of the chips' links.
        bytes: that one device sends each time, in a ring: of n devices, all-gather sends its result and
            reduce-scatter and all-to-all their operand times (n - 1) / n, all-reduce twice that, permute and send
            their operand.
        trips: how often it runs.
        op_name: where in the model it is, by name scopes. Where compilers join several, or make one of their own, the
            scope of what it reads or of what reads it, one of them; "" where there is no trace.
        group_size: n, the devices that take part together; of a send, 2.
    """

    kind: CollectiveKind
    bytes: int
    trips: int
    op_name: str
    group_size: int


class CollectiveCosts(NamedTuple):
    """How many collectives of a kind run, and the bytes that one device sends for them all."""

    runs: int
    bytes: int


class ProgramCosts(NamedTuple):
    """What one device does in one run of the program.

    Attributes:
        flops: additions and multiplications of its matrix products and convolutions, and those that a TPU kernel
            declares; a GPU kernel's are not in the program's text.
        bytes_accessed: read from and written to the device's memory: operands and results of every instruction, of
            a fusion as a whole; of a slice, or an update in place, the slice.
        every_collective: the collectives among two devices or more, in no particular order.
        loops_of_unknown_length: loops counted as one turn.
    """

    flops: int
    bytes_accessed: int
    every_collective: tuple[Collective, ...]
    loops_of_unknown_length: int

    @property
    def collectives(self) -> dict[CollectiveKind, CollectiveCosts]:
        """The collectives summed by kind, those that the program has."""
        summed = {}
        for kind in COLLECTIVE_KINDS:
            chosen = [collective for collective in self.every_collective if collective.kind == kind]
            if chosen:
                sent = sum(collective.trips * collective.bytes for collective in chosen)
                summed[kind] = CollectiveCosts(sum(collective.trips for collective in chosen), sent)
        return summed


def program_costs(hlo_text: str) -> ProgramCosts:
    """Counts what one device does in one run of an optimised, partitioned program.

    Args:
        hlo_text: `compiled.as_text()`.
    """
    module = parse_module(hlo_text)
    costs = _computation_costs(module, module.entry, 1)
    return costs._replace(bytes_accessed=int(costs.bytes_accessed))


def _computation_costs(module: Module, computation: Computation, trips: int) -> ProgramCosts:
    """The costs of a computation that runs `trips` times and is no fusion."""
    flops = moved = unknown = 0
    collectives: list[Collective] = []
    for instruction in computation.instructions.values():
        flops += trips * _flops(module, computation, instruction)
        moved += trips * _bytes(module, computation, instruction)
        if instruction.opcode == "fusion" or instruction.opcode.endswith("-done"):
            continue
        turns: int | None = 1
        if instruction.opcode == "while":
            turns = trip_count(module, computation, instruction)
            unknown += turns is None
        parts = [
            _computation_costs(module, module.computations[name], trips * (1 if turns is None else turns))
            for name in instruction.callees
        ]
        if instruction.opcode == "conditional":
            # Which branch runs is not known before: the costliest.
            parts = [max(parts, key=lambda part: (part.flops, part.bytes_accessed))]
        for part in parts:
            flops += part.flops
            moved += part.bytes_accessed
            collectives += part.every_collective
            unknown += part.loops_of_unknown_length
    collectives += _collectives(module, computation, trips)
    return ProgramCosts(flops, moved, tuple(collectives), unknown)


def _fused(module: Module, fusion: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    """Every instruction inside a fusion, and inside the fusions in it."""
    for name in fusion.callees:
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            yield computation, instruction
            yield from _fused(module, instruction)


def _flops(module: Module, computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode == "fusion":
        return sum(_flops(module, *inner) for inner in _fused(module, instruction) if inner[1].opcode != "fusion")
    if instruction.opcode == "dot":
        axes = re.findall(r"\d+", instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or "")
        return _product_flops(computation, instruction, [int(axis) for axis in axes])
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    if instruction.opcode == "custom-call":
        # A Pallas kernel for TPU says what it does; a call of cuBLAS, which axes it sums over.
        if declared := instruction.attribute(r'"cost_estimate":\{"flops":"(\d+)"'):
            return int(declared)
        if summed := instruction.attribute(r'"lhs_contracting_dimensions":(\[[^\]]*\])'):
            return _product_flops(computation, instruction, [int(axis) for axis in json.loads(summed)])
    return 0


def _product_flops(computation: Computation, product: Instruction, axes: list[int]) -> int:
    left = computation.operands(product)[0].results[0]
    return 2 * math.prod(product.results[0].shape) * math.prod(left.shape[axis] for axis in axes)


def _convolution_flops(computation: Computation, convolution: Instruction) -> int:
    """A TPU's matrix products are convolutions; a batch may be a spatial axis dilated so that few taps meet."""
    left, kernel = (operand.results[0].shape for operand in computation.operands(convolution)[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    assert labels is not None
    out = dict(zip(labels[3], convolution.results[0].shape, strict=True))
    left_sizes, kernel_sizes = dict(zip(labels[1], left, strict=True)), dict(zip(labels[2], kernel, strict=True))
    window = dict(re.findall(r"(\w+)=(\S+)", convolution.attribute(r"window=\{([^}]*)\}") or ""))
    spatial = sorted(label for label in labels[3] if label.isdigit())
    per_axis = {name: value.split("x") for name, value in window.items()}
    meetings = 1
    for place, label in enumerate(spatial):
        of = lambda name, default: per_axis[name][place] if name in per_axis else default  # noqa: B023
        meetings *= _meetings(
            left_sizes[label],
            kernel_sizes[label],
            out[label],
            stride=int(of("stride", "1")),
            padding=int(of("pad", "0_0").split("_")[0]),
            left_dilation=int(of("lhs_dilate", "1")),
            kernel_dilation=int(of("rhs_dilate", "1")),
        )
    batches = int(convolution.attribute(r"batch_group_count=(\d+)") or 1)
    return 2 * left_sizes["b"] // batches * out["f"] * kernel_sizes["i"] * meetings


@lru_cache
def _meetings(
    left: int, kernel: int, out: int, *, stride: int, padding: int, left_dilation: int, kernel_dilation: int
) -> int:
    """How often a tap of the kernel meets an entry that is there, over all places of the result."""
    if kernel == 1 and stride == left_dilation == 1 and padding == 0:
        return out
    place = np.arange(out) * stride - padding
    met = 0
    for tap in range(kernel):
        index = place + tap * kernel_dilation
        met += int(np.sum((index >= 0) & (index < left * left_dilation) & (index % left_dilation == 0)))
    return met


def _bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """What an instruction that is not inside a fusion reads from the device's memory and writes to it."""
    opcode, operands = instruction.opcode, computation.operands(instruction)
    results = _in_memory(instruction.results)
    if opcode in _FREE or opcode.endswith("-done") or opcode in ("async-start", "async-update"):
        return 0
    if opcode == "fusion":
        fused = module.computations[instruction.callees[0]]
        reads = [_read(module, fused, i, operand.results[0]) for i, operand in enumerate(operands)]
        return sum(reads) + _written(fused, instruction)
    if opcode == "custom-call" and instruction.attribute(r'custom_call_target="(\w+)"') in _FREE_CALLS:
        return 0
    if opcode in ("slice-start", "dynamic-slice-start"):
        # Its result names the whole operand, then the slice.
        piece = instruction.results[1]
        return piece.bytes * (operands[0].results[0].in_memory + piece.in_memory)
    if opcode.endswith("-start") and opcode != "all-reduce-start":
        return results
    if opcode in ("slice", "dynamic-slice", "gather"):
        rest = sum(_in_memory(operand.results) for operand in operands[1:])
        return results + rest + instruction.results[0].bytes * operands[0].results[0].in_memory
    if opcode == "dynamic-update-slice":
        return _in_memory(operands[1].results) + operands[1].results[0].bytes * instruction.results[0].in_memory
    return results + sum(_in_memory(operand.results) for operand in operands)


def _in_memory(arrays: tuple[Array, ...]) -> int:
    return sum(array.bytes for array in arrays if array.in_memory)


def _read(module: Module, fused: Computation, index: int, operand: Array) -> int:
    """What a fusion reads of its operand of this number: slices, where it takes nothing else."""
    return _needed(module, fused, fused.parameter(index)) if operand.in_memory else 0


def _needed(module: Module, fused: Computation, source: Instruction) -> int:
    """The bytes of an instruction's result that the fusion around it looks at."""
    needed, whole = 0, source.results[0].bytes
    for user in fused.users(source.name):
        place = user.operands.index(source.name)
        if user.opcode in ("dynamic-slice", "slice", "gather") and place == 0:
            share = math.prod(user.results[0].shape) / max(math.prod(source.results[0].shape), 1)
            needed += int(whole * share)
        elif user.opcode == "dynamic-update-slice" and place == 0:
            # Written in place: what it does not replace, it does not read.
            needed += 0
        elif user.opcode in ("bitcast", "convert", "copy", "reshape") and user.name != fused.root.name:
            share = whole / max(user.results[0].bytes, 1)
            needed += int(share * _needed(module, fused, user))
        elif user.opcode == "fusion":
            inner = module.computations[user.callees[0]]
            needed += _needed(module, inner, inner.parameter(place))
        else:
            return whole
    return min(needed, whole)


def _written(fused: Computation, fusion: Instruction) -> int:
    """What a fusion writes: of an array updated in place, the update."""
    values = fused.operands(fused.root) if fused.root.opcode == "tuple" else [fused.root]
    written = 0
    for value, result in zip(values, fusion.results, strict=False):
        share = 1.0
        while value.opcode in ("bitcast", "convert", "copy", "reshape"):
            value = fused.operands(value)[0]
        if value.opcode == "dynamic-update-slice":
            update = fused.operands(value)[1].results[0]
            share = math.prod(update.shape) / max(math.prod(value.results[0].shape), 1)
        written += int(share * result.bytes) * result.in_memory
    return written


def _collectives(module: Module, computation: Computation, trips: int) -> Iterator[Collective]:
    """The collectives of a computation and its fusions, not of what else it calls."""
    for instruction in computation.instructions.values():
        if kind := _kind(instruction):
            yield from _collective(module, computation, kind, instruction, trips, instruction, computation)
        if instruction.opcode != "fusion":
            continue
        for around, inner in _fused(module, instruction):
            kind = _kind(inner)
            # A TPU runs one collective under several fusions and repeats it in each; the first one starts it.
            if kind is None or inner.attribute(r'"async_collective_fusion_config":\{"flag_start":"(\d)'):
                continue
            # An all-reduce of which the fusion keeps a part: a TPU's reduce-scatter.
            if kind == "all-reduce" and _total(instruction.results) < _total(inner.results):
                kind = "reduce-scatter"
            yield from _collective(module, around, kind, inner, trips, instruction, computation)


def _kind(instruction: Instruction) -> CollectiveKind | None:
    name = instruction.opcode.removesuffix("-start")
    return name if name in COLLECTIVE_KINDS else None


def _total(arrays: tuple[Array, ...]) -> int:
    return sum(array.bytes for array in arrays)


def _collective(
    module: Module,
    computation: Computation,
    kind: CollectiveKind,
    instruction: Instruction,
    trips: int,
    outermost: Instruction,
    around: Computation,
) -> Iterator[Collective]:
    """The collective that an instruction is, unless no data leaves the device; `outermost` is it, or its fusion, in the
    computation `around`."""
    operand = sum(_total(source.results) for source in computation.operands(instruction))
    size = 2 if kind == "send" else group_size(instruction.attributes, module.num_devices)
    sent = {
        "all-gather": operand * (size - 1),
        "all-reduce": 2 * operand * (size - 1) // size,
        "reduce-scatter": operand * (size - 1) // size,
        "all-to-all": operand * (size - 1) // size,
        "collective-permute": operand,
        "send": operand,
    }[kind]
    if size > 1 and trips:
        yield Collective(kind, sent, trips, _op_name(computation, instruction) or _op_name(around, outermost), size)


def _op_name(computation: Computation, instruction: Instruction) -> str:
    """Where an instruction comes from, or what it reads, or what reads it: compilers name few that they made."""
    users = computation.users(instruction.name)
    users += [
        user
        for part in users
        if part.opcode in ("get-tuple-element", "bitcast")
        for user in computation.users(part.name)
    ]
    near = (instruction, *computation.operands(instruction), *users)
    return next((name for x in near if (name := x.attribute(r'op_name="([^"]*)"'))), "")


def group_size(attributes: str, num_devices: int) -> int:
    """How many devices a collective joins, from the attributes of its instruction.

    HLO writes the groups in full, `{{0,1},{2,3}}`; as an array that is reshaped, `[2,4]<=[8]`, whose rows they are; as
    axes of a mesh, `mesh['a'=4,'b'=2] {'a'}`; or as `{}`, all devices. A permutation has pairs of devices instead.

    Args:
        attributes: as the HLO text has them.
        num_devices: of the whole program.

    Raises:
        ValueError: the groups are written in another way.
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        return 1 + any(source != target for source, target in re.findall(r"(\d+),(\d+)", pairs[1]))
    if axes := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(.*?\)\))? \{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", axes[1]))
        # A part of an axis: 'a':(1)2 is two of its devices.
        chosen = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", axes[2])
        return math.prod(int(part or sizes[axis]) for axis, part in chosen)
    if rows := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(rows[1])
    if group := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(group[1].split(","))
    if "replica_groups={}" in attributes:
        return num_devices
    raise ValueError(f"the groups of a collective are not understood: {attributes[:200]!r}.")

"""How often a loop of a compiled program turns. The compilers for CPU and GPU write it down; a TPU's does not."""

from interdomain_jax.hlo_text import Computation, Instruction, Module


def trip_count(module: Module, around: Computation, loop: Instruction) -> int | None:
    """The turns of a `while` in the computation `around`, or None where they cannot be told before it runs.

    Without the compiler's word, a loop is understood that compares a counter with a constant and, each turn, adds a
    constant to it: what `jax.lax.scan` and `fori_loop` become.
    """
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}'):
        return int(known)
    condition_name, body_name = loop.attribute(r"condition=%?([\w.\-]+)"), loop.attribute(r"body=%?([\w.\-]+)")
    if condition_name is None or body_name is None:
        return None
    condition, body = module.computations[condition_name], module.computations[body_name]
    comparison, operands = _unfused(module, condition, condition.root)
    direction = comparison.attribute(r"direction=(\w\w)")
    if comparison.opcode != "compare" or direction not in ("LT", "LE", "GT", "GE", "NE"):
        return None
    left, right = operands
    if left.opcode == "constant":
        left, right = right, left
        direction = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}[direction]
    counter, limit = _element(left), _limit(around, loop, body, right)
    if counter is None or limit is None:
        return None
    start, step = _initial(around, loop, counter), _step(module, body, counter)
    if start is None or not step:
        return None
    limit += {"LE": 1, "GE": -1}.get(direction, 0)
    return max(0, -((start - limit) // step))


def _source(computation: Computation, instruction: Instruction) -> Instruction:
    """What an instruction copies."""
    while instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = computation.operands(instruction)[0]
    return instruction


def _unfused(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[Instruction, list[Instruction]]:
    """What an instruction computes, were it not in a fusion of its own, and what from, outside of the fusion."""
    instruction = _source(computation, instruction)
    operands = [_source(computation, operand) for operand in computation.operands(instruction)]
    if instruction.opcode == "fusion":
        fused = module.computations[instruction.callees[0]]
        instruction = _source(fused, fused.root)
        inner = [_source(fused, operand) for operand in fused.operands(instruction)]
        operands = [operands[int(x.argument)] if x.opcode == "parameter" else x for x in inner]
    return instruction, operands


def _element(instruction: Instruction) -> int | None:
    """The number of the loop's variable that an instruction is."""
    index = instruction.attribute(r"index=(\d+)")
    return int(index) if instruction.opcode == "get-tuple-element" and index is not None else None


def _constant(instruction: Instruction) -> int | None:
    is_number = instruction.opcode == "constant" and instruction.argument.lstrip("-").isdigit()
    return int(instruction.argument) if is_number else None


def _initial(around: Computation, loop: Instruction, variable: int) -> int | None:
    """The constant that a variable of the loop starts from."""
    start = _source(around, around.operands(loop)[0])
    if start.opcode != "tuple":
        return None
    return _constant(_source(around, around.operands(start)[variable]))


def _limit(around: Computation, loop: Instruction, body: Computation, instruction: Instruction) -> int | None:
    """The constant that the counter is compared with: in the condition, or handed on unchanged from turn to turn."""
    variable = _element(instruction)
    if variable is None:
        return _constant(instruction)
    handed_on = body.root.opcode == "tuple" and _element(_source(body, body.operands(body.root)[variable])) == variable
    return _initial(around, loop, variable) if handed_on else None


def _step(module: Module, body: Computation, variable: int) -> int | None:
    """What a turn adds to the counter."""
    if body.root.opcode != "tuple":
        return None
    update, operands = _unfused(module, body, body.operands(body.root)[variable])
    if update.opcode != "add" or variable not in [_element(operand) for operand in operands]:
        return None
    return next((step for operand in operands if (step := _constant(operand)) is not None), None)

"""Whether a line of the script can come again in the same call: then it lies inside a loop of the script's own.

`--epochs 5` means five passes in all. For one `batches` loop that is its length; where the script has a loop of its own
around it, it is the length of all its passes together. Which of the two holds is seen in the frames that lead to the
`batches` loop: an instruction lies in a loop if the bytecode leads from it back to itself. Loops of installed packages
do not count, such as that of a command-line library which calls the script's function.
"""

import dis
import sysconfig
from functools import lru_cache
from types import CodeType, FrameType

STOPS_AT = ("paceline", "runpy", "threading")  # modules that run scripts
INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "INTERPRETER_EXIT")
DRIVES = ("FOR_ITER", "SEND")  # a frame that waits here is itself looping over what leads to the batches


def is_in_loop(frame: FrameType | None) -> bool:
    """Return whether this frame's current line, or a call that led to it, lies inside a loop of the script."""
    own = None if frame is None else _package(frame)  # an installed package may be the script, too
    while frame is not None and _package(frame) not in STOPS_AT:
        counts = _package(frame) == own or not frame.f_code.co_filename.startswith(INSTALLED)
        if counts and comes_again(frame.f_code, frame.f_lasti):
            return True
        frame = frame.f_back
    return False


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).split(".")[0]


@lru_cache(maxsize=256)
def comes_again(code: CodeType, at: int) -> bool:
    """Return whether the instruction at this offset can be reached from itself.

    Where it drives an iteration (a `for` over a generator, a `yield from`), that iteration does not count: the question
    is whether it can begin a second time.
    """
    follows, waiting = _successors(code)
    here = max(offset for offset in follows if offset <= at)  # `at` may lie in the instruction's cache
    seen: set[int] = set()
    ahead = [waiting[here]] if here in waiting else [*follows[here]]
    while ahead:
        offset = ahead.pop()
        if offset == here:
            return True
        if offset not in seen:
            seen.add(offset)
            ahead += follows[offset]
    return False


def lies_in_for(code: CodeType, at: int) -> bool:
    """Return whether the instruction at this offset lies in the body of a `for` loop, even if it leaves it."""
    return any(each.opname == "FOR_ITER" and each.offset < at < each.argval for each in dis.get_instructions(code))


def _successors(code: CodeType) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Return the offsets that may follow each instruction, and where those of `DRIVES` go when they are exhausted."""
    instructions = list(dis.get_instructions(code))
    follows: dict[int, list[int]] = {}
    exhausted: dict[int, int] = {}
    jumps = {*dis.hasjrel, *dis.hasjabs}
    for number, instruction in enumerate(instructions):
        name, after = instruction.opname, follows.setdefault(instruction.offset, [])
        if instruction.opcode in jumps:
            after.append(instruction.argval)
        goes_on = name not in ENDS and not (name.startswith("JUMP_") and "_IF_" not in name)
        if goes_on and number + 1 < len(instructions):
            after.append(instructions[number + 1].offset)
        if name in DRIVES:
            exhausted[instruction.offset] = instruction.argval
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        for offset, after in follows.items():
            if entry.start <= offset < entry.end:
                after.append(entry.target)
    return follows, exhausted

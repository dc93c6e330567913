"""Python from what a `Recorder` has seen: the same calls of torch, and each launch with addresses. For `tape`.

    def replay(tensors, addresses, stream):      STALE, before anything is done, where a kernel is not what it was

Left out are the calls whose result nobody reads, views that only kernels read, and all but one allocation of the small buffers
that only kernels read. Each temporary is deleted after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dmst.kernels.fused import launch
from dmst.kernels.fused.recorder import Call, Described, Launch, Made, Recorder, Var, leaves

SMALL = 1 << 20  # bytes: torch cuts allocations of up to so many from one piece of twice that
STALE = object()  # what a tape returns that must not be played, before it has done anything

Replay = Callable[[Sequence[Tensor | None], Sequence[int], int], Any]


class Writer:
    """Python from what was recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self.inputs, self.steps = recorder.inputs, recorder.steps
        self.names: dict[str, Any] = {"STALE": STALE, "new": object.__new__, "launch": launch.launch}
        self.given = {x.name for x in self.inputs if x is not None}
        self.have_address = set(self.given)
        self.count = recorder.count
        self.within: dict[int, tuple[int, int]] = {}  # small allocations in the common one

    def write(self, result: Any) -> Replay:
        kept = self._shared(self._needed(result), result)
        last = {name: place for place, step in enumerate(kept) for name in self._reads(step)}
        forever = {x.name for x in leaves(self._flat(result)) if isinstance(x, Var)} | self.given
        lines = self._head()
        for place, step in enumerate(kept):
            lines += self._line(step)
            made = {x.name for x in leaves(step.result) if isinstance(x, Var)} if isinstance(step, Call) else set()
            done = sorted(name for name in made | self._reads(step) if last.get(name, place) == place and name not in forever)
            if done:
                lines.append("del " + ", ".join(f"v{name}" for name in done))
        lines.append(f"return {self._text(result)}")
        source = "def replay(tensors, addresses, stream):\n" + "".join(f"    {line}\n" for line in lines)
        exec(compile(source, "<tape>", "exec"), self.names)
        replay = self.names.pop("replay")
        replay.source = source
        return replay

    def _needed(self, result: Any) -> list[Call | Launch]:
        """Without what nobody reads."""
        wanted = {x.name for x in leaves(self._flat(result)) if isinstance(x, Var)}
        kept: list[Call | Launch] = []
        for step in reversed(self.steps):
            if isinstance(step, Call) and step.pure and not any(x.name in wanted for x in leaves(step.result)):
                continue
            wanted |= self._reads(step)
            kept.append(step)
        return kept[::-1]

    def _shared(self, steps: list[Call | Launch], result: Any) -> list[Call | Launch]:
        """With one allocation for all the small ones that only kernels read, as long as torch takes such from one piece."""
        seen = {x.name for x in leaves(self._flat(result)) if isinstance(x, Var)}
        for step in steps:
            seen |= self._reads(step) if isinstance(step, Call) or step.found is None else self._described(step)
        calls = [step for step in steps if isinstance(step, Call) and step.room is not None and step.result.name not in seen]
        rooms = sorted((step.room[0], step.result.name) for step in calls if step.room)
        total, places = 0, {}
        for size, name in rooms:
            size = -size // 512 * -512  # as torch's own allocator rounds, so that alignment is the same
            if total + size > SMALL:
                break
            places[name] = total
            total += size
        devices = {step.room[1] for step in calls if step.room}
        if len(places) < 2 or len(devices) > 1:
            return steps
        first = next(step for step in calls if step.result.name in places)
        options = {"dtype": torch.uint8, "device": devices.pop()}
        common = Call(torch.empty, (total,), options, Var(self.count, self.count, 0), True)
        self.within = {name: (self.count, offset) for name, offset in places.items()}
        out: list[Call | Launch] = []
        for step in steps:
            if step is first:
                out.append(common)
            elif not (isinstance(step, Call) and step.room is not None and step.result.name in places):
                out.append(step)
        return out

    def _described(self, step: Launch) -> set[int]:
        return {x.base.name for x in step.args if isinstance(x, Described)}

    def _root(self, x: Var) -> tuple[int, int]:
        """The tensor that must be there for an address, and how far it is."""
        root, offset = self.within.get(x.root, (x.root, 0))
        return root, offset + x.offset

    def _reads(self, step: Call | Launch) -> set[int]:
        """The tensors that must be there."""
        if isinstance(step, Call):
            return {x.name for x in leaves((step.args, step.kwargs)) if isinstance(x, Var)}
        given = [x for x in step.args if isinstance(x, Var)]
        return {x.name if step.found is None else self._root(x)[0] for x in given} | self._described(step)

    def _flat(self, value: Any) -> Any:
        """Without the wrappers around tensors."""
        if isinstance(value, Made):
            return tuple(map(self._flat, value.values))
        if isinstance(value, dict):
            return tuple(map(self._flat, value.values()))
        return tuple(map(self._flat, value)) if type(value) in (tuple, list) else value

    def _head(self) -> list[str]:
        """Unpack; and ask what the kernels have to do with: global variables, hooks of their own."""
        names = [f"v{place}" for place in range(len(self.inputs))]
        places = ["_" if x is None else f"v{x.name}" for x in self.inputs]
        assert len(names) == len(places)
        lines = [f"{', '.join(places)}, = tensors", f"{', '.join(p.replace('v', 'p') for p in places)}, = addresses"]
        launches = [step for step in self.steps if isinstance(step, Launch) and step.found is not None]
        same = {(id(names), name): (names, name, value) for step in launches for names, name, value in (step.found or ())[5]}
        asked = [f"{self._name(names)}.get({name!r}) is not {self._name(value)}" for names, name, value in same.values()]
        for kernel in {id(step.kernel): step.kernel for step in launches}.values():
            asked += [f"{self._name(kernel)}.debug", f"{self._name(kernel)}.pre_run_hooks"]
        return [*lines, f"if {' or '.join(asked)}:", "    return STALE"] if asked else lines

    def _line(self, step: Call | Launch) -> list[str]:
        if isinstance(step, Call):
            args = [self._text(x) for x in step.args] + [f"{name}={self._text(x)}" for name, x in step.kwargs.items()]
            made = self._target(step.result)
            return [f"{made}{self._name(step.function)}({', '.join(args)})"]
        if step.found is None:
            args = [self._name(step.kernel), self._name(step.cut), *map(self._text, step.args)]
            return [f"launch({', '.join(args)})"]
        _, run, function, metadata, rest, _, _ = step.found
        lines: list[str] = []
        for root in sorted({self._root(x)[0] for x in step.args if isinstance(x, Var)} - self.have_address):
            lines.append(f"p{root} = v{root}.data_ptr()")
            self.have_address.add(root)
        args = [*(str(size) for size in (*step.cut.grid, 1, 1)[:3]), "stream", self._name(function), self._name(metadata)]
        args += ["None"] * 3
        args += [self._address(x) if isinstance(x, Var) else self._text(x) for x in step.args] + list(map(self._text, rest))
        straight = launch.straight(run, len(args) - 9)
        if straight is not None:
            run, given = straight
            args = [self._passed(x, args) for x in given]
        return [*lines, f"{self._name(run)}({', '.join(args)})"]

    def _passed(self, value: Any, args: list[str]) -> str:
        """What the launcher passes on, in the words for what it is given."""
        if type(value) is launch.Given:
            return args[value.place]
        if type(value) is tuple and any(type(x) is launch.Given for x in value):
            return "(" + "".join(f"{self._passed(x, args)}, " for x in value) + ")"
        return "None" if value is None else self._name(value)

    def _address(self, x: Var) -> str:
        root, offset = self._root(x)
        return f"p{root} + {offset}" if offset else f"p{root}"

    def _target(self, result: Any) -> str:
        if isinstance(result, Var):
            return f"v{result.name} = "
        if isinstance(result, tuple) and result and all(isinstance(x, Var) for x in result):
            return ", ".join(f"v{x.name}" for x in result) + ", = "
        return ""

    def _text(self, value: Any) -> str:
        if isinstance(value, Var):
            return f"v{value.name}"
        if isinstance(value, Made):
            return f"{self._name(value.kind)}({', '.join(map(self._text, value.values))})"
        if isinstance(value, Described):
            return f"{self._name(_described)}({self._name(value.kind)}, {self._name(value.state)}, {self._text(value.base)})"
        if type(value) is dict:
            return "{" + ", ".join(f"{name!r}: {self._text(x)}" for name, x in value.items()) + "}"
        if type(value) in (tuple, list):
            inner = ", ".join(map(self._text, value))
            return f"[{inner}]" if type(value) is list else f"({inner},)" if value else "()"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self._name(value)

    def _name(self, value: Any) -> str:
        """Of an object that the source cannot spell."""
        name = f"c{id(value)}"
        self.names[name] = value
        return name


def _described(kind: type, state: dict[str, Any], base: Tensor) -> Any:
    made: Any = object.__new__(kind)
    made.__dict__.update(state)
    made.base = base
    return made

"""A file that is not whole is refused, with an error of this package that says why; what loads is right to the bit.

Two victims, both real: a checkpoint of a run (RunFolder.load, newest) and a saved DMST (dmst.load_model). Each is damaged in
one way in a folder of its own, and loaded. Damage must always be refused. What a person made, with the hashes made right
again, is refused or brings exactly the tensors that a second, strict reader finds in it; without another exception, in less
than 2 s of processor time, with little memory, and without opening what lies outside. No pickle is ever run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import random
import resource
import shutil
import socket
import stat
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from dmst.engine.checkpoint import RunFolder, State, load
from dmst.errors import BadFileError, DmstError
from dmst.models import load_model, save_model
from soak.case import Case
from tests.engine.test_checkpoint import same, state
from tests.forged import CONFIG, MANIFEST, WEIGHTS, forge, grown, header_length, listed, pickled, put
from tests.models.test_model_files import foreign, tiny

TITLE = "Checkpoints and saved models: damaged, hostile or foreign ones are refused"
FLIPS, SMALL_FLIPS, FALLBACKS, LIMIT = 2500, 300, 200, 30.0
STEPS = (2, 5, 9)  # of the run
SECONDS, GROWTH, ROOM = 2.0, 64 * 2**20, 2**29  # of processor time; bytes of memory in use; bytes of it asked for
DTYPES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
Check = Callable[[Path], "dict[str, Any] | None"]


class Victim(NamedTuple):
    name: str
    at: Callable[[Path], Path]  # its folder, inside that of a case
    load: Callable[[Path], dict[str, Tensor]]  # the folder of a case -> tensors, by "file:name"
    stated: Callable[[Path], Tensors]  # the same by the second reader
    files: dict[str, bytes]
    other: dict[str, bytes]  # of another one, whole too

    def put(self, folder: Path) -> Path:
        place = self.at(folder)
        place.mkdir(parents=True)
        for name, raw in self.files.items():
            (place / name).write_bytes(raw)
        return place


def checkpoint_at(folder: Path) -> Path:
    return folder / f"run/checkpoints/step_{STEPS[-1]:08d}"


def saved_at(folder: Path) -> Path:
    return folder / "saved"


def load_checkpoint(folder: Path) -> dict[str, Tensor]:
    found = load(checkpoint_at(folder), STEPS[-1])
    assert found.step == STEPS[-1], f"step {found.step} was asked for as {STEPS[-1]}"
    return {f"{stem}:{name}": x for stem, xs in found.tensors.items() for name, x in xs.items()}


def load_saved(folder: Path) -> dict[str, Tensor]:
    return {f"model:{name}": x for name, x in load_model(saved_at(folder)).state_dict().items()}


# --- the second reader -----------------------------------------------------------------------------------------------

WIDTHS = {name: torch.empty((), dtype=dtype).element_size() for dtype, name in DTYPES.items()}


def of_tensors(name: str) -> bool:
    return name.endswith(".safetensors")


def second_reading(stem: str, raw: bytes) -> Tensors:
    """What a safetensors file holds, if its tensors cover its data without a hole or an overlap."""
    start = 8 + int.from_bytes(raw[:8], "little")
    told, data, end, found = json.loads(raw[8:start]), raw[start:], 0, {}
    told.pop("__metadata__", None)
    for name, x in sorted(told.items(), key=lambda item: item[1]["data_offsets"]):
        (a, b), shape = x["data_offsets"], tuple(x["shape"])
        assert a == end and b - a == math.prod(shape) * WIDTHS[x["dtype"]], f"{name} has the place {a} to {b} after {end}"
        end, found[f"{stem}:{name}"] = b, (x["dtype"], shape, data[a:b])
    assert end == len(data), f"{end} of {len(data)} bytes are of a tensor"
    return found


def second_of_checkpoint(folder: Path) -> Tensors:
    """Of what the manifest lists, whose hashes must be right."""
    place, found = checkpoint_at(folder), {}
    for name, told in json.loads((place / MANIFEST).read_bytes())["files"].items():
        raw = (place / name).read_bytes()
        assert told["sha256"] == hashlib.sha256(raw).hexdigest(), f"{name} was loaded under a wrong hash"
        if of_tensors(name):
            found |= second_reading(name.removesuffix(".safetensors"), raw)
    return found


def second_of_saved(folder: Path) -> Tensors:
    return second_reading("model", (saved_at(folder) / WEIGHTS).read_bytes())


def raw_of(tensors: dict[str, Tensor]) -> Tensors:
    return {
        name: (DTYPES[x.dtype], tuple(x.shape), x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, x in tensors.items()
    }


# --- what must come of a load ----------------------------------------------------------------------------------------

OPENED: list[str] = []


def listen(event: str, args: tuple) -> None:
    if event == "open" and isinstance(args[0], str | bytes):
        OPENED.append(os.fsdecode(args[0]))


def attempt(load: Callable[[Path], Any], folder: Path) -> Any:
    """What comes of it, an error of this package included; any other one goes through, and fails the case.

    In little time, with little memory, and without opening what is a device or lies in folder/outside.
    """
    began, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    OPENED.clear()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, limits[1]))  # so that a failure is one of the case alone
    try:
        came = load(folder)
    except DmstError as error:
        came = error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    took, grown = time.process_time() - began, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    assert took < SECONDS, f"{took:.1f} s of processor time"
    assert grown < GROWTH, f"{grown:,} bytes of memory"
    outside = (f"{os.path.realpath(folder)}/outside", "/dev", "/etc")
    assert not (abroad := [x for x in map(os.path.realpath, OPENED) if x.startswith(outside)]), f"opened {abroad[0]}"
    return came


def refused(load: Callable[[Path], Any], folder: Path, kind: type[DmstError] = BadFileError) -> dict[str, Any]:
    """An error of this kind, and one that says something."""
    came = attempt(load, folder)
    assert isinstance(came, DmstError), "it was loaded"
    assert isinstance(came, kind) and len(str(came)) > 20, f"the error is {came!r}"
    return {"came": type(came).__name__}


def refused_or_right(victim: Victim, folder: Path) -> dict[str, Any]:
    came = attempt(victim.load, folder)
    if isinstance(came, DmstError):
        return {"came": type(came).__name__}
    assert raw_of(came) == victim.stated(folder), "what was loaded is not what the file says"
    return {"came": "loaded"}


def right(victim: Victim, folder: Path) -> dict[str, Any]:
    came = refused_or_right(victim, folder)
    assert came == {"came": "loaded"} and victim.stated(folder).keys() == keys(victim), f"it was not loaded: {came}"
    return came


def keys(victim: Victim) -> set[str]:
    return {
        key
        for name in filter(of_tensors, victim.files)
        for key in second_reading(name.removesuffix(".safetensors"), victim.files[name])
    }


# --- the victims -----------------------------------------------------------------------------------------------------


def made(step: int, seed: int) -> State:
    """Nothing in it is the same as in that of another step, or of another run."""
    return replace(state(step), epoch_sums=[1.0 * step, 2.0 * seed, 3.0])


def contents(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in sorted(folder.iterdir())}


def victims(place: Path) -> tuple[Victim, Victim]:
    """Made anew, the same every time; and each loads while it is whole, or no refusal would mean anything."""
    torch.manual_seed(0)
    files: dict[str, list[dict[str, bytes]]] = {"checkpoint": [], "saved model": []}
    for seed, name in enumerate(("one", "other")):
        with RunFolder(place / name / "run") as run:
            for step in STEPS:
                run.save(made(step, 100 * seed))
        network = tiny(dim=8, readout_depth=1, patch_size=2, img_size=8)
        save_model(network, saved_at(place / name))
        files["checkpoint"].append(contents(checkpoint_at(place / name)))
        files["saved model"].append(contents(saved_at(place / name)))
    checkpoint = Victim("checkpoint", checkpoint_at, load_checkpoint, second_of_checkpoint, *files["checkpoint"])
    saved = Victim("saved model", saved_at, load_saved, second_of_saved, *files["saved model"])
    for victim in (checkpoint, saved):
        victim.put(place / "whole")
        right(victim, place / "whole")
    return checkpoint, saved


# --- rows 1 and 2: damage --------------------------------------------------------------------------------------------


def damaged(victim: Victim, name: str, change: Callable[[bytes], bytes]) -> Check:
    def check(folder: Path) -> dict[str, Any]:
        (victim.put(folder) / name).write_bytes(change(victim.files[name]))
        return refused(victim.load, folder)

    return check


def flip(bit: int, raw: bytes) -> bytes:
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def cut(length: int, raw: bytes) -> bytes:
    return raw[:length]


def head(name: str, raw: bytes) -> int:
    """The bytes in which each one matters to the structure: all of a small file, the header of the tensors."""
    return header_length(raw) if of_tensors(name) else len(raw)


def flips(victim: Victim) -> Iterator[Case]:
    """300 in each small file and header, the rest anywhere, so by size."""
    draw = random.Random(f"flips of a {victim.name}")
    bits = {(name, bit) for name, raw in victim.files.items() for bit in draw.sample(range(8 * head(name, raw)), SMALL_FLIPS)}
    rest = [(name, bit) for name, raw in victim.files.items() for bit in range(8 * len(raw)) if (name, bit) not in bits]
    for name, bit in sorted(bits | set(draw.sample(rest, FLIPS - len(bits)))):
        check = damaged(victim, name, partial(flip, bit))
        yield Case(f"one bit of a {victim.name} flipped", f"flip: {victim.name}, {name}, bit {bit}", check, LIMIT)


def cuts(victim: Victim) -> Iterator[Case]:
    """At every length of a checkpoint, of a config and of a header; at every 16th in the weights of a saved model."""
    for name, raw in victim.files.items():
        whole = len(raw) if len(raw) < 4096 else head(name, raw)
        for length in [*range(whole), *range(whole, len(raw), 16)]:
            check = damaged(victim, name, partial(cut, length))
            yield Case(f"a file of a {victim.name} cut off", f"cut: {victim.name}, {name}, {length} bytes", check, LIMIT)


# --- row 3: hostile structure under right hashes ---------------------------------------------------------------------


def nested(depth: int) -> Any:
    found: Any = {"a": 1}
    for i in range(depth):
        found = [found] if i % 2 else {"a": found}
    return found


OUTSIDE = ("../outside.safetensors", "/etc/passwd", "..", "a/../../b.safetensors", "/dev/zero", "file:///etc/passwd", "~/x")
KNOWN = ("1", "model", "ema", "__metadata__", "__class__", "${HOME}", "I64", "F64", "BF16", "F8_E4M3", "F4", "f32", "F32 ", "O")
TEXTS = ("", "\0", "\ud800", "é" * 9, "\u202e", "x" * 9999, *KNOWN, *OUTSIDE)
NUMBERS = (0, 1, -1, 2, 7, 2**15, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 2**64 + 8, 10**30, 10**400)
FLOATS = (0.5, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf)
SHAPES = ([], {}, [[]], [0] * 3000, {"a": {}}, {"": None}, {str(i): i for i in range(300)})
DEPTHS = (3, 60, 300)


def nasty(draw: random.Random) -> Any:
    pool = draw.choice((TEXTS, NUMBERS, FLOATS, SHAPES, (None, True, False), DEPTHS))
    value = draw.choice(pool)
    return nested(value) if pool is DEPTHS else like(value)


def like(value: Any) -> Any:
    """A copy of its own."""
    return json.loads(json.dumps(value))


def inside_of(tree: Any) -> list[Any]:
    return list(tree.values()) if isinstance(tree, dict) else tree if isinstance(tree, list) else []


def containers(tree: Any) -> list[Any]:
    """Every dict and list of it, the outermost first; without recursion, for it can be deep."""
    found = [tree]
    for each in found:
        found += [x for x in inside_of(each) if isinstance(x, dict | list)]
    return found


def alike(draw: random.Random, value: Any) -> Any:
    """Another value that is nearly that one."""
    if type(value) is int:
        return draw.choice((value + 1, value - 1, -value, 2 * value, value ^ 1 << draw.randrange(63), float(value), str(value)))
    if isinstance(value, str):
        return draw.choice((value.upper(), value + " ", value[:-1], value[::-1], value + "\0", f"../{value}", f"/{value}"))
    if isinstance(value, list):
        return draw.choice((value[::-1], [*value, 1], value[:-1], [value], dict(enumerate(value)), value * 2, [*value, *value]))
    if isinstance(value, dict):
        return draw.choice((list(value.items()), dict(reversed(value.items())), list(value), {"a": value}, {}))
    return draw.choice((not value, str(value), [value], None if value is not None else 0))


def edit(draw: random.Random, tree: dict[str, Any]) -> None:
    """One change anywhere in `tree`: a value, its type, a key; gone, more, moved."""
    inside = draw.choice(containers(tree))
    spots: list[Any] = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
    if not spots:
        return
    at, how = draw.choice(spots), draw.randrange(7)
    if how == 0:
        inside[at] = nasty(draw)
    elif how in (1, 2):
        inside[at] = alike(draw, inside[at])
    elif how == 3:
        del inside[at]
    elif how == 4:  # the value of another spot
        inside[at] = like(draw.choice(inside_of(draw.choice(containers(tree))) or [None]))
    elif isinstance(inside, list):
        inside.insert(at, nasty(draw))
    elif how == 5:
        inside[draw.choice(TEXTS)] = nasty(draw)
    else:  # another name for it
        inside[draw.choice((str(alike(draw, at)), *TEXTS))] = inside.pop(at)


def header_changed(draw: random.Random, raw: bytes) -> bytes:
    """Another header before the same data."""
    start = header_length(raw)
    tree, data = json.loads(raw[8:start]), raw[start:]
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        edit(draw, tree)
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    if draw.random() < 0.1:
        data = draw.choice((data + b"\0" * 8, data[:-8], b"", data * 2))
    length = len(text)
    if draw.random() < 0.1:
        length = draw.choice((0, 1, length + 1, length - 1, length + 8, 10**8, 2**31, 2**63 - 1, 2**63, 2**64 - 1))
    return struct.pack("<Q", length) + text + data


def json_changed(draw: random.Random, told: dict[str, Any]) -> None:
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        edit(draw, told)


def of_manifest(draw: random.Random, place: Path) -> None:
    forge(place, change=partial(json_changed, draw))


def of_config(draw: random.Random, place: Path) -> None:
    """Half of the time where it describes the network."""

    def change(told: dict[str, Any]) -> None:
        json_changed(draw, told["dmst"]["config"] if draw.random() < 0.5 else told)

    forge(place, change=change)


def of_header(draw: random.Random, place: Path) -> None:
    name = draw.choice([x.name for x in sorted(place.glob("*.safetensors"))])
    forge(place, {name: header_changed(draw, (place / name).read_bytes())})


def of_state(draw: random.Random, place: Path) -> None:
    told = json.loads((place / "state.json").read_bytes())
    json_changed(draw, told)
    forge(place, {"state.json": json.dumps(told).encode()})


def structures(checkpoint: Victim, saved: Victim) -> Iterator[Case]:
    kinds = (
        (checkpoint, "manifest", of_manifest, 450),
        (checkpoint, "header", of_header, 450),
        (checkpoint, "state", of_state, 100),
        (saved, "config", of_config, 500),
        (saved, "header", of_header, 500),
    )
    for victim, what, change, count in kinds:
        for i in range(count):
            name = f"structure: {victim.name}, {what}, {i}"

            def check(folder: Path, victim: Victim = victim, change: Any = change, name: str = name) -> dict[str, Any]:
                change(random.Random(name), victim.put(folder))
                return refused_or_right(victim, folder)

            yield Case("hostile headers, manifests and configs under right hashes", name, check, LIMIT)


# --- row 4: pickles --------------------------------------------------------------------------------------------------

FORMS = (*(f"protocol {i}" for i in range(6)), "torch.save", "torch.save of old")
PICKLES = ("model.pt", "model.pth", "pytorch_model.bin", "last.ckpt", "data.pkl")


def write_over(path: Path, raw: bytes) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.write_bytes(raw)


def pickles(checkpoint: Victim, saved: Victim) -> Iterator[Case]:
    """Each place: a victim, what is done with a pickle, and what must come of it."""
    places: list[tuple[str, Victim, Callable[[Path, bytes], Any], Callable[..., Any]]] = []

    def written(name: str, at: Path, raw: bytes) -> None:
        write_over(at / name, raw)

    def listed(name: str, at: Path, raw: bytes) -> None:
        forge(at, {name: raw})

    def load_beside(name: str, folder: Path) -> Any:
        return load_model(folder / name)

    def load_loose(folder: Path) -> Any:
        return load_model(saved_at(folder), unverified=True)

    def enter(folder: Path) -> Any:
        return RunFolder(folder / "run").__enter__()

    for victim in (checkpoint, saved):
        refuse = partial(refused, victim.load)
        places += [(f"as {name}", victim, partial(written, name), refuse) for name in victim.files]
        places += [(f"beside, {name}", victim, partial(written, name), partial(right, victim)) for name in PICKLES]
        places += [("in place of the folder", victim, write_over, refuse)]
    for name in [*filter(of_tensors, checkpoint.files), *PICKLES]:
        places.append((f"listed as {name}", checkpoint, partial(listed, name), partial(refused, checkpoint.load)))
    for name in PICKLES:
        places.append((f"alone, {name}", saved, partial(written, f"../{name}"), partial(refused, partial(load_beside, name))))
    places += [
        (
            "in place of the run",
            checkpoint,
            lambda at, raw: write_over(at.parents[1], raw),
            partial(refused, enter, kind=DmstError),
        ),
        ("under its right hash", saved, lambda at, raw: forge(at, {WEIGHTS: raw}), partial(refused, saved.load)),
        ("without hashes", saved, lambda at, raw: written(WEIGHTS, foreign(at), raw), partial(refused, load_loose)),
    ]
    for where, victim, place, judge in places:
        for form in FORMS:

            def check(folder: Path, victim: Any = victim, place: Any = place, judge: Any = judge, form: str = form) -> Any:
                place(victim.put(folder), pickled(form, folder / "canary", folder / "scratch"))
                came = judge(folder)
                assert not (folder / "canary").exists(), "the pickle was run"
                return came

            yield Case("pickles that would run code, in every place", f"pickle: {victim.name}, {where}, {form}", check, LIMIT)


# --- row 5: what is no plain file of this one ------------------------------------------------------------------------


def link_out(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "copy")


def link_to(target: str, path: Path, outside: Path) -> None:
    path.symlink_to(target.format(path=path))


def listening(path: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:  # its name must be short, so it is made beside and moved
        here = os.getcwd()
        os.chdir(path.parent)
        try:
            server.bind("s")
        finally:
            os.chdir(here)
    path.with_name("s").rename(path)


def device(path: Path, outside: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:  # only an administrator makes one
        path.symlink_to("/dev/zero")


def sparse(path: Path, outside: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


COPY = "a link to a copy elsewhere"
INSTEAD: dict[str, Callable[[Path, Path], Any]] = {
    COPY: link_out,
    "a link to a device": partial(link_to, "/dev/zero"),
    "a link to itself": partial(link_to, "{path}"),
    "a link to nowhere": partial(link_to, "gone"),
    "a folder": lambda path, outside: path.mkdir(),
    "a pipe": lambda path, outside: os.mkfifo(path),
    "a socket": listening,
    "a device": device,
    "nothing": lambda path, outside: None,
    "no bytes": lambda path, outside: path.touch(),
    "1 TiB of zeros": sparse,
}


def instead(victim: Victim, name: str, how: str) -> Check:
    """`name` is a file of the victim, or "." for its folder.

    The caches from which models come are made of links, so a saved model may be: its hashes stand for what they lead to.
    """
    follow = victim.name == "saved model" and how == COPY

    def check(folder: Path) -> dict[str, Any]:
        place, outside = victim.put(folder), folder / ("linked" if follow else "outside")
        outside.mkdir()
        (place / name).rename(outside / "copy")
        INSTEAD[how](place / name, outside)
        return right(victim, folder) if follow else refused(victim.load, folder)

    return check


def forged(victim: Victim, change: Callable[[Path, Victim], Any]) -> Check:
    def check(folder: Path) -> dict[str, Any]:
        change(victim.put(folder), victim)
        return refused(victim.load, folder)

    return check


TRAVERSALS = (
    *(f"{way}/outside/model.safetensors" for way in ("../../..", "a/../../../..", "{root}")),
    *("..safetensors", "a\0.safetensors", "./model.safetensors", "model.safetensors/", "\\..\\x.safetensors"),
)


def lists(name: str, place: Path, victim: Victim) -> None:
    """The manifest lists a file outside, which is there, under its right hash."""
    root = place.parents[2]
    raw = victim.files[WEIGHTS]
    (root / "outside").mkdir()
    (root / "outside/model.safetensors").write_bytes(raw)
    forge(place, change=put("files", name.format(root=root), value=listed(raw)))


def not_finite(name: str, value: float, place: Path, victim: Victim) -> None:
    """One weight of it is not finite, under right hashes."""
    found = safetensors.torch.load(victim.files[name])
    key = sorted(name for name, x in found.items() if x.is_floating_point())[0]
    found[key].view(-1)[-1] = value
    forge(place, {name: safetensors.torch.save(found)})


def other_files(files: dict[str, bytes], place: Path, victim: Victim) -> None:
    shutil.rmtree(place)
    place.mkdir()
    for name, raw in files.items():
        (place / name).write_bytes(raw)


def strange(checkpoint: Victim, saved: Victim) -> Iterator[Case]:
    checks: dict[str, Check] = {}
    for victim in (checkpoint, saved):
        for how in INSTEAD:
            for name in victim.files:
                checks[f"{victim.name}, {name}, {how}"] = instead(victim, name, how)
            checks[f"{victim.name}, its folder, {how}"] = instead(victim, ".", how)
        for name in victim.files:
            checks[f"{victim.name}, {name} of another one"] = damaged(victim, name, lambda raw, x=victim.other[name]: x)
        strangers = {
            "an empty folder": {},
            "a web page": dict.fromkeys(victim.files, b"<!doctype html><title>404</title>" * 30),
            "weights alone": {WEIGHTS: victim.files[WEIGHTS]},
            "of the other kind": (saved if victim is checkpoint else checkpoint).files,
            "of timm, without hashes": {WEIGHTS: saved.files[WEIGHTS], CONFIG: b'{"architecture": "dmst_tiny"}'},
            "of transformers": {WEIGHTS: saved.files[WEIGHTS], CONFIG: b'{"architectures": ["ViTForImageClassification"]}'},
        }
        for what, files in strangers.items():
            checks[f"{victim.name}, {what}"] = forged(victim, partial(other_files, files))
        for name in filter(of_tensors, victim.files):
            for value in (math.nan, math.inf, -math.inf):
                checks[f"{victim.name}, {value} in {name}"] = forged(victim, partial(not_finite, name, value))
    for name in TRAVERSALS:
        checks[f"checkpoint, lists {name!r}"] = forged(checkpoint, partial(lists, name))
    for schema in (3, 10**30, 0, -1, "1", 1.0, None):
        change = put("schema", value=schema)
        checks[f"checkpoint, schema {schema!r}"] = forged(checkpoint, lambda at, _, x=change: forge(at, change=x))
    newer = put("dmst", "config", "from_the_future", value=1)
    checks["saved model, of a newer version"] = forged(saved, lambda at, _: forge(at, change=newer))
    for size in (3 * 10**9, 10**12):
        checks[f"saved model, {size:,} bytes, as stated"] = forged(saved, lambda at, _, x=size: grown(at, WEIGHTS, x))
    operator = put("dmst", "config", "operator", value="os.system")
    checks["saved model, an operator that is none"] = forged(saved, lambda at, _: forge(at, change=operator))
    for name, check in checks.items():
        yield Case("links, pipes, devices, and files from elsewhere", f"strange: {name}", check, LIMIT)


# --- row 6: the newest is damaged ------------------------------------------------------------------------------------


def swap(draw: random.Random, place: Path) -> str:
    one, two = draw.sample([x for x in sorted(place.iterdir()) if x.name != MANIFEST], 2)
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    return f"{one.name}|{two.name}"


def of_step_before(draw: random.Random, place: Path) -> str:
    name = draw.choice(sorted(x.name for x in place.iterdir()))
    shutil.copy(place.with_name(f"step_{STEPS[draw.randrange(2)]:08d}") / name, place / name)
    return f"{name}|was renamed|sha256 is not"


def rewritten(change: Callable[[random.Random, bytes], bytes], draw: random.Random, place: Path) -> str:
    path = draw.choice(sorted(place.iterdir()))
    path.write_bytes(change(draw, path.read_bytes()))
    return path.name


def removed(draw: random.Random, place: Path) -> str:
    path = draw.choice(sorted(place.iterdir()))
    path.unlink()
    return path.name


DAMAGES: dict[str, Callable[[random.Random, Path], str]] = {
    "flipped": partial(rewritten, lambda draw, raw: flip(draw.randrange(8 * len(raw)), raw)),
    "cut off": partial(rewritten, lambda draw, raw: raw[: draw.randrange(len(raw))]),
    "zeros": partial(rewritten, lambda draw, raw: raw[: (at := draw.randrange(len(raw) - 9))] + bytes(len(raw) - at)),
    "removed": removed,
    "swapped": swap,
    "of a step before": of_step_before,
}


def fallbacks(whole: Path, wanted: State) -> Iterator[Case]:
    """`whole` is a run of three checkpoints, `wanted` the second of them."""
    for i in range(FALLBACKS):
        how = list(DAMAGES)[i % len(DAMAGES)]
        name = f"fallback: {how}, {i}"

        def check(folder: Path, how: str = how, name: str = name) -> None:
            shutil.copytree(whole, folder / "run")
            files = DAMAGES[how](random.Random(name), checkpoint_at(folder))
            run = RunFolder(folder / "run")
            try:
                why = f"no reason: {run.load(STEPS[2])} was loaded"
            except BadFileError as error:
                why = str(error)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = run.newest()
            assert same(found, wanted), f"not the one before: {found and found.step}"
            told = [str(x.message) for x in said]
            assert len(told) == 1 and told[0].startswith(f"step_{STEPS[2]:08d} "), f"the warning names another one: {told}"
            assert why in told[0] and any(x in why for x in files.split("|")), f"the warning gives no reason: {told[0]}"
            assert f"{STEPS[2] - STEPS[1]} steps are lost" in told[0], f"the warning states no loss: {told[0]}"

        yield Case("the newest of three checkpoints damaged: the one before is taken", name, check, LIMIT)


def cases(place: Path) -> Iterator[Case]:
    checkpoint, saved = victims(place)
    sys.addaudithook(listen)
    (place / "fired").mkdir()
    pickle.loads(pickled("protocol 5", place / "fired/canary", place / "scratch"))
    assert (place / "fired/canary").exists(), "the canary does not sing"
    for victim in (checkpoint, saved):
        yield from flips(victim)
    for victim in (checkpoint, saved):
        yield from cuts(victim)
    yield from structures(checkpoint, saved)
    yield from pickles(checkpoint, saved)
    yield from strange(checkpoint, saved)
    run = place / "one/run"
    yield from fallbacks(run, RunFolder(run).load(STEPS[1]))

"""What the page asks about: networks and pictures, by opaque ids, in memory alone.

    Session     networks m0, m1, ..., pictures e0, e1, ... (examples) and u... (uploads, at most 32, the oldest go)
    Network     one model under one lock: loaded in the background, asked by `look` and `rates`, some answers kept
    Picture     shown (a PNG), and what each network sees of it: its own size, normalised, as `dmst classify` prepares it

Pixels of an upload are prepared for every network at once and then forgotten.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dmst
from dmst.analysis import certify, membership
from dmst.analysis.intervene import forced_gates
from dmst.analysis.membership import enlarge, fit, gradient_map, png
from dmst.data.images import decode
from dmst.data.loader import EvalStream, View
from dmst.data.sets import ImageSet
from dmst.engine import prepare
from dmst.errors import DmstError, NonFiniteError, OptionError, number, shown
from dmst.explorer import view
from dmst.explorer.decoding import Decoder
from dmst.explorer.examples import examples
from dmst.models import Trace, VisionModel, shipped
from dmst.operators.orthonormal import OrthonormalLinear
from dmst.terminal import say
from dmst.words import visible

UPLOAD = 10 * 2**20  # bytes
UPLOADS = 32
SHOWN, SEEN = 512, 256  # pixels: at most, at least
KEPT, TRACES = 32, 2  # answers and traces of a network
PATIENCE = 120.0  # seconds that a picture waits for networks to load
Gates = dict[int, dict[int, float]]


class NotThereError(DmstError):
    """No network or picture has this id."""


class NotReadyError(DmstError):
    """The network is loading, or could not be loaded."""

    def __init__(self, words: str, state: str) -> None:
        super().__init__(words)
        self.state = state


@dataclass
class Picture:
    id: str
    width: int
    height: int
    shown: bytes
    seen: dict[str, Tensor] = field(default_factory=dict)  # by network: (1, c, h, w)


class Session:
    def __init__(self, models: Sequence[str], device: torch.device | str = "cpu") -> None:
        for where in models:
            check(where)
        names = names_of(models)
        self.networks = {f"m{i}": Network(f"m{i}", where, names[i], device) for i, where in enumerate(models)}
        self._given = {f"e{i}": each for i, each in enumerate(examples())}
        self.examples = {id: _picture(id, decode(each.raw, each.name)) for id, each in self._given.items()}
        self._uploads: OrderedDict[str, Picture] = OrderedDict()
        self._lock = threading.Lock()
        self._decoder = Decoder()

    def start(self) -> dict[str, Any]:
        return {
            "version": dmst.__version__,
            "upload_limit": UPLOAD,
            "models": [network.told() for network in self.networks.values()],
            "examples": [
                {"id": id, "name": name, "credit": credit, "digit": digit, "width": shown.width, "height": shown.height}
                for (id, (name, credit, _, digit)), shown in zip(self._given.items(), self.examples.values(), strict=True)
            ],
        }

    def load(self, id: str) -> None:
        """One network, and the examples as it sees them."""
        network = self.networks[id]

        def then() -> None:
            for each, given in self._given.items():
                network.see(self.examples[each], decode(given.raw, given.name, grey=network.view.channels == 1))

        network.load(then)
        if network.state == "ready":
            with suppress(NonFiniteError):  # which the page is told when it asks
                network.look(next(iter(self.examples.values())), {})  # the first time takes longer, and the page asks for it

    def network(self, id: str) -> Network:
        if id not in self.networks:
            raise NotThereError(f"there is no network {shown(id)}: /api/start lists them.")
        return self.networks[id]

    def picture(self, id: str) -> Picture:
        with self._lock:
            found = self.examples.get(id) or self._uploads.get(id)
        if found is None:
            raise NotThereError(f"there is no picture {shown(id)}: the server keeps the newest {UPLOADS}; choose it again.")
        return found

    def settled(self) -> bool:
        """Whether every network is loaded, or has failed to."""
        return all(network.ready.is_set() for network in self.networks.values())

    def add(self, raw: bytes) -> dict[str, Any]:
        """An upload, for the networks that are ready."""
        networks = [network for network in self.networks.values() if network.state == "ready"]
        pixels = self._decoder.decode(raw)
        wants_grey = any(network.view.channels == 1 for network in networks)
        grey = self._decoder.decode(raw, grey=True) if wants_grey else pixels
        picture = _picture("u" + secrets.token_hex(16), pixels)
        for network in networks:
            network.see(picture, grey if network.view.channels == 1 else pixels)
        with self._lock:
            self._uploads[picture.id] = picture
            while len(self._uploads) > UPLOADS:
                self._uploads.popitem(last=False)
        return {"image": picture.id, "width": picture.width, "height": picture.height}

    def close(self) -> None:
        self._decoder.close()


class Network:
    """All that touches the model is done under its lock: forcing a gate changes the instance."""

    def __init__(self, id: str, where: str, name: str, device: torch.device | str) -> None:
        self.id, self.where, self.name, self.device = id, where, name, device
        self.state, self.words = "waiting", ""
        self.ready = threading.Event()  # also when it failed
        self.model: VisionModel | None = None
        self.view: View = View(1, 3, (0.5,) * 3, (0.5,) * 3)
        self._lock = threading.Lock()
        self._kept: OrderedDict[Any, dict[str, Any]] = OrderedDict()
        self._traces: OrderedDict[Any, Trace] = OrderedDict()

    def load(self, then: Callable[[], object] = lambda: None) -> None:
        self.state = "loading"
        try:
            model = prepare.read_weights(self.where).to(self.device).eval()
            if not model.config.num_classes:
                raise OptionError(f"{self.where} has no classifier (num_classes is 0): train one first.")
            self.view = prepare.view_of(model)
            _settle(model)
            self.model = model
            then()
        except Exception as error:
            ours = isinstance(error, DmstError)
            say(f"{self.where}: {type(error).__name__}: {error}", err=True)
            words = str(error) if ours else f"it could not be loaded ({type(error).__name__}); the terminal shows the error"
            self.words = visible(_without_paths(words, self.where, self.name))
            self.state = "failed"
        else:
            self.state = "ready"
        finally:
            self.ready.set()

    def told(self) -> dict[str, Any]:
        model = self.model if self.state == "ready" else None
        config = model and model.config
        return {
            "id": self.id,
            "name": self.name,
            "state": self.state,
            "words": self.words,
            "operator": config and config.operator,
            "depth": config and config.depth,
            "heads": config and config.num_heads,
            "classes": config and config.num_classes,
            "channels": config and config.in_chans,
            "parameters": model and sum(weight.numel() for weight in model.parameters()),
            "image_size": config and list(config.img_size),  # type: ignore[arg-type]
            "gates": model and _has_gates(model),
        }

    def see(self, picture: Picture, pixels: np.ndarray) -> None:
        """The pixels as the network takes them."""
        stream = EvalStream(_Given(pixels), self.view, batch_size=1, path="workers")
        picture.seen[self.id] = next(iter(stream)).images

    def seen(self, picture: Picture) -> bytes:
        """A PNG of what it takes, as `dmst analyze maps` draws it, every pixel a square."""
        self._model()
        pixels = membership.picture(self._of(picture)[0])
        return png(enlarge(pixels, -(-SEEN // min(pixels.shape[:2]))))

    def look(self, picture: Picture, asked: Any) -> dict[str, Any]:
        """Prediction, maps and gates, with gates forced as asked: {"3": {"1": 0.0}}."""

        def found(model: VisionModel, gates: Gates) -> dict[str, Any]:
            return view.look(model, self._trace(model, picture, gates), gates)

        return self._answer("look", picture, asked, found)

    def rates(self, picture: Picture, asked: Any) -> dict[str, Any]:
        """What takes longer, of this picture alone: nats by layer, certificates, and the gradient of the answer."""

        def found(model: VisionModel, gates: Gates) -> dict[str, Any]:
            trace = self._trace(model, picture, gates)
            with forced_gates(model, gates):
                certificate = certify(model, self._image(picture))
                with torch.inference_mode(False):
                    gradient = gradient_map(model, self._image(picture).clone())[0]
            return view.rates(model, trace, certificate) | view.gradient(gradient)

        return self._answer("rates", picture, asked, found)

    def _answer(
        self, what: str, picture: Picture, asked: Any, found: Callable[[VisionModel, Gates], dict[str, Any]]
    ) -> dict[str, Any]:
        model = self._model()
        gates = gates_of(asked, model)
        key = what, picture.id, repr(gates)
        with self._lock, torch.inference_mode():
            if key not in self._kept:
                told = {"model": self.id, "image": picture.id, "gates": {str(i): _texts(each) for i, each in gates.items()}}
                _keep(self._kept, key, told | found(model, gates), KEPT)
            return self._kept[key]

    def _trace(self, model: VisionModel, picture: Picture, gates: Gates) -> Trace:
        key = picture.id, repr(gates)
        if key not in self._traces:
            with forced_gates(model, gates):
                _keep(self._traces, key, model.trace(self._image(picture)), TRACES)
        return self._traces[key]

    def _image(self, picture: Picture) -> Tensor:
        weight = next(self._model().parameters())
        return self._of(picture).to(weight.device, weight.dtype)

    def _of(self, picture: Picture) -> Tensor:
        if self.id not in picture.seen:
            raise NotThereError(f"the picture came before {self.name} was loaded: choose it again.")
        return picture.seen[self.id]

    def _model(self) -> VisionModel:
        if self.model is None or self.state != "ready":
            words = f": {self.words}" if self.words else ", try again in a moment"
            raise NotReadyError(f"the network {self.name} is {self.state}{words}", self.state)
        return self.model


class _Given(ImageSet):
    """One picture without a label."""

    def __init__(self, pixels: np.ndarray) -> None:
        super().__init__("picture", "given", ["none"], np.zeros(1, np.int64), fingerprint="")
        self._pixels = pixels

    def read(self, index: int) -> np.ndarray:
        return self._pixels


def names_of(models: Sequence[str]) -> list[str]:
    """The last part of each; with the folder before it where two have the same, and a number where that is not enough."""
    paths = [Path(where).resolve() if Path(where).exists() else Path(where) for where in models]
    short = [visible(path.name) or "model" for path in paths]
    long = [
        name if short.count(name) == 1 else f"{visible(path.parent.name)}/{name}"
        for name, path in zip(short, paths, strict=True)
    ]
    return [name if long.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(long)]


def check(where: str) -> None:
    """What is known without loading: whether there is such a name or folder."""
    if where not in shipped.SHIPPED and not Path(where).exists():
        prepare.read_weights(where)  # which says what there is


def gates_of(asked: Any, model: VisionModel) -> Gates:
    """{"3": {"1": 0.0}} with whole numbers for keys, in order; what is not that is refused."""
    depth, heads = len(model.blocks), model.config.num_heads
    if not isinstance(asked, Mapping) or not all(isinstance(each, Mapping) for each in asked.values()):
        raise OptionError(f'gates is {shown(asked)}: it must be like {{"3": {{"1": 0.0}}}}, layer, head and gate.')
    found = {
        _index("layer", i, depth): {_index("head", k, heads): _gate(g) for k, g in row.items()} for i, row in asked.items()
    }
    return {i: dict(sorted(row.items())) for i, row in sorted(found.items()) if row}


def _index(what: str, key: str, count: int) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 5 and str(int(key)) == key and int(key) < count):
        raise OptionError(f"{what} is {shown(key)}: it must be a whole number from 0 to {count - 1}, as text.")
    return int(key)


def _has_gates(model: VisionModel) -> bool:
    forms = [getattr(block.operator, "form", None) for block in model.blocks]
    return any(form is not None and form.gate is not None for form in forms)


@torch.no_grad()
def _settle(model: VisionModel) -> None:
    """Nobody trains it here, so an orthonormal matrix is looked at once, not in every call: a third of the time of a rate."""
    for module in model.modules():
        if isinstance(module, OrthonormalLinear):
            basis = module.basis()
            module.basis = lambda basis=basis: basis  # type: ignore[method-assign, misc]


def _gate(value: Any) -> float:
    return number("gate", value, -1e6, 1e6)


def _texts(heads: Mapping[int, float]) -> dict[str, float]:
    return {str(k): value for k, value in heads.items()}


def _keep(shelf: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    shelf[key] = value
    while len(shelf) > most:
        shelf.popitem(last=False)


def _picture(id: str, pixels: np.ndarray) -> Picture:
    height, width = pixels.shape[:2]
    return Picture(id, width, height, png(pixels if max(height, width) <= SHOWN else fit(pixels, SHOWN), level=1))


def _without_paths(words: str, where: str, name: str) -> str:
    for path in (str(shipped.FOLDER), str(Path(where).resolve()), str(Path(where)), where):
        if len(path) > 1:  # "." and "/" are everywhere
            words = words.replace(path, name)
    return words

"""What the page asks about: networks and pictures, by opaque ids, in memory alone.

Session     networks m0, m1, ..., pictures e0, e1, ... (examples) and u... (uploads, at most 32, the oldest go)
Network     one model: loaded in the background, asked by `look` and `rates`
Picture     the file, a PNG of it to show, and what each network sees of it: prepared as `dmst classify` does it
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

import dmst
from dmst.analysis import certify, membership
from dmst.analysis.intervene import forced_gates, groups_off
from dmst.analysis.membership import enlarge, fit, gradient_map, png
from dmst.data.images import decode
from dmst.data.loader import View
from dmst.engine import prepare
from dmst.engine.classify import Photos
from dmst.errors import DmstError, OptionError, choose, number, shown
from dmst.explorer import view
from dmst.models import VisionModel, shipped
from dmst.photos import PHOTOS, photo
from dmst.terminal import say
from dmst.words import visible

UPLOAD = 10 * 2**20  # bytes
UPLOADS = 32
SHOWN, SEEN = 512, 256  # pixels: at most, at least
DIGIT = "seven"
Gates = dict[int, dict[int, float]]
Groups = dict[int, dict[int, list[int]]]


class RefusedError(DmstError):
    """A request that is not answered: the status, why, and the state of a network that is not ready."""

    def __init__(self, status: int, words: str, state: str = "") -> None:
        super().__init__(words)
        self.status, self.state = status, state


@dataclass
class Picture:
    id: str
    raw: bytes
    width: int
    height: int
    shown: bytes
    name: str
    credit: str
    seen: dict[str, Tensor] = field(default_factory=dict)  # by network, where it was asked: (1, c, h, w)


class Session:
    def __init__(self, models: Sequence[str], device: torch.device | str = "cpu") -> None:
        for where in models:
            if where not in shipped.SHIPPED and not Path(where).exists():
                prepare.read_weights(where)  # which says what there is
        names = names_of(models)
        self.networks = {f"m{i}": Network(f"m{i}", where, names[i], device) for i, where in enumerate(models)}
        self.examples = {f"e{i}": _picture(f"e{i}", *each) for i, each in enumerate(examples())}
        self._uploads: dict[str, Picture] = {}  # the oldest first

    def start(self) -> dict[str, Any]:
        return {
            "version": dmst.__version__,
            "upload_limit": UPLOAD,
            "models": [network.told() for network in self.networks.values()],
            "examples": [
                {"digit": each.name == DIGIT} | {key: getattr(each, key) for key in ("id", "name", "credit", "width", "height")}
                for each in self.examples.values()
            ],
        }

    def network(self, id: str) -> Network:
        if id not in self.networks:
            raise RefusedError(404, f"there is no network {shown(id)}: /api/start lists them.")
        return self.networks[id]

    def picture(self, id: str) -> Picture:
        found = self.examples.get(id) or self._uploads.get(id)
        if found is None:
            raise RefusedError(404, f"there is no picture {shown(id)}: the server keeps the newest {UPLOADS}; choose it again.")
        return found

    def add(self, raw: bytes) -> dict[str, Any]:
        """An upload; one at a time (server.py)."""
        picture = _picture("u" + secrets.token_hex(16), raw)
        self._uploads[picture.id] = picture
        if len(self._uploads) > UPLOADS:
            del self._uploads[next(iter(self._uploads))]
        return {"image": picture.id, "width": picture.width, "height": picture.height}


class Network:
    """Asked by one thread at a time, its lane in server.py: forcing a gate changes the instance."""

    def __init__(self, id: str, where: str, name: str, device: torch.device | str) -> None:
        self.id, self.where, self.name, self.device = id, where, name, device
        self.state, self.words = "waiting", ""
        self.model: VisionModel | None = None
        self.view: View = View(1, 3, (0.5,) * 3, (0.5,) * 3)

    def load(self) -> None:
        self.state = "loading"
        try:
            model = prepare.read_weights(self.where).to(self.device).eval()
            if not model.config.num_classes:
                raise OptionError(f"{self.where} has no classifier (num_classes is 0): train one first.")
            self.view, self.model = prepare.view_of(model), model
            self.state = "ready"
        except Exception as error:
            say(f"{self.where}: {type(error).__name__}: {error}", err=True)
            self.words = f"{self.name} could not be loaded; the terminal shows the error"
            self.state = "failed"

    def told(self) -> dict[str, Any]:
        model = self.model if self.state == "ready" else None
        config = model and model.config
        forms: list[Any] = [getattr(block.operator, "form", None) for block in model.blocks] if model else []
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
            "gates": model and any(form and form.gate for form in forms),
        }

    def seen(self, picture: Picture) -> bytes:
        """A PNG of what it takes, as `dmst analyze maps` draws it, every pixel a square."""
        self._model()
        pixels = membership.picture(self.prepared(picture)[0])
        return png(enlarge(pixels, -(-SEEN // min(pixels.shape[:2]))))

    @torch.no_grad()
    def look(self, picture: Picture, asked: Any) -> dict[str, Any]:
        """Prediction, maps and gates, with gates forced and groups off as asked: {"3": {"1": 0.0, "2.5": 0}}."""
        model, image = self._model(), self._image(picture)
        gates, groups = changes_of(asked, model)
        with forced_gates(model, gates), groups_off(model, groups):
            trace = model.trace(image)
            pulls = view.pulls(model, trace)
        return view.look(model, trace, gates, pulls)

    @torch.no_grad()
    def rates(self, picture: Picture, asked: Any) -> dict[str, Any]:
        """What takes longer, of this picture alone: nats by layer, certificates, and the gradient of the answer."""
        model, image = self._model(), self._image(picture)
        gates, groups = changes_of(asked, model)
        with forced_gates(model, gates), groups_off(model, groups):
            trace, certificate, gradient = model.trace(image), certify(model, image), gradient_map(model, image)[0]
        return view.rates(model, trace, certificate) | view.gradient(gradient)

    def _image(self, picture: Picture) -> Tensor:
        weight = next(self._model().parameters())
        return self.prepared(picture).to(weight.device, weight.dtype)

    def prepared(self, picture: Picture) -> Tensor:
        """The picture as the network takes it."""
        if self.id not in picture.seen:
            pixels = decode(picture.raw, "the picture", grey=self.view.channels == 1)
            picture.seen[self.id] = Photos([pixels], [picture.id]).seen(self.view)
        return picture.seen[self.id]

    def _model(self) -> VisionModel:
        if self.model is None or self.state != "ready":
            words = f": {self.words}" if self.words else ", try again in a moment"
            raise RefusedError(409, f"the network {self.name} is {self.state}{words}", self.state)
        return self.model


def examples() -> list[tuple[bytes, str, str]]:
    """File, name and credit of the pictures to begin with: the photographs that ship, and a drawn digit."""
    canvas, out = Image.new("L", (256, 256)), io.BytesIO()
    ImageDraw.Draw(canvas).line([(64, 32), (192, 32), (96, 240)], fill=255, width=42, joint="curve")
    canvas.save(out, "PNG")
    digit = (out.getvalue(), DIGIT, "a drawn digit, for networks that read digits")
    return [*((photo(name).read_bytes(), name, credit) for name, credit in PHOTOS.items()), digit]


def names_of(models: Sequence[str]) -> list[str]:
    """The last part of each; with its place in the list where two have the same."""
    names = [visible(Path(where).resolve().name) for where in models]
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names)]


def changes_of(asked: Any, model: VisionModel) -> tuple[Gates, Groups]:
    """{"3": {"1": 0.0, "2.5": 0}} is head 1 of layer 3 with gate 0, and group 5 of head 2 off; what is not that is refused."""
    layers, heads = [str(i) for i in range(len(model.blocks))], [str(i) for i in range(model.config.num_heads)]
    if not isinstance(asked, Mapping) or not all(isinstance(each, Mapping) for each in asked.values()):
        raise OptionError(f'gates is {shown(asked)}: it must be like {{"3": {{"1": 0.0}}}}, layer, head and gate.')
    gates, groups = Gates(), Groups()
    for layer, row in asked.items():
        i = int(choose("layer", layer, layers))
        known = range(getattr(getattr(model.blocks[i].operator, "form", None), "groups", 0))
        for key, value in row.items():
            head, dot, group = key.partition(".")
            k = int(choose("head", head, heads))
            if not dot:
                gates.setdefault(i, {})[k] = number("gate", value, -1e6, 1e6)
            else:
                number("gate of a group", value, 0, 0)
                groups.setdefault(i, {}).setdefault(k, []).append(int(choose("group", group, map(str, known))))
    return gates, groups


def _picture(id: str, raw: bytes, name: str = "", credit: str = "") -> Picture:
    pixels = decode(raw, "the picture")
    height, width = pixels.shape[:2]
    small = pixels if max(height, width) <= SHOWN else fit(pixels, SHOWN)
    return Picture(id, raw, width, height, png(small, level=1), name, credit)

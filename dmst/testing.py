"""Does an operator keep the contract? For the tests of operators that live outside this package, and for our own.

    from dmst.testing import check_operator

    def test_mean_pull():
        check_operator(MeanPull)
        check_operator(MeanPull, options={"pull": 0.3})

It builds the operator, calls it, and puts it into a small network, on the CPU, in a tenth of a second. The first promise that
is not kept raises `OperatorContractError`: what the operator did, and what the contract (dmst/operators/base.py) says. What
cannot be known from outside is not asked: whether gradients are those of the forward pass (an operator may stop them on
purpose), or what a permutation of the tokens should do.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmst.errors import OperatorContractError, ShapeError, in_one_line
from dmst.models import ModelConfig, VisionModel, load_model, save_model
from dmst.operators import OPERATORS, Operator, Parts
from dmst.operators.base import Grid

PASSED = ("bias", "proj_drop", "device", "dtype")  # what a network passes by keyword
GRID = (3, 4)
SAMPLES, TOKENS = 3, 12


def check_operator(
    operator: type[Operator], *, options: Mapping[str, Any] | None = None, dim: int = 24, num_heads: int = 3
) -> None:
    """Raise OperatorContractError unless `operator`, built with `options`, keeps every promise of the contract.

    `dim` and `num_heads` are the sizes it is built with. Where an operator draws random numbers of its own in training,
    `options` must switch them off.
    """
    if not (isinstance(operator, type) and issubclass(operator, Operator)):
        raise OperatorContractError(f"{operator!r} is no subclass of dmst.operators.Operator. Give the class, not an instance.")
    case = _Case(operator, dict(options or {}), dim, num_heads)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for check in CHECKS:
            check(case)


class _Case:
    """An operator and its options: how it is built, called and complained about."""

    def __init__(self, operator: type[Operator], options: dict[str, Any], dim: int, num_heads: int) -> None:
        self.operator, self.options, self.dim, self.num_heads = operator, options, dim, num_heads
        self.name = operator.__name__

    def need(self, kept: Any, what: str, contract: str) -> None:
        """A promise: unless it is kept, `what` the operator did is an error, beside what the contract says."""
        if not kept:
            raise OperatorContractError(f"{self.name}{what}. {contract}")

    def run(self, what: str, contract: str, call: Callable[[], Any]) -> Any:
        """What `call` returns; whatever it raises is a broken promise."""
        try:
            return call()
        except Exception as error:
            raise OperatorContractError(f"{self.name}{what} raised {in_one_line(error)}. {contract}") from error

    def build(self, **given: Any) -> Operator:
        """One with weights as after some training: no zeros that hide what they are multiplied with."""
        given = {"dtype": torch.float64, **self.options, **given}
        keywords = "".join(f", {name}={value!r}" for name, value in given.items())
        contract = f"A network builds an operator with dim, num_heads and the keywords {', '.join(PASSED)}."
        call = f"({self.dim}, {self.num_heads}{keywords})"
        made: Operator = self.run(call, contract, lambda: self.operator(self.dim, self.num_heads, **given))
        with torch.no_grad():
            for parameter in made.parameters():
                if not parameter.is_meta:
                    parameter.add_(torch.randn_like(parameter) * (parameter.shape[-1] if parameter.ndim > 1 else 4) ** -0.5)
        return made

    def tokens(self, b: int = SAMPLES, n: int = TOKENS, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(b, n, self.dim, dtype=dtype)

    def update(self, made: Operator, z: Tensor, grid: Grid = GRID) -> Tensor:
        """What `forward` gives, its shape and dtype looked at."""
        shape = tuple(z.shape)
        contract = "An operator returns an update of the shape and dtype of its tokens."
        out = self.run(f".forward(z, grid={grid}) with z of shape {shape}", contract, lambda: made(z, grid=grid))
        self.need(isinstance(out, Tensor), f".forward(z) returned {type(out).__name__}, not a tensor", contract)
        self.need(out.shape == z.shape, f".forward(z) changed the shape: {shape} in, {tuple(out.shape)} out", contract)
        same = out.dtype == z.dtype or torch.is_autocast_enabled("cpu")
        self.need(same, f".forward(z) changed the dtype: {z.dtype} in, {out.dtype} out", contract)
        return out

    def parts(self, made: Operator, z: Tensor, grid: Grid = GRID) -> Parts:
        contract = "decompose(z, grid=...) returns dmst.Parts: what forward computed on the way, None for what there is not."
        what = f".decompose(z, grid={grid}) with z of shape {tuple(z.shape)}"
        parts = self.run(what, contract, lambda: made.decompose(z, grid=grid))
        self.need(isinstance(parts, Parts), f".decompose(z) returned {type(parts).__name__}", contract)
        return parts


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"shape {tuple(value.shape)}" + ("" if value.isfinite().all() else ", not finite,")


def _distance(a: Tensor, b: Tensor) -> float:
    """Relative error."""
    return ((a - b).norm() / b.norm().clamp(min=1e-300)).item()


# --- what is promised ------------------------------------------------------------------------------------------------


def _signature(case: _Case) -> None:
    contract = f"An operator is built as {case.name}(dim, num_heads, *, {', '.join(PASSED)}, then its own options by keyword)."
    given = list(inspect.signature(case.operator.__init__).parameters.values())[1:]
    names, rest = [p.name for p in given[:2]], given[2:]
    case.need(names == ["dim", "num_heads"], f".__init__ begins with ({', '.join(names)})", contract)
    for p in rest:
        by_keyword = p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)
        case.need(by_keyword, f".__init__ takes {p.name!r} by position, so a network does not see it as an option", contract)
    if not any(p.kind is p.VAR_KEYWORD for p in rest):
        for name in PASSED:
            case.need(name in {p.name for p in rest}, f".__init__ does not take {name!r}", contract)


def _factory(case: _Case) -> None:
    """Networks are built on the meta device first, to check a config and to load weights."""
    contract = "Pass device and dtype on to every layer and parameter: networks are built on the meta device first."
    made = case.build(device="meta")
    for name, x in made.state_dict(keep_vars=True).items():
        case.need(x.is_meta, f"(..., device='meta') made {name!r} on {x.device}", contract)
        right = x.dtype == torch.float64 or not x.is_floating_point()
        case.need(right, f"(..., dtype=torch.float64) made {name!r} in {x.dtype}", contract)
    contract = (
        "load_model fills in what is saved and nothing else: save the buffer (persistent=True), or compute it in forward."
    )
    for name, _ in made.named_buffers():
        case.need(name in made.state_dict(), f" keeps the buffer {name!r} out of its state dict", contract)
    contract = "reset_parameters() gives every parameter its start; the base class knows the weights of nn.Linear only."
    made = made.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(torch.nan)
    case.run(".reset_parameters()", contract, made.reset_parameters)
    for name, parameter in made.named_parameters():
        case.need(parameter.isfinite().all(), f".reset_parameters() leaves {name!r} as it was", contract)
    case.build(bias=False)


def _shapes(case: _Case) -> None:
    for n, grid in ((TOKENS, GRID), (1, (1, 1)), (63, (7, 9)), (197, (1, 197))):
        for training in (True, False):
            z = case.tokens(n=n, dtype=torch.float32)
            before = z.clone()
            out = case.update(case.build(dtype=torch.float32).train(training), z, grid)
            what = f".forward(z) is not finite for z of shape {tuple(z.shape)}"
            case.need(out.isfinite().all(), what, "Finite tokens get a finite update.")
            contract = "The tokens are the caller's: the residual still needs them."
            case.need(torch.equal(z, before), ".forward(z) changed z in place", contract)


def _empty(case: _Case) -> None:
    contract = "No tokens, or no samples, are input like any other."
    made = case.build()
    for b, n, grid in ((2, 0, (0, 0)), (0, TOKENS, GRID)):
        z = case.tokens(b, n).requires_grad_()
        shape = tuple(z.shape)
        out = case.update(made, z, grid)
        case.run(f".forward(z) with z of shape {shape}, differentiated,", contract, out.sum().backward)
        for name, part in case.parts(made, z, grid)._asdict().items():
            if part is not None:
                what = f".decompose(z).{name} has shape {tuple(part.shape)} for z of shape {shape}"
                case.need(part.shape[0] == b, what, contract)


def _refusals(case: _Case) -> None:
    made, good = case.build(dtype=torch.float32), case.tokens(dtype=torch.float32)
    shape = f"(batch, tokens, {case.dim})"
    contract = f"Tokens are {shape} in the dtype of the weights, else a ShapeError: call self.check(z) first."
    for bad in (good[0], good[..., 1:], good.double(), good.long()):
        for method in ("forward", "decompose"):
            what = f"{bad.dtype} tokens of shape {tuple(bad.shape)}"
            try:
                getattr(made, method)(bad, grid=GRID)
            except ShapeError:
                continue
            except Exception as error:
                case.need(False, f".{method} raised {in_one_line(error)} for {what}", contract)
            case.need(False, f".{method} took {what}", contract)


def _gradients(case: _Case) -> None:
    contract = "Every parameter and the tokens get a finite gradient: an optimizer skips what has none."
    made, z = case.build(), case.tokens().requires_grad_()
    out = case.update(made, z)
    loss, named = (out * torch.randn_like(out)).sum(), {"z": z, **dict(made.named_parameters())}
    case.need(loss.requires_grad, ".forward(z) is detached from z", contract)

    def differentiate() -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(loss, tuple(named.values()), allow_unused=True)

    found = case.run(".forward(z), differentiated,", contract, differentiate)
    for (name, x), gradient in zip(named.items(), found, strict=True):
        case.need(gradient is not None, f".forward(z) does not use {name!r}: it has no gradient", contract)
        case.need(gradient.isfinite().all(), f".forward(z) gives {name!r} a gradient that is not finite", contract)
        counts = gradient.norm() > 1e-12 * (1 + x.norm())
        case.need(counts, f".forward(z) does not depend on {name!r}: its gradient is 0", contract)


def _samples(case: _Case) -> None:
    contract = "Samples are independent: no statistics over the batch."
    made, z = case.build(), case.tokens()
    bad = z.clone()
    bad[1, 3, 5] = torch.nan
    for training in (True, False):
        made.train(training)
        with torch.set_grad_enabled(training):
            whole, alone, dirty = (case.update(made, x) for x in (z, z[2:], bad))
        apart = _distance(alone[0], whole[2]) <= 1e-12
        case.need(apart, ".forward(z) changes for a sample when others are beside it", contract)
        clean = torch.equal(dirty[[0, 2]], whole[[0, 2]])
        case.need(clean, ".forward(z) carries a NaN of one sample into others", contract)
        visible = "A NaN stays visible: training stops where it sees one."
        case.need(dirty[1].isnan().any(), ".forward(z) hides a NaN of its tokens", visible)


def _modes(case: _Case) -> None:
    made, z = case.build(), case.tokens()
    evaluated = case.update(made.eval(), z)
    with torch.no_grad():
        contract = "With proj_drop=0 an operator is a function: pass options that switch random numbers of its own off."
        for what, training in (("a second call", False), ("training mode", True)):
            same = _distance(case.update(made.train(training), z), evaluated) <= 1e-10
            case.need(same, f".forward(z) differs in {what}", contract)
        dropping = case.build(proj_drop=0.5)
        contract = "The state dict of one operator fits another one that is built with the same options."
        case.run(".load_state_dict(weights)", contract, lambda: dropping.load_state_dict(made.state_dict()))
        contract = "Networks pass proj_drop: it drops parts of the update in training (nn.Dropout), nothing in evaluation."
        same = _distance(case.update(dropping.eval(), z), evaluated) <= 1e-10
        case.need(same, "(..., proj_drop=0.5) changes the update in evaluation mode", contract)
        other = _distance(case.update(dropping.train(), z), evaluated) >= 1e-10
        case.need(other, "(..., proj_drop=0.5) changes nothing in training mode", contract)
        with torch.autocast("cpu", torch.bfloat16):
            out = case.update(case.build(dtype=torch.float32), z.float())
        what = ".forward(z) is not finite under autocast to bfloat16"
        case.need(out.isfinite().all(), what, "Networks are trained under autocast.")


def _decomposition(case: _Case) -> None:
    made, z, k = case.build().eval(), case.tokens(), case.num_heads
    parts, size = case.parts(made, z), f"z of {tuple(z.shape)}"
    shapes = {
        "projected": (SAMPLES, k, TOKENS, None), "membership": (SAMPLES, k, TOKENS), "gate": (SAMPLES, k),
        "attention": (SAMPLES, k, None, None),
    }  # fmt: skip
    contract = "Parts are projected (b, k, n, p), membership (b, k, n), gate (b, k), attention (b, k, n, n) or (b, k, p, p)."
    for name, part in parts._asdict().items():
        if part is not None:
            wanted = shapes[name]
            fits = part.ndim == len(wanted) and all(a in (None, b) for a, b in zip(wanted, part.shape, strict=True))
            case.need(fits, f".decompose(z).{name} has shape {tuple(part.shape)} for {k} heads and {size}", contract)
            case.need(part.isfinite().all(), f".decompose(z).{name} is not finite", contract)
    positive = parts.membership is None or (parts.membership >= 0).all()
    contract = "A membership says how much a token belongs to a subspace: 0 or more."
    case.need(positive, ".decompose(z).membership is below 0", contract)
    _bases(case, made, z, parts)
    contract = "rate(z, *, eps, grid=None) returns one number a sample, (b,) in nats, or None."
    rate = case.run(".rate(z, eps=0.5)", contract, lambda: made.rate(z, eps=0.5, grid=GRID))
    fits = rate is None or (isinstance(rate, Tensor) and rate.shape == (SAMPLES,) and rate.isfinite().all())
    case.need(fits, f".rate(z, eps=0.5) gave {_described(rate)} for {size}", contract)


def _bases(case: _Case, made: Operator, z: Tensor, parts: Parts) -> None:
    contract = "subspaces() returns the bases U_k (k, d, p) that the tokens are projected on, or None."
    bases = case.run(".subspaces()", contract, made.subspaces)
    if bases is None:
        return
    fits = isinstance(bases, Tensor) and bases.ndim == 3 and bases.shape[:2] == (case.num_heads, case.dim)
    size = f"dim {case.dim} and {case.num_heads} heads"
    case.need(fits, f".subspaces() gave {_described(bases)} for {size}", contract)
    case.need(parts.projected is not None, ".subspaces() gives bases, and .decompose(z).projected is None", contract)
    other = case.tokens()  # a difference, in which a bias cancels
    found = case.parts(made, other).projected - parts.projected  # type: ignore[operator]
    expected = torch.einsum("bnd,kdp->bknp", other - z, bases)
    same = expected.shape == found.shape and _distance(found, expected) <= 1e-8
    what = ".decompose(z).projected is not z times the bases that .subspaces() gives, but for a bias"
    case.need(same, what, contract)


def _network(case: _Case) -> None:
    """In a network: the same logits when traced, saved and loaded."""
    name = f"check_operator:{case.operator.__module__}.{case.operator.__qualname__}"
    OPERATORS[name] = case.operator  # networks find the class by a name
    try:
        _network_of(case, name)
    finally:
        del OPERATORS[name]


def _network_of(case: _Case, name: str) -> None:
    contract = "A network is made with create_model(..., operator=NAME) and any option of the operator."
    own = {key: value for key, value in case.options.items() if key not in PASSED}
    made: dict[str, Any] = {"operator": name, "operator_options": own, "qkv_bias": case.options.get("bias", True)}
    made |= {"dim": case.dim, "depth": 2, "num_heads": case.num_heads, "stem": "patch", "patch_size": 2, "img_size": (4, 6)}
    config = case.run(" in a network", contract, lambda: ModelConfig(**made, in_chans=1, num_classes=5))
    model = case.run(" in a network", contract, lambda: VisionModel(config)).eval()
    images = torch.randn(2, 1, 4, 6)
    with torch.no_grad():
        logits = case.run(" in a network", contract, lambda: model(images))
        case.need(logits.isfinite().all(), " in a network gives logits that are not finite", contract)
        traced = case.run(" in a traced network", contract, lambda: model.trace(images)).logits
        what = " in a network gives other logits when it is traced"
        case.need(_distance(traced, logits) <= 1e-5, what, "A trace shows what forward computed.")
        contract = "A saved network loads with its weights and options, and gives the same logits."
        with tempfile.TemporaryDirectory() as folder:
            again = case.run(" in a saved network", contract, lambda: load_model(save_model(model, Path(folder) / "saved")))
        same = torch.equal(case.run(" in a loaded network", contract, lambda: again(images)), logits)
        case.need(same, " in a network gives other logits after save_model and load_model", contract)


CHECKS = (
    _signature, _factory, _shapes, _refusals, _gradients, _samples, _modes, _decomposition, _empty, _network
)  # fmt: skip

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

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

    def fail(self, what: str, contract: str, error: BaseException | None = None) -> NoReturn:
        raise OperatorContractError(f"{self.name}{what}. {contract}") from error

    def run(self, what: str, contract: str, call: Callable[[], Any]) -> Any:
        """What `call` returns; whatever it raises is a broken promise."""
        try:
            return call()
        except Exception as error:
            self.fail(f"{what} raised {in_one_line(error)}", contract, error)

    def build(self, **given: Any) -> Operator:
        """One with weights as after some training: no zeros that hide what they are multiplied with."""
        given = {"dtype": torch.float64, **self.options, **given}
        made: Operator = self.run(
            f"({self.dim}, {self.num_heads}{_keywords(given)})",
            f"A network builds an operator with dim, num_heads and the keywords {', '.join(PASSED)}.",
            lambda: self.operator(self.dim, self.num_heads, **given),
        )
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
        if not isinstance(out, Tensor):
            self.fail(f".forward(z) returned {type(out).__name__}, not a tensor", contract)
        if out.shape != z.shape:
            self.fail(f".forward(z) changed the shape: {shape} in, {tuple(out.shape)} out", contract)
        if out.dtype != z.dtype and not torch.is_autocast_enabled("cpu"):
            self.fail(f".forward(z) changed the dtype: {z.dtype} in, {out.dtype} out", contract)
        return out

    def parts(self, made: Operator, z: Tensor, grid: Grid = GRID) -> Parts:
        contract = "decompose(z, grid=...) returns dmst.Parts: what forward computed on the way, None for what there is not."
        what = f".decompose(z, grid={grid}) with z of shape {tuple(z.shape)}"
        parts = self.run(what, contract, lambda: made.decompose(z, grid=grid))
        if not isinstance(parts, Parts):
            self.fail(f".decompose(z) returned {type(parts).__name__}", contract)
        return parts

    def load(self, made: Operator, weights: dict[str, Tensor]) -> None:
        contract = "The state dict of one operator fits another one that is built with the same options."
        self.run(".load_state_dict(weights)", contract, lambda: made.load_state_dict(weights))


def _keywords(given: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in given.items())


def _told(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"shape {tuple(value.shape)}" + ("" if value.isfinite().all() else ", not finite,")


def _differ(a: Tensor, b: Tensor) -> float:
    """Relative error."""
    return ((a - b).norm() / b.norm().clamp(min=1e-300)).item()


# --- what is promised ------------------------------------------------------------------------------------------------


def _signature(case: _Case) -> None:
    first, rest = (given := list(inspect.signature(case.operator.__init__).parameters.values())[1:])[:2], given[2:]
    contract = f"An operator is built as {case.name}(dim, num_heads, *, {', '.join(PASSED)}, then its own options by keyword)."
    names = [p.name for p in first]
    if names != ["dim", "num_heads"]:
        case.fail(f".__init__ begins with ({', '.join(names)})", contract)
    by_position = [p.name for p in rest if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    if by_position:
        case.fail(f".__init__ takes {by_position[0]!r} by position, so a network does not see it as an option", contract)
    missing = [name for name in PASSED if name not in {p.name for p in rest}]
    if missing and not any(p.kind is p.VAR_KEYWORD for p in rest):
        case.fail(f".__init__ does not take {missing[0]!r}", contract)


def _factory(case: _Case) -> None:
    """Networks are built on the meta device first, to check a config and to load weights."""
    contract = "Pass device and dtype on to every layer and parameter: networks are built on the meta device first."
    made = case.build(device="meta")
    for name, x in made.state_dict(keep_vars=True).items():
        if not x.is_meta:
            case.fail(f"(..., device='meta') made {name!r} on {x.device}", contract)
        if x.is_floating_point() and x.dtype != torch.float64:
            case.fail(f"(..., dtype=torch.float64) made {name!r} in {x.dtype}", contract)
    if unsaved := sorted({name for name, _ in made.named_buffers()} - made.state_dict().keys()):
        case.fail(
            f" keeps the buffer {unsaved[0]!r} out of its state dict",
            "load_model fills in what is saved and nothing else: save the buffer (persistent=True), or compute it in forward.",
        )
    made = made.to_empty(device="cpu")
    contract = "reset_parameters() gives every parameter its start; the base class knows the weights of nn.Linear only."
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(torch.nan)
    case.run(".reset_parameters()", contract, made.reset_parameters)
    for name, parameter in made.named_parameters():
        if not parameter.isfinite().all():
            case.fail(f".reset_parameters() leaves {name!r} as it was", contract)
    case.build(bias=False)


def _shapes(case: _Case) -> None:
    for n, grid in ((TOKENS, GRID), (1, (1, 1)), (63, (7, 9)), (197, (1, 197))):
        for training in (True, False):
            z = case.tokens(n=n, dtype=torch.float32)
            before = z.clone()
            out = case.update(case.build(dtype=torch.float32).train(training), z, grid)
            if not out.isfinite().all():
                case.fail(f".forward(z) is not finite for z of shape {tuple(z.shape)}", "Finite tokens get a finite update.")
            if not torch.equal(z, before):
                case.fail(".forward(z) changed z in place", "The tokens are the caller's: the residual still needs them.")


def _empty(case: _Case) -> None:
    made = case.build()
    for b, n in ((2, 0), (0, TOKENS)):
        z, grid = case.tokens(b, n).requires_grad_(), (GRID if n else (0, 0))
        out = case.update(made, z, grid)
        contract = "No tokens, or no samples, are input like any other."
        case.run(f".forward(z) with z of shape {tuple(z.shape)}, differentiated,", contract, out.sum().backward)
        for name, part in case.parts(made, z, grid)._asdict().items():
            if part is not None and part.shape[0] != b:
                case.fail(f".decompose(z).{name} has shape {tuple(part.shape)} for z of shape {tuple(z.shape)}", contract)


def _refusals(case: _Case) -> None:
    made = case.build(dtype=torch.float32)
    good = case.tokens(dtype=torch.float32)
    contract = (
        f"Tokens are (batch, tokens, {case.dim}) in the dtype of the weights, else a ShapeError: call self.check(z) first."
    )
    for bad in (good[0], good[..., 1:], good.double(), good.long()):
        for method in ("forward", "decompose"):
            what = f"{bad.dtype} tokens of shape {tuple(bad.shape)}"
            try:
                getattr(made, method)(bad, grid=GRID)
            except ShapeError:
                continue
            except Exception as error:
                case.fail(f".{method} raised {in_one_line(error)} for {what}", contract, error)
            case.fail(f".{method} took {what}", contract)


def _gradients(case: _Case) -> None:
    made, z = case.build(), case.tokens().requires_grad_()
    out = case.update(made, z)
    named = {"z": z, **dict(made.named_parameters())}
    contract = "Every parameter and the tokens get a finite gradient: an optimizer skips what has none."
    asked = (out * torch.randn_like(out)).sum()
    if not asked.requires_grad:
        case.fail(".forward(z) is detached from z", contract)
    found = case.run(
        ".forward(z), differentiated,", contract, lambda: torch.autograd.grad(asked, tuple(named.values()), allow_unused=True)
    )
    for (name, x), gradient in zip(named.items(), found, strict=True):
        if gradient is None:
            case.fail(f".forward(z) does not use {name!r}: it has no gradient", contract)
        if not gradient.isfinite().all():
            case.fail(f".forward(z) gives {name!r} a gradient that is not finite", contract)
        if gradient.norm() <= 1e-12 * (1 + x.norm()):
            case.fail(f".forward(z) does not depend on {name!r}: its gradient is 0", contract)


def _samples(case: _Case) -> None:
    made, z = case.build(), case.tokens()
    contract = "Samples are independent: no statistics over the batch."
    bad = z.clone()
    bad[1, 3, 5] = torch.nan
    for training in (True, False):
        made.train(training)
        with torch.set_grad_enabled(training):
            whole, alone, dirty = (case.update(made, x) for x in (z, z[2:], bad))
        if _differ(alone[0], whole[2]) > 1e-12:
            case.fail(".forward(z) changes for a sample when others are beside it", contract)
        if not torch.equal(dirty[[0, 2]], whole[[0, 2]]):
            case.fail(".forward(z) carries a NaN of one sample into others", contract)
        if not dirty[1].isnan().any():
            case.fail(".forward(z) hides a NaN of its tokens", "A NaN stays visible: training stops where it sees one.")


def _modes(case: _Case) -> None:
    made, z = case.build(), case.tokens()
    evaluated = case.update(made.eval(), z)
    contract = "With proj_drop=0 an operator is a function: pass options that switch random numbers of its own off."
    with torch.no_grad():
        for what, again in (
            ("a second call", case.update(made, z)),
            ("training mode", case.update(made.train(), z)),
        ):
            if _differ(again, evaluated) > 1e-10:
                case.fail(f".forward(z) differs in {what}", contract)
        contract = "Networks pass proj_drop: it drops parts of the update in training (nn.Dropout), nothing in evaluation."
        dropping = case.build(proj_drop=0.5)
        case.load(dropping, made.state_dict())
        if _differ(case.update(dropping.eval(), z), evaluated) > 1e-10:
            case.fail("(..., proj_drop=0.5) changes the update in evaluation mode", contract)
        if _differ(case.update(dropping.train(), z), evaluated) < 1e-10:
            case.fail("(..., proj_drop=0.5) changes nothing in training mode", contract)
        with torch.autocast("cpu", torch.bfloat16):
            plain = case.build(dtype=torch.float32)
            if not case.update(plain, z.float()).isfinite().all():
                case.fail(".forward(z) is not finite under autocast to bfloat16", "Networks are trained under autocast.")


def _decomposition(case: _Case) -> None:
    made, z = case.build().eval(), case.tokens()
    parts = case.parts(made, z)
    k = case.num_heads
    shapes = {
        "projected": (SAMPLES, k, TOKENS, None), "membership": (SAMPLES, k, TOKENS), "gate": (SAMPLES, k),
        "attention": (SAMPLES, k, None, None),
    }  # fmt: skip
    contract = "Parts are projected (b, k, n, p), membership (b, k, n), gate (b, k), attention (b, k, n, n) or (b, k, p, p)."
    for name, part in parts._asdict().items():
        if part is None:
            continue
        if part.ndim != len(shapes[name]) or any(a not in (None, b) for a, b in zip(shapes[name], part.shape, strict=True)):
            case.fail(f".decompose(z).{name} has shape {tuple(part.shape)} for {k} heads and z of {tuple(z.shape)}", contract)
        if not part.isfinite().all():
            case.fail(f".decompose(z).{name} is not finite", contract)
    if parts.membership is not None and (parts.membership < 0).any():
        case.fail(".decompose(z).membership is below 0", "A membership says how much a token belongs to a subspace: 0 or more.")
    _bases(case, made, z, parts)
    contract = "rate(z, *, eps, grid=None) returns one number a sample, (b,) in nats, or None."
    rate = case.run(".rate(z, eps=0.5)", contract, lambda: made.rate(z, eps=0.5, grid=GRID))
    if rate is not None and (not isinstance(rate, Tensor) or rate.shape != (SAMPLES,) or not rate.isfinite().all()):
        case.fail(f".rate(z, eps=0.5) gave {_told(rate)} for z of {tuple(z.shape)}", contract)


def _bases(case: _Case, made: Operator, z: Tensor, parts: Parts) -> None:
    contract = "subspaces() returns the bases U_k (k, d, p) that the tokens are projected on, or None."
    bases = case.run(".subspaces()", contract, made.subspaces)
    if bases is None:
        return
    if not isinstance(bases, Tensor) or bases.ndim != 3 or bases.shape[:2] != (case.num_heads, case.dim):
        case.fail(f".subspaces() gave {_told(bases)} for dim {case.dim} and {case.num_heads} heads", contract)
    if parts.projected is None:
        case.fail(".subspaces() gives bases, and .decompose(z).projected is None", contract)
    other = case.tokens()  # a difference, in which a bias cancels
    there = case.parts(made, other).projected
    assert there is not None
    expected = torch.einsum("bnd,kdp->bknp", other - z, bases)
    if expected.shape != there.shape or _differ(there - parts.projected, expected) > 1e-8:
        case.fail(".decompose(z).projected is not z times the bases that .subspaces() gives, but for a bias", contract)


def _network(case: _Case) -> None:
    """In a network: the same logits when traced, saved and loaded."""
    with _listed(case.operator) as name:
        contract = "A network is made with create_model(..., operator=NAME) and any option of the operator."
        own = {key: value for key, value in case.options.items() if key not in PASSED}
        bias = case.options.get("bias", True)
        config = case.run(" in a network", contract, lambda: ModelConfig(
            dim=case.dim, depth=2, num_heads=case.num_heads, operator=name, operator_options=own, qkv_bias=bias, stem="patch",
            patch_size=2, img_size=(4, 6), in_chans=1, num_classes=5,
        ))  # fmt: skip
        model = case.run(" in a network", contract, lambda: VisionModel(config)).eval()
        images = torch.randn(2, 1, 4, 6)
        with torch.no_grad():
            logits = case.run(" in a network", contract, lambda: model(images))
            if not logits.isfinite().all():
                case.fail(" in a network gives logits that are not finite", contract)
            if _differ(case.run(" in a traced network", contract, lambda: model.trace(images)).logits, logits) > 1e-5:
                case.fail(" in a network gives other logits when it is traced", "A trace shows what forward computed.")
            contract = "A saved network loads with its weights and options, and gives the same logits."
            with tempfile.TemporaryDirectory() as folder:
                saved = Path(folder) / "saved"
                again = case.run(" in a saved network", contract, lambda: load_model(save_model(model, saved)))
            if not torch.equal(case.run(" in a loaded network", contract, lambda: again(images)), logits):
                case.fail(" in a network gives other logits after save_model and load_model", contract)


@contextmanager
def _listed(operator: type[Operator]) -> Iterator[str]:
    """A name under which networks find the class, for a while."""
    name = f"check_operator:{operator.__module__}.{operator.__qualname__}"
    OPERATORS[name] = operator
    try:
        yield name
    finally:
        del OPERATORS[name]


CHECKS = (
    _signature, _factory, _shapes, _refusals, _gradients, _samples, _modes, _decomposition, _empty, _network
)  # fmt: skip

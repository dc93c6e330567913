"""Does an operator keep the contract? For the tests of operators that live outside this package, and for our own.

    from dmst.testing import check_operator

    def test_mean_pull():
        check_operator(MeanPull)
        check_operator(MeanPull, options={"pull": 0.3})

It builds the operator, calls it, and puts it into a small network, on the CPU, in a tenth of a second. Each check below states
a part of the contract (dmst/operators/base.py) as its docstring. The first one that fails raises `OperatorContractError`: what
the operator did, and that docstring. What cannot be known from outside is not asked: whether gradients are those of the forward
pass (an operator may stop them on purpose), or what a permutation of the tokens should do.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmst.errors import OperatorContractError, ShapeError, in_one_line
from dmst.models import ModelConfig, VisionModel, load_model, save_model
from dmst.models.config import OURS
from dmst.operators import OPERATORS, Operator, Parts
from dmst.operators.base import Grid

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
            try:
                check(case)
            except Exception as error:
                found = str(error) if type(error) is AssertionError else f"raised {in_one_line(error)}"
                contract = " ".join((check.__doc__ or "").split())
                raise OperatorContractError(f"{operator.__name__}{case.doing}: {found}. {contract}") from error


class _Case:
    """An operator and its options, and how it is built and called. `doing` is the call that errors name."""

    def __init__(self, operator: type[Operator], options: dict[str, Any], dim: int, num_heads: int) -> None:
        self.operator, self.options, self.dim, self.num_heads = operator, options, dim, num_heads
        self.doing = ""

    def build(self, **given: Any) -> Operator:
        """One with weights as after some training: no zeros that hide what they are multiplied with."""
        given = {"dtype": torch.float64, **self.options, **given}
        self.doing = "".join((f"({self.dim}, {self.num_heads}", *(f", {key}={value!r}" for key, value in given.items()), ")"))
        made = self.operator(self.dim, self.num_heads, **given)
        with torch.no_grad():
            for parameter in made.parameters():
                if not parameter.is_meta:
                    parameter.add_(torch.randn_like(parameter) * (parameter.shape[-1] if parameter.ndim > 1 else 4) ** -0.5)
        return made

    def tokens(self, b: int = SAMPLES, n: int = TOKENS, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(b, n, self.dim, dtype=dtype)

    def update(self, made: Operator, z: Tensor, grid: Grid = GRID) -> Tensor:
        self.doing = f".forward(z, grid={grid}) with z of shape {tuple(z.shape)}"
        out = made(z, grid=grid)
        assert isinstance(out, Tensor), f"returned {type(out).__name__}, not a tensor"
        assert out.shape == z.shape, f"returned shape {tuple(out.shape)}, not that of z"
        assert out.dtype == z.dtype or torch.is_autocast_enabled("cpu"), f"returned {out.dtype}, not the {z.dtype} of z"
        return out

    def parts(self, made: Operator, z: Tensor, grid: Grid = GRID) -> Parts:
        self.doing = f".decompose(z, grid={grid}) with z of shape {tuple(z.shape)}"
        parts = made.decompose(z, grid=grid)
        assert isinstance(parts, Parts), f"returned {type(parts).__name__}, not dmst.Parts"
        return parts


def _distance(a: Tensor, b: Tensor) -> float:
    """Relative error."""
    return ((a - b).norm() / b.norm().clamp(min=1e-300)).item()


# --- the checks: what is promised is the docstring -------------------------------------------------------------------


def _signature(case: _Case) -> None:
    """An operator is built with dim and num_heads, then by keyword bias, proj_drop, device, dtype and options of its own."""
    case.doing = ".__init__"
    dim, num_heads, *rest = list(inspect.signature(case.operator.__init__).parameters.values())[1:]
    assert (dim.name, num_heads.name) == ("dim", "num_heads"), f"begins with {dim.name!r} and {num_heads.name!r}"
    for p in rest:
        assert p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD), f"takes {p.name!r} by position"
    case.build(bias=False, proj_drop=0.0, device="cpu")


def _factory(case: _Case) -> None:
    """Networks are built on the meta device, then filled from a file: give device and dtype to every layer and parameter, save
    every buffer, and let reset_parameters() start every parameter (the base class starts nn.Linear only)."""
    made = case.build(device="meta")
    for name, x in made.state_dict(keep_vars=True).items():
        assert x.is_meta, f"made {name!r} on {x.device}"
        assert x.dtype == torch.float64 or not x.is_floating_point(), f"made {name!r} in {x.dtype}"
    for name, _ in made.named_buffers():
        assert name in made.state_dict(), f"keeps the buffer {name!r} out of its state dict"
    made = made.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(torch.nan)
    case.doing = ".reset_parameters()"
    made.reset_parameters()
    for name, parameter in made.named_parameters():
        assert parameter.isfinite().all(), f"leaves {name!r} as it was"


def _shapes(case: _Case) -> None:
    """Finite tokens get a finite update of their shape and dtype, also under autocast. The tokens themselves are the caller's:
    a residual still needs them."""
    least = case.build().least_tokens
    for n, grid in ((TOKENS, GRID), (1, (1, 1)), (63, (7, 9)), (197, (1, 197))):
        if n < least:
            continue
        for training in (True, False):
            made, z = case.build(dtype=torch.float32).train(training), case.tokens(n=n, dtype=torch.float32)
            before = z.clone()
            assert case.update(made, z, grid).isfinite().all(), "is not finite"
            assert torch.equal(z, before), "changed z in place"
            with torch.autocast("cpu", torch.bfloat16):
                assert case.update(made, z, grid).isfinite().all(), "is not finite under autocast"


def _refusals(case: _Case) -> None:
    """Tokens are (batch, tokens, dim) in the dtype of the weights, else a ShapeError: call self.check(z) first."""
    made, good = case.build(dtype=torch.float32), case.tokens(dtype=torch.float32)
    for bad in (good[0], good[..., 1:], good.double(), good.long()):
        for method in (made, made.decompose):
            case.doing = f".{'forward' if method is made else 'decompose'}(z)"
            try:
                method(bad, grid=GRID)
            except ShapeError:
                continue
            raise AssertionError(f"took {bad.dtype} tokens of shape {tuple(bad.shape)}")


def _gradients(case: _Case) -> None:
    """The tokens and every parameter get a finite gradient that is not 0: an optimizer skips what has none."""
    made, z = case.build(), case.tokens().requires_grad_()
    out = case.update(made, z)
    named = {"z": z, **dict(made.named_parameters())}
    found = torch.autograd.grad((out * torch.randn_like(out)).sum(), tuple(named.values()), allow_unused=True)
    for (name, x), gradient in zip(named.items(), found, strict=True):
        assert gradient is not None, f"does not use {name!r}"
        assert gradient.isfinite().all(), f"gives {name!r} a gradient that is not finite"
        assert gradient.norm() > 1e-12 * (1 + x.norm()), f"does not depend on {name!r}: its gradient is 0"


def _samples(case: _Case) -> None:
    """Samples are independent: no statistics over the batch. A NaN stays visible, and within its sample."""
    made, z = case.build(), case.tokens()
    bad = z.clone()
    bad[1, 3, 5] = torch.nan
    for training in (True, False):
        made.train(training)
        with torch.set_grad_enabled(training):
            whole, alone, dirty = (case.update(made, x) for x in (z, z[2:], bad))
        assert _distance(alone[0], whole[2]) <= 1e-12, "changes for a sample when others are beside it"
        assert torch.equal(dirty[[0, 2]], whole[[0, 2]]), "carries a NaN of one sample into others"
        assert dirty[1].isnan().any(), "hides a NaN of its tokens"


def _modes(case: _Case) -> None:
    """An operator is a function (options switch random numbers of its own off) but for proj_drop, which drops parts of the
    update in training and nothing in evaluation."""
    made, z = case.build(), case.tokens()
    dropping = case.build(proj_drop=0.5)
    dropping.load_state_dict(made.state_dict())
    evaluated = case.update(made.eval(), z)
    assert _distance(case.update(made, z), evaluated) <= 1e-10, "differs in a second call"
    assert _distance(case.update(made.train(), z), evaluated) <= 1e-10, "differs in training mode"
    assert _distance(case.update(dropping.eval(), z), evaluated) <= 1e-10, "differs in evaluation with proj_drop=0.5"
    assert _distance(case.update(dropping.train(), z), evaluated) >= 1e-10, "drops nothing in training with proj_drop=0.5"


def _decomposition(case: _Case) -> None:
    """Parts are projected (b, k, n, p), membership (b, k, n) or (b, k, g, n) of 0 or more, gate (b, k), attention (b, k, n, n)
    or (b, k, p, p), means and spreads of groups (b, k, g, p); None for what there is not. subspaces() are the bases U_k
    (k, d, p), or None; projected is their product with the tokens, plus a bias. rate(z, *, eps, grid=None) is one finite
    number per sample, (b,) in nats, or None."""
    made, z, other, k = case.build().eval(), case.tokens(), case.tokens(), case.num_heads
    parts = case.parts(made, z)
    each = (SAMPLES, k, None, None)
    membership = (SAMPLES, k, TOKENS) if parts.means is None else (SAMPLES, k, None, TOKENS)
    shapes = Parts((SAMPLES, k, TOKENS, None), membership, (SAMPLES, k), each, each, each)  # type: ignore[arg-type]
    for (name, part), shape in zip(parts._asdict().items(), shapes, strict=True):
        if part is not None:
            fits = part.ndim == len(shape) and all(a in (None, b) for a, b in zip(shape, part.shape, strict=True))  # type: ignore[arg-type]
            assert fits, f"{name} has shape {tuple(part.shape)} for {k} heads"
            assert part.isfinite().all(), f"{name} is not finite"
    assert parts.membership is None or (parts.membership >= 0).all(), "membership is below 0"
    if (bases := made.subspaces()) is not None:
        assert bases.ndim == 3 and bases.shape[:2] == (k, case.dim), f"subspaces() has shape {tuple(bases.shape)}"
        one, two = parts.projected, case.parts(made, other).projected
        assert one is not None and two is not None, "projected is None, and subspaces() gives bases"
        expected = torch.einsum("bnd,kdp->bknp", other - z, bases)  # a difference, in which a bias cancels
        assert expected.shape == one.shape and _distance(two - one, expected) <= 1e-8, "projected is not z times the bases"
    case.doing = ".rate(z, eps=0.5)"
    rate = made.rate(z, eps=0.5, grid=GRID)
    assert rate is None or (rate.shape == (SAMPLES,) and rate.isfinite().all()), f"returned {rate}"


def _empty(case: _Case) -> None:
    """No tokens, or no samples, are input like any other; with fewer tokens than its `least_tokens` a layer raises
    a ShapeError."""
    made = case.build()
    if made.least_tokens:
        try:
            made(case.tokens(n=made.least_tokens - 1))
        except ShapeError:
            pass
        else:
            raise AssertionError(f"took {made.least_tokens - 1} tokens, and least_tokens is {made.least_tokens}")
    for b, n, grid in ((2, 0, (0, 0)), (0, TOKENS, GRID))[bool(made.least_tokens) :]:
        z = case.tokens(b, n).requires_grad_()
        case.update(made, z, grid).sum().backward()
        for name, part in case.parts(made, z, grid)._asdict().items():
            assert part is None or part.shape[0] == b, f"{name} has shape {tuple(part.shape)}"


def _network(case: _Case) -> None:
    """A network is made with create_model(..., operator=NAME) and any option of the operator. Traced, or saved and loaded, it
    gives the same logits."""
    name = f"check_operator:{case.operator.__module__}.{case.operator.__qualname__}"
    own = {key: value for key, value in case.options.items() if key not in OURS}
    sizes: dict[str, Any] = {"dim": case.dim, "num_heads": case.num_heads, "qkv_bias": case.options.get("bias", True)}
    sizes |= {"depth": 2, "stem": "patch", "patch_size": 2, "img_size": (4, 6), "in_chans": 1, "num_classes": 5}
    OPERATORS[name] = case.operator  # networks find the class by a name
    try:
        case.doing = " in a network"
        model = VisionModel(ModelConfig(operator=name, operator_options=own, **sizes)).eval()
        images = torch.randn(2, 1, 4, 6)
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            logits = model(images)
            assert logits.isfinite().all(), "gives logits that are not finite"
            assert _distance(model.trace(images).logits, logits) <= 1e-5, "gives other logits when it is traced"
            case.doing = " in a saved network"
            again = load_model(save_model(model, Path(folder) / "saved"))
            assert torch.equal(again(images), logits), "gives other logits"
    finally:
        del OPERATORS[name]


CHECKS = (
    _signature, _factory, _shapes, _refusals, _gradients, _samples, _modes, _decomposition, _empty, _network,
)  # fmt: skip

"""The kernels in Gluon as plain torch: for machines that cannot run them, and to hold them against on those that can."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dmst.kernels import plan
from dmst.kernels.fused import hopper


def widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class Products:
    """`dmst.kernels.fused.hopper` in plain torch: what its kernels compute, for machines without a Hopper GPU."""

    @staticmethod
    def serves(*_: Any) -> bool:
        return True

    @staticmethod
    def product(
        x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        assert bias is None or bias.is_contiguous()  # a kernel has its address alone
        return Products._onto(nn.functional.linear(x, weight, bias), residual, keep)

    @staticmethod
    def hidden(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """By the kernel's own formula, of sums that are not rounded."""
        assert x.is_contiguous() and (bias is None or bias.is_contiguous())
        s = nn.functional.linear(widened(x), widened(weight), None if bias is None else widened(bias))
        return Products.gelu(s).to(x.dtype)

    @staticmethod
    def gelu(x: Tensor) -> Tensor:
        square = x * x
        q = torch.full_like(x, hopper.GELU.value[0])
        for more in hopper.GELU.value[1:]:
            q = q * square + more
        return x * (1 / (1 + torch.exp2(x * q)))

    @staticmethod
    def _onto(out: Tensor, residual: Tensor | None, keep: Tensor | None) -> Tensor:
        if residual is None:
            return out
        assert residual.shape == out.shape and residual.is_contiguous()
        assert keep is None or keep.shape == (out.shape[0], 1, 1)
        return (widened(residual) + (1 if keep is None else widened(keep)) * widened(out)).to(residual.dtype)

    @staticmethod
    def project(x: Tensor, weight: Tensor, bias: Tensor | None, membership: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, (_, n, d) = membership.shape[-1], x.shape
        s = widened(Products.product(x, weight, bias)).unflatten(-1, (k, d // k))
        parts = [(slice(first, first + 5)) for first in range(0, n, 5)]
        energy = torch.stack([(membership[:, at, :, None] * s[:, at].square()).sum(1) for at in parts], 1)
        mass = torch.stack([membership[:, at].sum(1) for at in parts], 1)
        return (membership[..., None] * s).to(x.dtype).flatten(2), energy, mass

    @staticmethod
    def fold_out(
        x: Tensor, weights: Tensor, bias: Tensor | None, residual: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        assert bias is None or bias.is_contiguous()
        out = x @ weights.mT
        return Products._onto(out if bias is None else out + bias, residual, keep)


class Resident:
    """`dmst.kernels.fused.resident` in plain torch."""

    @staticmethod
    def fits(*_: Any) -> bool:
        return True

    fits_pull = fits

    @staticmethod
    def settle(
        projected: Tensor, membership: Tensor, gate: Tensor | None, theta: Tensor | None, *,
        mode: str, sign: float, delta: float, uniform: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        s, c, pi, moment, divisor = Resident._core(projected, membership, gate, theta, mode, sign, delta, uniform)
        w = pi * c
        f = -w / (1 + w) if mode == "proximal" else w
        return (f * s).to(projected.dtype).flatten(2), moment, divisor

    @staticmethod
    def _core(
        projected: Tensor, membership: Tensor, gate: Tensor | None, theta: Tensor | None, mode: str, sign: float, delta: float,
        uniform: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        (b, _, d), k = projected.shape, membership.shape[-1]
        s = widened(projected).unflatten(-1, (k, d // k))
        weight = torch.ones_like(membership) if uniform else membership
        mass = weight.sum(1)
        divisor = mass + delta if delta else torch.where(mass > 0, mass, 1)
        moment = (weight[..., None] * s.square()).sum(1) / divisor[..., None]
        g = (torch.ones(b, k, dtype=s.dtype, device=s.device) if gate is None else gate)[..., None]
        a = 1 / (1 + g.square() * moment)
        size = {"listing": sign * g, "equation": sign * g.square(), "proximal": (1 if theta is None else theta) * g.square()}
        return s, (size[mode] * a)[:, None], membership[..., None], moment, divisor

    @staticmethod
    def pull(
        grad: Tensor, projected: Tensor, membership: Tensor, second_moment: Tensor, gate: Tensor | None, divisor: Tensor,
        theta: Tensor | None, *, mode: str, sign: float, uniform: bool, sigmoid: bool, wants_bias: bool, wants_update: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """By autograd, in float64, of the same update."""
        with torch.enable_grad():
            s = projected.detach().double().requires_grad_()
            pi = membership.detach().double().requires_grad_()
            g = None if gate is None else gate.detach().double().requires_grad_()
            t = None if theta is None else theta.detach().double().expand(s.shape[0], membership.shape[-1], 1).clone()
            t = None if t is None else t.requires_grad_()
            delta = (divisor.double() - membership.double().sum(1)).mean().item() if not uniform else 0.0
            update = Resident.settle(s, pi, g, t, mode=mode, sign=sign, delta=max(delta, 0.0), uniform=uniform)[0]
            asked = [x for x in (s, pi, g, t) if x is not None]
            found = dict(zip(map(id, asked), torch.autograd.grad(update, asked, grad.double().view_as(s)), strict=True))
        ds, dpi = found[id(s)], found[id(pi)]
        grad.copy_(ds.view_as(grad))
        dbias = ds.sum(1).unflatten(-1, (membership.shape[-1], -1)).unsqueeze(1).float() if wants_bias else None
        dpi = dpi * pi * (1 - pi) if sigmoid else dpi
        dtheta = None if t is None else found[id(t)].squeeze(-1).float()
        made = update.detach().to(projected.dtype) if wants_update else None
        return dpi.detach().float(), None if g is None else found[id(g)].float(), dtheta, dbias, made


class Stream:
    """`dmst.kernels.fused.stream` in plain torch, which holds A against what it must be."""

    @staticmethod
    def serves(*_: Any) -> bool:
        return True

    @staticmethod
    def pull(
        grad: Tensor, projected: Tensor, membership: Tensor, second_moment: Tensor, gate: Tensor | None, divisor: Tensor,
        theta: Tensor | None, total: Tensor, cut: Any, *, weighted: bool, wants_bias: bool, **options: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        b, k, p = second_moment.shape
        s = widened(projected).unflatten(-1, (k, p))
        pi = membership[..., None]
        s, early = (torch.where(pi > 0, s / pi, 0), s) if weighted else (s, pi * s)
        assert total.shape == (b, k, p) and total.dtype == torch.float32
        if options["mode"] == "proximal":
            g = 1 if gate is None else gate[..., None].square()
            early = early / (1 + pi * (g * (1 if theta is None else theta) / (1 + g * second_moment))[:, None]).square()
        torch.testing.assert_close(total, (widened(grad).view_as(s) * early).sum(1), rtol=1e-3, atol=1e-4)
        kept = (s.flatten(2), membership, second_moment, gate, divisor, theta)
        *found, dbias, _ = Resident.pull(grad, *kept, wants_bias=wants_bias, wants_update=False, **options)
        if dbias is not None:
            dbias = torch.cat([dbias, torch.zeros(b, cut.splits - 1, k, p)], 1)
        return *found, dbias  # type: ignore[return-value]


class Few:
    """`dmst.kernels.fused.few` in plain torch: sample by sample, with nothing of a silent head."""

    @staticmethod
    def serves(*_: Any) -> bool:
        return True

    @staticmethod
    def attend(
        z: Tensor, membership: Tensor, gate: Tensor, active: Tensor, theta: Tensor | None, weight_in: Tensor,
        weight_out: Tensor, bias_in: Tensor | None, bias_out: Tensor | None, out: Tensor, form: Any,
    ) -> None:  # fmt: skip
        for x in (z, weight_in, weight_out, out, membership, active):
            assert x.is_contiguous() and x.data_ptr() % 16 == 0
        p = z.shape[-1] // form.num_heads
        for i, (count, *heads) in enumerate(active.tolist()):
            if count * p > plan.FEW:
                continue
            made = torch.zeros_like(widened(z[i]))
            if count:
                on = torch.tensor(heads[:count], device=z.device)
                rows = (on[:, None] * p + torch.arange(p, device=z.device)).flatten()
                s = widened(z[i]) @ widened(weight_in[rows]).mT
                s = s if bias_in is None else s + widened(bias_in[rows])
                given = (s[None], membership[i : i + 1, :, on].contiguous(), gate[i : i + 1, on], theta)
                options = {"mode": form.mode, "sign": form.sign, "delta": form.delta, "uniform": False}
                update = Resident.settle(*given, **options)[0][0].to(z.dtype)
                made = widened(update) @ widened(weight_out[rows])
            out[i] = (made if bias_out is None else made + widened(bias_out)).to(out.dtype)


class Engine:
    """`dmst.kernels.fused.active_hopper` in plain torch: as wide as the kernels read and write, NaN beyond."""

    @staticmethod
    def serves(device: Any, dtype: torch.dtype, d: int, p: int) -> bool:
        return d % 64 == 0

    @staticmethod
    def project(
        z: Tensor, weight: Tensor, bias: Tensor | None, membership: Tensor, active: Tensor, weighted: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert z.is_contiguous() and weight.is_contiguous() and membership.is_contiguous()
        (b, n, d), k = z.shape, membership.shape[-1]
        p = d // k
        s, energy, mass = z.new_full((b, n, d), torch.nan), torch.full((b, 2, d), torch.nan), torch.full((b, 2, k), torch.nan)
        for i, (count, *heads) in enumerate(active.tolist()):
            on = torch.tensor(heads[:count], dtype=torch.long)
            rows = (on[:, None] * p + torch.arange(p)).flatten()
            made = widened(z[i]) @ widened(weight[rows]).mT
            made = made if bias is None else made + widened(bias[rows])
            pi = membership[i][:, on]
            weighed = pi.repeat_interleave(p, 1) * made
            s[i, :, : (count * p + 63) // 64 * 64] = 0
            s[i, :, : count * p] = (weighed if weighted else made).to(s.dtype)
            for part, tokens in enumerate((slice(0, n // 2), slice(n // 2, n))):
                energy[i, part, : count * p] = (weighed * made)[tokens].sum(0)
                mass[i, part, :count] = pi[tokens].sum(0)
        return s, energy.view(b, 2, k, p), mass

    @staticmethod
    def fold_out(s: Tensor, weights: Tensor, bias: Tensor | None, active: Tensor) -> Tensor:
        out, p = torch.empty_like(s), s.shape[-1] // (active.shape[1] - 1)
        for i, count in enumerate(active[:, 0].tolist()):
            wide = (count * p + 63) // 64 * 64
            made = widened(s[i, :, :wide]) @ widened(weights[i, :, :wide]).mT
            out[i] = (made if bias is None else made + widened(bias)).to(out.dtype)
        return out

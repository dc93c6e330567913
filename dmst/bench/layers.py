"""What is compared: one line a layer, all with the same bias (none before the output), the same weights and the same tokens.

    floor             the two projections alone, out(subspace(z)): the least that a layer of this kind can cost
    sdpa_p48, _p64    softmax attention by PyTorch's kernel, heads of 48 and of 64 channels
    xca, mssa         XCiT's and CRATE's, ours
    tssa_published    TSSA as ToST's code has it                 tssa    ours, plain or fused
    listing           DMSA as the paper prints it                dmsa    ours, plain or fused

The listing is given a rotary table as long as the tokens; as printed it stops at 4,096. Its gate sorts and never asks the host.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dmst.bench.published import AttentionDMSA, AttentionTSSA
from dmst.errors import choose
from dmst.kernels.choice import verdict
from dmst.operators import DMSA, MHSA, MSSA, TSSA, XCA, Operator

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CAST: dict[torch.dtype, Callable[[nn.Module], nn.Module]] = {  # not .to(dtype): it would make complex tables real
    torch.bfloat16: nn.Module.bfloat16,
    torch.float16: nn.Module.half,
    torch.float32: nn.Module.float,
}
KERNELS = {"torch": "auto", "reference": "reference", "fused": "fused"}  # backend -> use_kernels(...)
BACKENDS = tuple(KERNELS)
FAMILY = ("reference", "fused")
THEIRS = {"qkv": "subspace", "PI_linear": "assign", "to_out.0": "out", "temp": "temperature"}  # a published name -> ours
SEED = 0


class Contender(NamedTuple):
    """One layer of the comparison."""

    build: Callable[[int, int, int], nn.Module]  # (dim, heads, tokens)
    backends: tuple[str, ...] = ("torch",)
    width: int | None = None  # of a head, where it is fixed and the number of heads follows
    ours: type[Operator] | None = None  # of a published layer: the operator of ours that computes the same
    linear: bool = True  # in tokens; float64 can then check the very shape that is timed
    low: bool = False  # computes in the low dtype throughout, so that a looser bar holds


CONTENDERS: dict[str, Contender] = {
    "floor": Contender(lambda d, k, n: nn.Sequential(nn.Linear(d, d, bias=False), nn.Linear(d, d))),
    "sdpa_p48": Contender(lambda d, k, n: MHSA(d, k, bias=False), width=48, linear=False),
    "sdpa_p64": Contender(lambda d, k, n: MHSA(d, k, bias=False), width=64, linear=False),
    "xca": Contender(lambda d, k, n: XCA(d, k, bias=False)),
    "mssa": Contender(lambda d, k, n: MSSA(d, k, bias=False), linear=False),
    "tssa_published": Contender(lambda d, k, n: AttentionTSSA(d, k), ours=TSSA, low=True),
    "tssa": Contender(lambda d, k, n: TSSA(d, k, bias=False), FAMILY),
    "listing": Contender(lambda d, k, n: AttentionDMSA(d, k, tokens=max(n, 4096)), ours=DMSA, low=True),
    "dmsa": Contender(lambda d, k, n: DMSA(d, k, bias=False), FAMILY),
}


def heads_of(what: str, dim: int, heads: int) -> int:
    """How many heads this layer has where `heads` are asked for."""
    width = CONTENDERS[what].width
    return heads if width is None else dim // width


def made(what: str, dim: int, heads: int, tokens: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The layer with weights of nn.Linear's size: every head is on. Biases are a tenth of it: large ones hide errors."""
    choose("layer", what, CONTENDERS)
    layer = CONTENDERS[what].build(dim, heads_of(what, dim, heads), tokens)
    chance = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            bound = (0.1 if name.endswith("bias") else 1.0) * dim**-0.5
            parameter.fill_(1) if "temp" in name else parameter.uniform_(-bound, bound, generator=chance)
    return CAST[dtype](layer).to(device)


def exact(what: str, layer: nn.Module, dim: int, heads: int) -> nn.Module:
    """The same function with the same (rounded) weights in float64; of a published layer, ours."""
    ours = CONTENDERS[what].ours
    if ours is None:
        return copy.deepcopy(layer).double()
    twin = ours(dim, heads, bias=False, dtype=torch.float64)  # type: ignore[call-arg]
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            twin.get_parameter(our_name(what, name)).copy_(parameter)
    return twin.to(next(layer.parameters()).device)


def our_name(what: str, name: str) -> str:
    """What we call a parameter of a published layer; ours keep their names."""
    if CONTENDERS[what].ours is None:
        return name
    stem = next(stem for stem in THEIRS if name == stem or name.startswith(stem + "."))
    return THEIRS[stem] + name[len(stem) :]


def active_heads(twin: nn.Module, z: Tensor, heads: int) -> float:
    """Heads whose gate is not zero, the mean over samples; all of them where there is no gate."""
    if not isinstance(twin, DMSA):
        return float(heads)
    with torch.no_grad():
        gate = twin.decompose(z).gate
    assert gate is not None
    return round((gate != 0).sum(1).double().mean().item(), 3)


def left_out(what: str, backend: str, dim: int, heads: int, device: torch.device, dtype: torch.dtype) -> str:
    """Why this layer cannot be measured here; nothing where it can."""
    width = CONTENDERS[what].width
    if width is not None and dim % width:
        return f"dim {dim} is not a multiple of {width}"
    if backend == "fused":
        answer = verdict(device, dtype, DMSA(dim, heads, device="meta").form, dim, "fused")
        if not answer.fused:
            return answer.why + (" (TRITON_INTERPRET=1 runs them on a CPU, slowly)" if device.type == "cpu" else "")
    return ""

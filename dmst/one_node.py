"""A module that graph tracers of Python code take as one node: its forward asks for sizes, dtypes or devices.

torch.fx calls a network with proxies, which stand for tensors and have none of these. PyTorch's own layers are nodes of such a
graph (`call_module`) and ask when the graph runs; a layer made of this class is one likewise, in every network that holds it.
torch.jit.script reads source text, which it does not understand here, and is told so.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from torch.fx import Proxy

from dmst.errors import OptionError


class OneNode(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Proxy):
                return self._node(x.tracer, args, kwargs)
        return super().__call__(*args, **kwargs)

    def _node(self, tracer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        """What a tracer does with a layer of PyTorch; it keeps its books in `call_module`."""

        def leaf(*args: Any, **kwargs: Any) -> Proxy:
            return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)

        return tracer.call_module(self, leaf, args, kwargs)

    def __prepare_scriptable__(self) -> NoReturn:
        name = type(self).__name__
        raise OptionError(f"torch.jit.script cannot read {name}: use torch.export.export or torch.jit.trace.")

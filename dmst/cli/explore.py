"""`dmst explore`."""

from __future__ import annotations

import typer

from dmst.terminal import say

MODELS = typer.Option(
    ["dmst_cifar10", "tost_cifar10"],
    "--model",
    help="A shipped network (`dmst models --shipped`), a saved model, or a finished run. Repeatable.",
)


def explore(
    model: list[str] = MODELS,
    host: str = typer.Option("127.0.0.1", help="Address to listen on. If others can reach it, the link contains a token."),
    port: int = typer.Option(0, min=0, max=65535, help="Port; 0 takes any free one."),
    no_open: bool = typer.Option(False, "--no-open", help="Do not open the browser."),
    device: str = typer.Option("cpu", help="cpu, cuda or cuda:N."),
) -> None:
    """Open a page in the browser: see what networks compute for a picture.

    Choose a picture, look inside, switch heads off.

    dmst explore

    dmst explore --model runs/mine --model dmst_cifar10

    Works offline. Pictures stay in the memory of this process.
    """
    from dmst.engine.distributed import joined
    from dmst.errors import need

    for module in ("starlette", "uvicorn"):
        need(module, "explore")
    from dmst.explorer.server import serve

    with joined(device) as group:
        serve(model, host=host, port=port, browser=not no_open, device=group.device, tell=say)

"""Networks in other trainers: the loops of docs/training.md, where their library is installed; and FSDP2 in two processes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dmst
from dmst import load_model

ROOT = Path(dmst.__file__).parents[1]
BLOCKS = (ROOT / "docs/training.md").read_text().partition("## Training elsewhere")[2].split("```py\n")[1:]
CODES = [block.partition("```")[0] for block in BLOCKS]

SHARDED = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, folder):
    import dmst
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    options = {"depth": 2, "img_size": 64, "num_classes": 5}
    model, plain = (dmst.create_model("gmst_large", **options) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for net in (model, plain):
        net.stem.eval()  # its batch norm would see half of the images
    images = torch.randn(4, 3, 64, 64)
    for net, mine in ((model, images[2 * rank : 2 * rank + 2]), (plain, images)):
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(2):
            net(mine).logsumexp(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        whole = dmst.create_model("gmst_large", **options)
        whole.load_state_dict(state)
        dmst.save_model(whole, folder + "/sharded")
        dmst.save_model(plain, folder + "/plain")
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""

HERE = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"


def run(code: str, folder: Path, *words: str) -> None:
    (folder / "program.py").write_text(code)
    command = [sys.executable, str(folder / "program.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.process
@pytest.mark.parametrize(("library", "saved"), [("accelerate", "accelerated"), ("lightning", "lightened")])
def test_the_loops_of_the_page(library: str, saved: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library}")
    (code,) = (code for code in CODES if f"import {library}" in code or f"from {library}" in code)
    run(f"{HERE}from benchmarks.with_timm import import_timm\nimport_timm()\n{code}", tmp_path)  # torchvision of any build
    model = load_model(tmp_path / saved)
    assert model.num_classes == 3 and model(torch.randn(2, 1, 8, 8)).isfinite().all()


@pytest.mark.process
def test_a_large_network_is_sharded_over_two_processes(tmp_path: Path) -> None:
    """And learns what the whole one learns; gathered, it is saved and loaded as ours."""
    run(HERE + SHARDED, tmp_path, str(tmp_path))
    sharded, plain = (load_model(tmp_path / name).state_dict() for name in ("sharded", "plain"))
    assert sum(x.numel() for x in sharded.values()) > 25e6
    for name, x in plain.items():
        torch.testing.assert_close(sharded[name], x, atol=1e-6, rtol=1e-5)

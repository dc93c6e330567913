"""Every test starts from one seed, on one thread, and so do the processes it starts: two workers share two cores.

Without a CUDA device the fused kernels run in Triton's interpreter. Triton reads its variable when it is imported, so it is set
here, before any test is.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

from tests.untraced import count_once, load_others, untraced  # isort: split

import pytest
import torch
from hypothesis import settings

from tests.quick import quicken

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # children that wait for each other's cores took ten times as long
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
load_others()
settings.register_profile("dmst", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("dmst")

# Their time goes into other people's Python (compilers, Triton's interpreter, Hypothesis), which coverage's tracer makes two to
# three times as slow: they run without it. What is covered is counted by the others, and so never too high.
UNTRACED = (
    "test_traced.py", "test_models.py::test_compiled", "test_models.py::test_exported", "test_models.py::test_an_exported",
    "test_operator_contract.py::test_gradcheck", "test_fused.py::",
    "test_loader.py::test_no_global_generator", "test_loader.py::test_compiled", "test_orthonormal.py::test_a_traced",
    "test_fused_step.py::", "test_tape.py::test_every", "test_recompute.py::test_fused",
    "test_recompute.py::test_compiled", "test_recompute.py::test_a_compiled",
    "test_fused_active.py::", "test_train.py::test_a_compiled_run", "test_stems.py::test_compiled",
    "test_stems.py::test_recorded",
    "test_model_pieces.py::test_class_attention_compiled", "test_models.py::test_the_trace_of_a_compiled",
    "test_fused_registration.py::test_compiles", "test_fused_registration.py::test_opcheck",
    "test_zoo.py::test_every_listed_model", "test_zoo.py::test_a_config", "test_recipe.py::test_round_trip",
    "test_model_files.py::test_any_header", "test_gate_positions.py::test_gradients",
    "test_orthonormal.py::test_a_matrix",
    "test_timm.py::test_files", "test_timm_contract.py::test_forward", "test_timm_contract.py::test_default",
    "test_precision.py::",
    "test_counts.py::test_operators_on_one_skeleton",
    "test_fused_registration.py::test_a_compiled", "test_fused_registration.py::test_export",
    "test_fused_registration.py::test_ddp",
)  # fmt: skip
TRACED = (
    "test_fused_active.py::test_any_set",
    "test_fused_active.py::test_a_kernel",
    "test_fused.py::test_parity_of_every_form",
    "test_fused.py::test_scores_by_position",
    "test_fused_step.py::test_parity[",
    "test_fused_step.py::test_where",
    "test_fused_step.py::test_a_kernel",
    "test_fused_step.py::test_a_second",
    "test_fused_step.py::test_fake",
    "test_fused_step.py::test_the_operators",
)

LONGEST = (
    "test_traced", "test_models", "test_explorer_page", "test_fused_compile", "test_tape", "test_fused", "test_fused_step",
    "test_docs", "test_explorer_server", "test_fused_registration", "test_gpu_runner", "test_quick",
    "test_train_kills", "test_checkpoint_kills", "test_distributed", "test_train", "test_timm",
    "test_timm_contract",
)  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fixtures too."""
    name = item.nodeid[item.nodeid.find(item.path.name) :]
    if not name.startswith(UNTRACED) or name.startswith(TRACED):
        return (yield)
    with untraced():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no process waits for another one's last file; tests/gpu.py has an order of its own."""
    if "DMST_VERDICTS" in os.environ:
        return
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look through all of it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def quickened() -> Iterator[pytest.MonkeyPatch]:
    """Triton's interpreter, where it is on."""
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as other:
        if os.environ.get("TRITON_INTERPRET") == "1":
            quicken(patch)
            count_once(other)
        yield patch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

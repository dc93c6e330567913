"""What version 0.1.0 wrote still loads: a saved model, and a run that was cut off after step 8 of 12."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import torch

import dmst
from dmst.engine.train_loop import train
from tests.runs import EVERYTHING, digests, tiny

BEFORE = Path(__file__).parent / "fixtures/before"


def test_a_saved_model_answers_the_same() -> None:
    model = dmst.load_model(BEFORE / "model")
    images = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8)
    assert model.class_names[:2] == ("zero", "one")
    torch.testing.assert_close(model(images), torch.tensor(json.loads((BEFORE / "logits.json").read_text())))


def test_a_run_goes_on_to_the_same_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(BEFORE / "run", run)
    made_on = json.loads((run / "journal.jsonl").read_text().partition("\n")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says what is not as it was on the machine of the run
        result = train(tiny(*EVERYTHING), run)
    assert [event["step"] for event in result.journal if event["event"] == "step"] == list(range(1, 13))
    assert result.score is not None and result.score.images == 359
    here = {"torch": torch.__version__, "instructions": torch.backends.cpu.get_cpu_capability()}
    if here == {"torch": made_on["versions"]["torch"], "instructions": made_on["machine"]["instructions"]}:
        final = "final/model.safetensors"
        assert digests(run)[final] == json.loads((BEFORE / "ends.json").read_text())[final]

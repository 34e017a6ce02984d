"""Dimensions: those of four models, what is derived, and bad files."""

import json
import re

import pytest

from model.perf.language_model import LanguageModel, packaged, read_model

DENSE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


@pytest.fixture
def config(tmp_path):
    def write(*without, **changes):
        path = tmp_path / "config.json"
        content = {key: value for key, value in (DENSE | changes).items() if key not in without}
        path.write_text(json.dumps(content))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("name", "weights", "active"),
    [
        ("llama-3-70b", 69.5, 69.5),
        ("qwen3-8b", 7.57, 7.57),
        ("minimax-m2", 228.1, 10.4),
        ("smollm2-135m", 0.1345, 0.1345),
    ],
)
def test_packaged_models_have_the_weights_that_they_are_named_for(name, weights, active):
    model = read_model(name)
    assert model.weights() / 1e9 == pytest.approx(weights, rel=0.002)
    assert model.weights(active=True) / 1e9 == pytest.approx(active, rel=0.002)
    assert name in packaged()
    assert len(packaged()) == 4


def test_a_folder_a_nested_config_and_experts(config, tmp_path):
    config()
    model = read_model(str(tmp_path))
    assert (model.head_size, model.dense_layers, model.experts) == (16, 2, 0)
    config(
        head_dim=24,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[0],
        n_shared_experts=1,
    )
    model = read_model(str(tmp_path / "config.json"))
    assert (model.head_size, model.dense_layers, model.expert_hidden, model.shared_hidden) == (24, 1, 32, 32)
    (tmp_path / "other.json").write_text(json.dumps({"text_config": DENSE}))
    assert read_model(str(tmp_path / "other.json")) == LanguageModel("other", 2, 64, 100, 4, 2, 16, 2, 96)


@pytest.mark.parametrize(
    ("without", "changes", "message"),
    [
        (["hidden_size"], {}, "CONFIG must have hidden_size"),
        (["intermediate_size"], {}, "CONFIG must have intermediate_size"),
        ([], {"num_hidden_layers": 0}, "num_hidden_layers of CONFIG must be at least 1, not 0"),
        (
            [],
            {"hidden_size": 66},
            "hidden_size of CONFIG must be a multiple of num_attention_heads = 4 without head_dim, not 66",
        ),
        (
            [],
            {"num_key_value_heads": 3},
            "num_attention_heads of CONFIG must be a multiple of num_key_value_heads = 3, not 4",
        ),
        ([], {"vocab_size": "many"}, "vocab_size of CONFIG must be an integer from 0 on, not 'many'"),
        ([], {"vocab_size": True}, "vocab_size of CONFIG must be an integer from 0 on, not True"),
        ([], {"intermediate_size": 0}, "hidden must be at least 1, not 0"),
        ([], {"num_experts": 4}, "CONFIG must have num_experts_per_tok or moe_topk"),
        ([], {"num_experts": 4, "num_experts_per_tok": 5}, "experts_per_token must be at most 4 experts, not 5"),
        ([], {"kv_lora_rank": 512}, "kv_lora_rank of CONFIG must be null: latent attention has other products"),
        (
            [],
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types of CONFIG must be full_attention alone, not linear_attention",
        ),
        ([], {"sliding_window": 4096}, "sliding_window of CONFIG must be null, not 4096"),
    ],
)
def test_a_wrong_config_is_refused_in_one_line(config, without, changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_model(config(*without, **changes))


def test_what_is_no_config(tmp_path):
    path = tmp_path / "x.json"
    for text, message in (("[]", "CONFIG must hold an object"), ("{", "CONFIG must be JSON: ")):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"^{message}"):
            read_model(str(path))
    with pytest.raises(FileNotFoundError, match=r"^CONFIG must be a config.json or one of .*, not 'nowhere'$"):
        read_model("nowhere")

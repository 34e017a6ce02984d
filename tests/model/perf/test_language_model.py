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


# Parameters as published, and those of the embedding, which is no product, unless the head is the same.
PUBLISHED = [
    ("Llama-3.1-8B", 8.030, 128256 * 4096, (32, 4096, 14336, 32, 8, 128256), {"model_type": "llama"}),
    (
        "Qwen2.5-7B",
        7.616,
        152064 * 3584,
        (28, 3584, 18944, 28, 4, 152064),
        {"sliding_window": 131072, "use_sliding_window": False},
    ),
    ("Mistral-7B-v0.3", 7.248, 32768 * 4096, (32, 4096, 14336, 32, 8, 32768), {"sliding_window": None}),
    ("Phi-3-medium", 13.960, 32064 * 5120, (40, 5120, 17920, 40, 10, 32064), {"model_type": "phi3"}),
    ("SmolLM3-3B", 3.075, 0, (36, 2048, 11008, 16, 4, 128256), {"layer_types": ["full_attention"] * 36}),
    (
        "Mixtral-8x7B",
        46.703,
        32000 * 4096,
        (32, 4096, 14336, 32, 8, 32000),
        {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    (
        "OLMoE-1B-7B",
        6.919,
        50304 * 2048,
        (16, 2048, 1024, 16, 16, 50304),
        {"num_experts": 64, "num_experts_per_tok": 8},
    ),
    (
        "Qwen3-30B-A3B",
        30.532,
        151936 * 2048,
        (48, 2048, 6144, 32, 4, 151936),
        {
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "mlp_only_layers": [],
        },
    ),
    (
        "Qwen1.5-MoE-A2.7B",
        14.316,
        151936 * 2048,
        (24, 2048, 5632, 16, 16, 151936),
        {
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    (
        "DeepSeekMoE-16B",
        16.376,
        102400 * 2048,
        (28, 2048, 10944, 16, 16, 102400),
        {
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
        },
    ),
]


@pytest.mark.parametrize(
    ("name", "billions", "embedding", "sizes", "more"), PUBLISHED, ids=[each[0] for each in PUBLISHED]
)
def test_weights_are_those_that_were_published(config, name, billions, embedding, sizes, more):
    keys = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    found = read_model(config(**dict(zip(keys, sizes, strict=True)), **more)).weights()
    assert (found + embedding) / 1e9 == pytest.approx(billions, rel=0.0007)


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
        ([], {"num_hidden_layers": 0}, "num_hidden_layers of CONFIG must be an integer from 1 to 16777216, not 0"),
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
        ([], {"vocab_size": "many"}, "vocab_size of CONFIG must be an integer from 1 to 16777216, not 'many'"),
        ([], {"vocab_size": True}, "vocab_size of CONFIG must be an integer from 1 to 16777216, not True"),
        ([], {"intermediate_size": 0}, "intermediate_size of CONFIG must be an integer from 1 to 16777216, not 0"),
        (
            [],
            {"num_hidden_layers": 10**9},
            "num_hidden_layers of CONFIG must be an integer from 1 to 16777216, not 1000000000",
        ),
        ([], {"hidden_size": float("inf")}, "hidden_size of CONFIG must be an integer from 1 to 16777216, not inf"),
        ([], {"head_dim": 0}, "head_dim of CONFIG must be an integer from 1 to 16777216, not 0"),
        ([], {"text_config": [1]}, "text_config of CONFIG must be an object, not [1]"),
        ([], {"layer_types": "full"}, "layer_types of CONFIG must be a list, not 'full'"),
        (
            [],
            {"model_type": "gpt_neox"},
            "model_type of CONFIG must be of those with full attention and gated feed-forward layers "
            "(docs/performance-model.md), or left out, not 'gpt_neox'",
        ),
        ([], {"num_experts": 4}, "CONFIG must have num_experts_per_tok or moe_topk"),
        (
            [],
            {"num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok of CONFIG must be at most 4 experts, not 5",
        ),
        ([], {"kv_lora_rank": 512}, "kv_lora_rank of CONFIG must be null: latent attention has other products"),
        (
            [],
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types of CONFIG must be full_attention alone, not linear_attention",
        ),
        (
            [],
            {"sliding_window": 4096},
            "sliding_window of CONFIG must be null, not 4096: attention over a part of the keys has other products",
        ),
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
    path.write_text("\ufeff" + json.dumps(DENSE), encoding="utf-8")
    assert read_model(str(path)).width == 64
    with pytest.raises(FileNotFoundError, match=r"^CONFIG must be a config.json or one of .*, not 'nowhere'$"):
        read_model("nowhere")

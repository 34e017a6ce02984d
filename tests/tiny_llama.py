"""A tiny random Llama, written as a GGUF file and as a Hugging Face folder."""

import json

import gguf
import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers

TINY = {"layers": 2, "width": 12, "hidden": 20, "heads": 6, "kv_heads": 2, "size": 4, "tokens": 300}
BASE, EPSILON = 10000.0, 2.0**-17


def tiny_tensors(seed=3, sizes=TINY):
    rng = np.random.default_rng(seed)
    w, h = sizes["width"], sizes["hidden"]
    q, kv = sizes["heads"] * sizes["size"], sizes["kv_heads"] * sizes["size"]
    shapes = {"token_embd": (sizes["tokens"], w), "output_norm": (w,), "output": (sizes["tokens"], w)}
    for i in range(sizes["layers"]):
        block = {
            "attn_norm": (w,), "attn_q": (q, w), "attn_k": (kv, w), "attn_v": (kv, w), "attn_output": (w, q),
            "ffn_norm": (w,), "ffn_gate": (h, w), "ffn_up": (h, w), "ffn_down": (w, h),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path, tensors, architecture="llama", pre="smollm", rotated=None, more=(), sizes=TINY, blocks=None):
    """Write a GGUF file; ``blocks`` gives tensors that are quantised already, with their types."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(sizes["layers"])
    writer.add_context_length(16)
    writer.add_embedding_length(sizes["width"])
    writer.add_feed_forward_length(sizes["hidden"])
    writer.add_head_count(sizes["heads"])
    writer.add_head_count_kv(sizes["kv_heads"])
    writer.add_key_length(sizes["size"])
    writer.add_rope_dimension_count(sizes["size"] if rotated is None else rotated)
    writer.add_rope_freq_base(BASE)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([f"t{i}" for i in range(sizes["tokens"])])
    writer.add_token_types([1] * sizes["tokens"])
    writer.add_token_merges(["t 0", "t 1"])
    for name, value in more:
        writer.add_string(name, value)
    for name, tensor in tensors.items():
        if name in (blocks or {}):
            data, kind = blocks[name]
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def folder_tensors(tensors, size=TINY["size"]):
    """The same tensors by the names of Hugging Face, rows that rotate together half a head apart."""
    names = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    out = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] != "blk":
            out[f"{top[parts[0]]}.weight"] = tensor
            continue
        if parts[2] in ("attn_q", "attn_k"):
            heads = [tensor[at : at + size] for at in range(0, len(tensor), size)]
            tensor = np.concatenate([part for head in heads for part in (head[0::2], head[1::2])])
        out[f"model.layers.{parts[1]}.{names[parts[2]]}.weight"] = tensor
    return out


def config_of(sizes):
    """What config.json says of such a model."""
    return {
        "model_type": "llama", "num_hidden_layers": sizes["layers"], "hidden_size": sizes["width"],
        "intermediate_size": sizes["hidden"], "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"], "head_dim": sizes["size"], "vocab_size": sizes["tokens"],
        "max_position_embeddings": 16, "rope_theta": BASE, "rms_norm_eps": EPSILON, "hidden_act": "silu",
        "tie_word_embeddings": False,
    }  # fmt: skip


TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def save(path, tensors, kind="F32"):
    """Write a safetensors file, all tensors of one type."""
    path.write_bytes(safetensors.numpy.save({name: tensor.astype(TYPES[kind]) for name, tensor in tensors.items()}))


def save_codes(path, tensors):
    """Write a safetensors file, each tensor of its own type."""
    path.write_bytes(safetensors.numpy.save({name: np.array(t) for name, t in tensors.items()}))


def write_folder(folder, tensors, kind="F32", shards=1, sizes=TINY, **changes):
    """Write config.json, tokenizer.json and the tensors, which are named as Hugging Face does."""
    folder.mkdir()
    config = {key: value for key, value in (config_of(sizes) | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {f"t{i}": i for i in range(sizes["tokens"])}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0")).save(str(folder / "tokenizer.json"))
    if shards == 1:
        save(folder / "model.safetensors", tensors, kind)
        return folder
    places = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for place in sorted(set(places.values())):
        save(folder / place, {name: tensor for name, tensor in tensors.items() if places[name] == place}, kind)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder

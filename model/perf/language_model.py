"""Dimensions of language models, from the ``config.json`` of Hugging Face: dense and mixture-of-experts, grouped-query attention."""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

__all__ = ["LanguageModel", "packaged", "read_model"]

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_topk")
_LARGEST = 2**24

# fmt: off
FAMILIES = frozenset(
    (
        "cohere", "deepseek", "ernie4_5", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_oss",
        "granite", "granitemoe", "granitemoeshared", "helium", "llama", "minimax_m2", "mistral", "mixtral", "olmo",
        "olmo2", "olmoe", "phi3", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl",
        "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3",
        "stablelm",
    )
)
# fmt: on
"""Values of ``model_type`` whose layers are what :class:`LanguageModel` says; others have the same keys for something else."""


@dataclass(frozen=True)
class LanguageModel:
    """What the products of a decoder-only transformer with gated feed-forward layers depend on.

    Attributes
    ----------
    name : str
    layers, width, vocabulary : int
        Decoder layers, elements of the residual stream, tokens.
    heads, kv_heads, head_size : int
        Query heads, key/value heads, elements of a head.
    dense_layers, hidden : int
        Layers with one feed-forward network, and the elements inside it; the other layers have experts.
    experts, experts_per_token, expert_hidden, shared_hidden : int
        Experts of a layer, those that a token goes to, the elements inside one, and inside the part that all tokens go to; 0 if there is none.

    Raises
    ------
    ValueError
        A number is not positive, or numbers do not fit each other.
    """

    name: str
    layers: int
    width: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int
    dense_layers: int
    hidden: int
    experts: int = 0
    experts_per_token: int = 0
    expert_hidden: int = 0
    shared_hidden: int = 0

    def __post_init__(self) -> None:
        positive = ["layers", "width", "vocabulary", "heads", "kv_heads", "head_size"]
        positive += ["hidden"] if self.dense_layers else []
        positive += ["experts", "experts_per_token", "expert_hidden"] if self.dense_layers < self.layers else []
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads = {self.kv_heads}, not {self.heads}")
        if not 0 <= self.dense_layers <= self.layers:
            raise ValueError(f"dense_layers must be from 0 to {self.layers} layers, not {self.dense_layers}")
        if self.shared_hidden < 0:
            raise ValueError(f"shared_hidden must not be negative, not {self.shared_hidden}")
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token must be at most {self.experts} experts, not {self.experts_per_token}")

    @property
    def attention_weights(self) -> int:
        """Weights of a layer's q, k, v and o."""
        return self.width * self.head_size * 2 * (self.heads + self.kv_heads)

    def weights(self, *, active: bool = False) -> int:
        """Return the weights of all layers and of the head; with ``active`` those that one token meets.

        Examples
        --------
        >>> read_model("qwen3-8b").weights() / 1e9
        7.56809728
        """
        sparse = self.layers - self.dense_layers
        count = self.experts_per_token if active else self.experts
        expert = 3 * self.width * (count * self.expert_hidden + self.shared_hidden) + self.width * self.experts
        dense = 3 * self.width * self.hidden
        total = self.layers * self.attention_weights + self.dense_layers * dense + sparse * expert
        return total + self.width * self.vocabulary


def packaged() -> list[str]:
    """Return the names of the models whose dimensions come with this package."""
    folder = resources.files("model.perf") / "configs"
    return sorted(path.name.removesuffix(".json") for path in folder.iterdir() if path.name.endswith(".json"))


def read_model(name: str) -> LanguageModel:
    """Read dimensions.

    Parameters
    ----------
    name : str
        One of :func:`packaged`, a ``config.json`` or a folder that has one.

    Raises
    ------
    OSError
        There is no such file, or it cannot be read.
    ValueError
        It is no JSON, lacks a number, or describes a model that the equations do not hold for; says which key and why.
    """
    if name in packaged():
        text = (resources.files("model.perf") / "configs" / f"{name}.json").read_text(encoding="utf-8")
        return _parsed(name, text)
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"CONFIG must be a config.json or one of {', '.join(packaged())}, not {name!r}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"CONFIG must be JSON in UTF-8: {error}") from None
    return _parsed(path.parent.name if path.name == "config.json" and path.parent.name else path.stem, text)


def _parsed(name: str, text: str) -> LanguageModel:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"CONFIG must be JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("CONFIG must hold an object")
    nested = found.get("text_config")
    if not isinstance(nested, dict | None):
        raise ValueError(f"text_config of CONFIG must be an object, not {nested!r}")
    content: dict[str, Any] = found if nested is None else nested

    def get(*keys: str, default: int | None = None, least: int = 1) -> int:
        for key in keys:
            value = content.get(key)
            if value is None:
                continue
            if type(value) is not int or not least <= value <= _LARGEST:
                raise ValueError(f"{key} of CONFIG must be an integer from {least} to {_LARGEST}, not {value!r}")
            return value
        if default is None:
            raise ValueError(f"CONFIG must have {' or '.join(keys)}")
        return default

    _refuse(content)
    layers, width, heads = get("num_hidden_layers"), get("hidden_size"), get("num_attention_heads")
    if content.get("head_dim") is None and width % heads:
        raise ValueError(
            f"hidden_size of CONFIG must be a multiple of num_attention_heads = {heads} without head_dim, not {width}"
        )
    kv_heads = get("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads of CONFIG must be a multiple of num_key_value_heads = {kv_heads}, not {heads}"
        )
    sizes = name, layers, width, get("vocab_size"), heads, kv_heads, get("head_dim", default=width // heads)
    experts = get(*_EXPERTS, default=0, least=0)
    if experts == 0:
        return LanguageModel(*sizes, layers, get("intermediate_size"))
    chosen = get(*_PER_TOKEN)
    if chosen > experts:
        key = next(key for key in _PER_TOKEN if content.get(key) is not None)
        raise ValueError(f"{key} of CONFIG must be at most {experts} experts, not {chosen}")
    expert_hidden = get("moe_intermediate_size", "intermediate_size")
    shared = get("shared_expert_intermediate_size", "shared_intermediate_size", default=0, least=0)
    dense = _dense_layers(content, layers, get)
    hidden = get("intermediate_size") if dense else 0
    shared = shared or get("n_shared_experts", default=0, least=0) * expert_hidden
    return LanguageModel(*sizes, dense, hidden, experts, chosen, expert_hidden, shared)


def _dense_layers(content: dict[str, Any], layers: int, get: Any) -> int:
    """Return how many layers of a mixture of experts have one feed-forward network."""
    first, step = get("first_k_dense_replace", default=0, least=0), get("decoder_sparse_step", default=1)
    listed = content.get("mlp_only_layers") or []
    if not isinstance(listed, list):
        raise ValueError(f"mlp_only_layers of CONFIG must be a list, not {listed!r}")
    return sum(layer < first or layer in listed or (layer + 1) % step != 0 for layer in range(layers))


def _refuse(content: dict[str, Any]) -> None:
    """Raise ValueError for what does not have full attention over keys and values of every head, or no gated feed-forward layers."""
    if content.get("kv_lora_rank") is not None:
        raise ValueError("kv_lora_rank of CONFIG must be null: latent attention has other products")
    kinds = content.get("layer_types")
    if not isinstance(kinds, list | None):
        raise ValueError(f"layer_types of CONFIG must be a list, not {kinds!r}")
    other = sorted(set(map(str, kinds or [])) - {"full_attention"})
    if other:
        raise ValueError(f"layer_types of CONFIG must be full_attention alone, not {', '.join(other)}")
    if content.get("sliding_window") is not None and content.get("use_sliding_window") is not False:
        raise ValueError(
            f"sliding_window of CONFIG must be null, not {content['sliding_window']!r}: attention over a part of the keys has other products"
        )
    family = content.get("model_type")
    if family is not None and not (isinstance(family, str) and family in FAMILIES):
        raise ValueError(
            f"model_type of CONFIG must be of those with full attention and gated feed-forward layers (docs/performance-model.md), or left out, not {family!r}"
        )

"""What the families' Hugging Face checkpoints call things: tensor names and config.json keys. Source: the published
checkpoints' layouts as transformers reads and writes them; held by a test that opens what it saves.

Most keep a matrix for each expert; some a stacked tensor, a few of those with the axes swapped. `{layer}` and
`{expert}` are numbers in the names. A text model inside a larger one has its settings in "text_config".
"""

from dataclasses import replace
from typing import Any

from moe_lab.families.files import FileRow, FileSetting, SizeKeys, TensorNames, WhichLayers

_L = "layers.{layer}."
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")

# Activations by the name a config gives them.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}


def _activation(key: str = "hidden_act") -> FileSetting:
    return FileSetting("layer.activation", key, str, codes=ACTIVATIONS)


_NORM = FileSetting("router.normalize", "norm_topk_prob", bool)
_SCALE = FileSetting("router.scale", "routed_scaling_factor", float)
_GROUPS = (FileSetting("router.n_group", "n_group", int), FileSetting("router.topk_group", "topk_group", int))
_SCALE_AND_GROUPS = (_activation(), _NORM, _SCALE, *_GROUPS)
_LIMITED = ("topk_method", "group_limited_greedy")

_SIZES = SizeKeys(
    num_experts=("num_experts", "num_local_experts", "n_routed_experts"),
    top_k=("num_experts_per_tok",),
    d_model=("hidden_size",),
    d_expert=("moe_intermediate_size",),
)
_WIDE = replace(_SIZES, d_expert=("intermediate_size",))


# Which layers have experts. DeepSeek's checkpoints, and those after them, may hold further layers that predict ahead.
_ALL = WhichLayers(spare="num_nextn_predict_layers")
_QWEN_LAYERS = WhichLayers(step="decoder_sparse_step", dense="mlp_only_layers")
_AFTER_DENSE = WhichLayers(first="first_k_dense_replace", lead=True, spare="num_nextn_predict_layers")
_BY_KIND = replace(_AFTER_DENSE, kinds=("mlp_layer_types",), moe_kinds=("sparse",))


def hf_names(block: str, parts: tuple[str, str, str], **more: Any) -> TensorNames:
    """A block whose experts are a matrix each, called `parts` (gate, up, down; no gate where its name is empty)."""
    gate, up, down = (f"{block}.experts.{{expert}}.{part}.weight" if part else None for part in parts)
    assert down is not None
    prefixes = more.pop("prefixes", _PREFIXES)
    names: dict[str, Any] = {r: f"{block}.{name}" if isinstance(name, str) else name for r, name in more.items()}
    names.setdefault("router", f"{block}.gate.weight")
    return TensorNames(gate=gate, up=up, down=down, prefixes=prefixes, **names)


def _shared(parts: tuple[str, str, str], where: str = "shared_experts") -> dict[str, str]:
    roles = ("shared_gate", "shared_up", "shared_down")
    return {role: f"{where}.{part}.weight" for role, part in zip(roles, parts, strict=True) if part}


def _stacked(block: str, **more: Any) -> TensorNames:
    """A block whose experts are one tensor of gate and up and one of down."""
    names = {
        "router": "router.weight", "gate_up": "experts.gate_up_proj", "down": "experts.down_proj", **more,
    }  # fmt: skip
    full: dict[str, Any] = {role: f"{block}.{name}" if isinstance(name, str) else name for role, name in names.items()}
    return TensorNames(prefixes=_PREFIXES, **full)


def hf_file(model_types: tuple[str, ...], names: TensorNames, *settings: FileSetting, **more: Any) -> FileRow:
    """The row of a model type."""
    return FileRow(types=model_types, names=(names,), sizes=more.pop("sizes", _SIZES), settings=settings, **more)


_PROJ, _W = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
_MLP, _MOE = _L + "mlp", _L + "block_sparse_moe"
_QWEN = hf_names(_MLP, _PROJ)
_QWEN_SHARED = hf_names(_MLP, _PROJ, **_shared(_PROJ, "shared_expert"), shared_router="shared_expert_gate.weight")
_V3_BIAS = {"correction_bias": "gate.e_score_correction_bias"}
_V3 = hf_names(_MLP, _PROJ, **_V3_BIAS, **_shared(_PROJ))
_SHARED_WIDTH = replace(_SIZES, d_shared=("shared_expert_intermediate_size",))
_GRANITE = _stacked(
    _MOE, router="router.layer.weight", gate_up="input_linear.weight", down="output_linear.weight",
)  # fmt: skip
_OSS_BIASES = {"gate_up_bias": "experts.gate_up_proj_bias", "down_bias": "experts.down_proj_bias"}

HF_FILES: dict[str, FileRow] = {
    "mixtral": hf_file(("mixtral",), hf_names(_MOE, _W), _activation(), sizes=_WIDE, layers=_ALL),
    "qwen2_moe": hf_file(
        ("qwen2_moe",), _QWEN_SHARED, _activation(), _NORM, sizes=_SHARED_WIDTH, layers=_QWEN_LAYERS
    ),
    # A configuration that does not say so means no renormalising.
    "qwen3_moe": hf_file(
        ("qwen3_moe",), _QWEN, _activation(), _NORM, router={"normalize": False}, layers=_QWEN_LAYERS
    ),
    "qwen3_next": hf_file(
        ("qwen3_next",), _QWEN_SHARED, _activation(), _NORM, sizes=_SHARED_WIDTH, layers=_QWEN_LAYERS
    ),
    "olmoe": hf_file(("olmoe",), _QWEN, _activation(), _NORM, sizes=_WIDE, layers=_ALL),
    # Plain tensors are transposed, MXFP4 ones of the same name are not; both alternate gate and up.
    "gpt_oss": hf_file(
        ("gpt_oss",),
        _stacked(_MLP, router_bias="router.bias", **_OSS_BIASES, transposed=True, interleaved=True),
        _activation(),
        FileSetting("layer.limit", "swiglu_limit", float),
        FileSetting("layer.alpha", "swiglu_alpha", float),
        sizes=_WIDE,
        layers=_ALL,
    ),
    "deepseek_v2": hf_file(
        ("deepseek_v2",),
        hf_names(_MLP, _PROJ, **_shared(_PROJ)),
        _activation(),
        _SCALE,
        *(replace(setting, when=_LIMITED) for setting in _GROUPS),
        layers=_AFTER_DENSE,
    ),
    "deepseek_v3": hf_file(
        ("deepseek_v3", "deepseek_v32", "kimi_k2"), _V3, *_SCALE_AND_GROUPS, layers=_AFTER_DENSE
    ),
    "glm4_moe": hf_file(("glm4_moe",), _V3, *_SCALE_AND_GROUPS, layers=_AFTER_DENSE),
    "kimi_linear": hf_file(
        ("kimi_linear",),
        hf_names(_MOE, _W, **_V3_BIAS, **_shared(_PROJ)),
        _activation(),
        FileSetting("router.normalize", "moe_renormalize", bool),
        _SCALE,
        FileSetting("router.n_group", "num_expert_group", int),
        FileSetting("router.topk_group", "topk_group", int),
        sizes=replace(_SIZES, top_k=("num_experts_per_token", "num_experts_per_tok")),
        layers=_BY_KIND,
    ),
    "deepseek_v4": hf_file(
        ("deepseek_v4",),
        hf_names(
            _L + "ffn", _W, correction_bias="gate.bias", hash_table="gate.tid2eid", **_shared(_W),
            optional=frozenset({"correction_bias", "hash_table"}), prefixes=("", "model."),
        ),
        _activation(),
        _SCALE,
        FileSetting("layer.limit", "swiglu_limit", float, off=0.0),
        FileSetting("shared.limit", "swiglu_limit", float, off=0.0),
        layers=replace(_ALL, kinds=("mlp_layer_types",), moe_kinds=("moe", "hash_moe")),
    ),
    "longcat_flash": hf_file(
        ("longcat_flash",),
        hf_names(
            _MLP, _PROJ, router="router.classifier.weight", correction_bias="router.e_score_correction_bias"
        ),
        _activation(),
        _SCALE,
        FileSetting("router.zero_experts", "zero_expert_num", int),
        sizes=replace(_SIZES, top_k=("moe_topk",), d_expert=("expert_ffn_hidden_size",)),
        layers=replace(_ALL, count=("num_layers",)),
    ),
    "llama4": hf_file(
        ("llama4_text", "llama4"),
        _stacked(_L + "feed_forward", **_shared(_PROJ, "shared_expert"), transposed=True),
        _activation(),
        sizes=replace(_WIDE, d_shared=("intermediate_size",)),
        layers=WhichLayers(listed="moe_layers", step="interleave_moe_layer_step"),
    ),
    "gemma4": hf_file(
        ("gemma4_text", "gemma4"),
        TensorNames(
            router=_L + "router.proj.weight",
            input_scale=_L + "router.scale",
            per_expert_scale=_L + "router.per_expert_scale",
            gate_up=_L + "experts.gate_up_proj",
            down=_L + "experts.down_proj",
            shared_gate=_L + "mlp.gate_proj.weight",
            shared_up=_L + "mlp.up_proj.weight",
            shared_down=_L + "mlp.down_proj.weight",
            norms={
                "shared_in": _L + "pre_feedforward_layernorm.weight",
                "routed_in": _L + "pre_feedforward_layernorm_2.weight",
                "shared_out": _L + "post_feedforward_layernorm_1.weight",
                "routed_out": _L + "post_feedforward_layernorm_2.weight",
                "out": _L + "post_feedforward_layernorm.weight",
                "layer_scalar": _L + "layer_scalar",
            },
            prefixes=_PREFIXES,
        ),
        _activation("hidden_activation"),
        FileSetting("layer.norm_eps", "rms_norm_eps", float),
        sizes=replace(_SIZES, top_k=("top_k_experts",)),
        layers=_ALL,
    ),
    "granitemoe": hf_file(("granitemoe",), _GRANITE, _activation(), sizes=_WIDE, layers=_ALL),
    "granitemoeshared": hf_file(
        ("granitemoeshared", "granitemoehybrid"),
        replace(
            _GRANITE,
            shared_gate_up=_L + "shared_mlp.input_linear.weight",
            shared_down=_L + "shared_mlp.output_linear.weight",
        ),
        _activation(),
        sizes=replace(_WIDE, d_shared=("shared_intermediate_size",)),
        layers=_ALL,
    ),
    "phimoe": hf_file(
        ("phimoe",),
        hf_names(_MOE, _W),
        _activation(),
        FileSetting("router.jitter_eps", "router_jitter_noise", float),
        sizes=_WIDE,
        layers=_ALL,
    ),
    "hunyuan_v1_moe": hf_file(
        ("hunyuan_v1_moe",),
        hf_names(_MLP, _PROJ, router="gate.wg.weight", **_shared(_PROJ, "shared_mlp")),
        _activation(),
        sizes=replace(_WIDE, top_k=("moe_topk",)),
        layers=_ALL,
    ),
    "ernie4_5_moe": hf_file(
        ("ernie4_5_moe",),
        hf_names(
            _MLP, _PROJ, correction_bias="moe_statics.e_score_correction_bias", **_shared(_PROJ),
            optional=frozenset({"shared"}),
        ),
        _activation(),
        FileSetting("router.norm_eps", "moe_norm_min", float),
        sizes=replace(_SIZES, num_experts=("moe_num_experts",), top_k=("moe_k",)),
        layers=WhichLayers(
            first="moe_layer_start_index", lead=True, last="moe_layer_end_index", step="moe_layer_interval"
        ),
    ),
    "minimax_m2": hf_file(
        ("minimax_m2",), hf_names(_MOE, _W, correction_bias="e_score_correction_bias"), _activation(), sizes=_WIDE,
        layers=WhichLayers(spare="num_mtp_modules"),
    ),
    "hy_v3": hf_file(
        ("hy_v3",),
        hf_names(
            _MLP, _PROJ, router="router.gate.weight", correction_bias="expert_bias", **_shared(_PROJ, "shared_mlp")
        ),
        _activation(),
        FileSetting("router.scale", "router_scaling_factor", float),
        layers=_BY_KIND,
    ),
    "lfm2_moe": hf_file(
        ("lfm2_moe",),
        hf_names(
            _L + "feed_forward", _W, correction_bias="expert_bias", optional=frozenset({"correction_bias"})
        ),
        _NORM,
        _SCALE,
        layers=WhichLayers(first="num_dense_layers", lead=True),
    ),
    "nemotron_h": hf_file(
        ("nemotron_h",),
        hf_names(
            _L + "mixer", ("", "up_proj", "down_proj"), **_V3_BIAS, **_shared(("", "up_proj", "down_proj")),
            latent_in="fc1_latent_proj.weight", latent_out="fc2_latent_proj.weight", optional=frozenset({"latent"}),
            prefixes=("backbone.", "model."),
        ),
        _activation("mlp_hidden_act"),
        _NORM,
        _SCALE,
        *_GROUPS,
        layers=WhichLayers(
            kinds=("layers_block_type", "layer_types", "hybrid_override_pattern"), moe_kinds=("moe", "E"), anywhere=True
        ),
    ),
    "cohere2_moe": hf_file(
        ("cohere2_moe",),
        hf_names(_MLP, _PROJ, **_shared(_PROJ), optional=frozenset({"shared"})),
        _activation(),
        FileSetting(
            "router.weights_from", "expert_selection_fn", str,
            codes={"softmax": "softmax_topk", "sigmoid": "sigmoid_topk"},
        ),
        replace(_NORM, when=("expert_selection_fn", "sigmoid")),
        FileSetting(
            "shared.combine", "shared_expert_combination_strategy", str, codes={"sum": "sum", "average": "average"}
        ),
        sizes=_WIDE,
        layers=_BY_KIND,
    ),
    # Stacked already, gate and up apart; the shared expert stands beside the block.
    "step3p7": hf_file(
        ("step3p5", "step3p7"),
        TensorNames(
            router=_L + "moe.gate.weight",
            correction_bias=_L + "moe.router_bias",
            gate=_L + "moe.gate_proj.weight",
            up=_L + "moe.up_proj.weight",
            down=_L + "moe.down_proj.weight",
            shared_gate=_L + "share_expert.gate_proj.weight",
            shared_up=_L + "share_expert.up_proj.weight",
            shared_down=_L + "share_expert.down_proj.weight",
            prefixes=_PREFIXES,
        ),
        _activation(),
        FileSetting("router.scale", "moe_router_scaling_factor", float),
        FileSetting("layer.limit", "swiglu_limits", float, off=0.0),
        FileSetting("shared.limit", "swiglu_limits_shared", float, off=0.0),
        sizes=replace(
            _SIZES, num_experts=("n_routed_experts", "moe_num_experts"), top_k=("num_experts_per_tok", "moe_top_k"),
            d_shared=("share_expert_dim",),
        ),
        layers=replace(_BY_KIND, listed="moe_layers_enum"),
    ),
}  # fmt: skip

"""The table: one row a family. Sources: the router, expert and shared-expert formulas of each family's reference
implementation, its transformers module's attribute names. What its files call things stands in gguf_files.py and
hf_files.py, under the same names.

Read a row as what differs from the defaults: softmax scores used as they are, gated silu experts, no shared expert.
"""

from dataclasses import replace
from typing import Any

from moe_lab.families.gguf_files import GGUF_FILES
from moe_lab.families.hf_files import HF_FILES
from moe_lab.families.row import ACT_FN, Family, ModuleNames, ModuleSetting

NORM_SETTING = ModuleSetting(field="router.normalize", path="gate.norm_topk_prob")
SCALE_SETTING = ModuleSetting(field="router.scale", path="gate.routed_scaling_factor")
# A sigmoid score each, chosen by score + bias, the plain scores as weights.
SIGMOID_BIAS: dict[str, Any] = {"score": "sigmoid", "normalize": True}
BIASED: dict[str, Any] = {"correction_bias": True}
# The gate of DeepSeek-V3 and its many relatives: groups, optional renormalising, a factor on the weights.
V3_ROUTER: dict[str, Any] = {**SIGMOID_BIAS, "norm_eps": 1e-20}
V3_SETTINGS = (
    ACT_FN,
    NORM_SETTING,
    SCALE_SETTING,
    ModuleSetting(field="router.n_group", path="gate.num_group"),
    ModuleSetting(field="router.topk_group", path="gate.topk_group"),
)
V3_BIAS = "gate.e_score_correction_bias"
# Top-k on the logits, then a softmax over the K picked: the sum is 1 without renormalising.
TOPK_FIRST: dict[str, Any] = {"score": "none", "weights_from": "softmax_topk"}


def _v3(name: str, module_class: str) -> Family:
    module = ModuleNames(
        classes=(module_class,), correction_bias=V3_BIAS, shared="shared_experts", settings=V3_SETTINGS
    )
    return Family(name=name, router=V3_ROUTER, layer=BIASED, shared="plain", module=module)


def _gated_shared(module_class: str) -> ModuleNames:
    return ModuleNames(
        classes=(module_class,),
        shared="shared_expert",
        shared_gate="shared_expert_gate.weight",
        settings=(ACT_FN, NORM_SETTING),
    )


_ROWS = (
    Family(name="mixtral", router={"normalize": True}, module=ModuleNames(classes=("MixtralSparseMoeBlock",))),
    # The K weights are used as they are, sum below 1, unless the file says otherwise.
    Family(
        name="qwen2_moe",
        shared="gated",
        module=_gated_shared("Qwen2MoeSparseMoeBlock"),
    ),
    # Released checkpoints renormalise, though the configuration's default does not.
    Family(
        name="qwen3_moe",
        router={"normalize": True},
        module=ModuleNames(classes=("Qwen3MoeSparseMoeBlock",), settings=(ACT_FN, NORM_SETTING)),
    ),
    Family(
        name="qwen3_next",
        router={"normalize": True},
        shared="gated",
        module=_gated_shared("Qwen3NextSparseMoeBlock"),
    ),
    Family(
        name="olmoe",
        module=ModuleNames(classes=("OlmoeSparseMoeBlock",), settings=(ACT_FN, NORM_SETTING)),
    ),
    Family(
        name="gpt_oss",
        router=TOPK_FIRST,
        layer={"limit": 7.0, "limit_mode": "oai", "router_bias": True, "expert_bias": True},
        module=ModuleNames(
            classes=("GptOssMLP",),
            router="router.weight",
            top_k="router.top_k",
            router_bias="router.bias",
            gate_up_bias="experts.gate_up_proj_bias",
            down_bias="experts.down_proj_bias",
            transposed=True,
            interleaved=True,
            settings=(
                ModuleSetting(field="layer.limit", path="experts.limit"),
                ModuleSetting(field="layer.alpha", path="experts.alpha"),
            ),
        ),
    ),
    # Dropped groups are filled with 0, which no softmax score is below.
    Family(
        name="deepseek_v2",
        router={"group_score": "max", "group_fill": 0.0},
        shared="plain",
        module=ModuleNames(
            classes=("DeepseekV2Moe",),
            shared="shared_experts",
            settings=(
                ACT_FN,
                SCALE_SETTING,
                ModuleSetting(
                    field="router.n_group", path="gate.num_group", when=("gate.topk_method", "group_limited_greedy")
                ),
                ModuleSetting(
                    field="router.topk_group", path="gate.topk_group", when=("gate.topk_method", "group_limited_greedy")
                ),
            ),
        ),
    ),
    _v3("deepseek_v3", "DeepseekV3MoE"),
    _v3("glm4_moe", "Glm4MoeMoE"),
    _v3("kimi_linear", "KimiLinearMoE"),
    # Layers with a hash table have no correction bias; the clamp holds for the shared expert too.
    Family(
        name="deepseek_v4",
        router={"score": "sqrt_softplus", "normalize": True, "norm_eps": 1e-20, "scale": 1.5},
        layer={"limit": 10.0, **BIASED},
        shared="plain",
        shared_layer={"limit": 10.0},
        module=ModuleNames(
            classes=("DeepseekV4SparseMoeBlock",),
            correction_bias=V3_BIAS,
            hash_table="gate.tid2eid",
            shared="shared_experts",
            optional=frozenset({"correction_bias", "hash_table"}),
            settings=(
                ACT_FN,
                SCALE_SETTING,
                ModuleSetting(
                    field="router.score",
                    path="gate.score_fn",
                    codes={"SqrtSoftplusActivation": "sqrt_softplus", "Sigmoid": "sigmoid"},
                ),
                ModuleSetting(field="router.hash_routing", path="is_hash"),
                ModuleSetting(field="layer.limit", path="experts.limit"),
                ModuleSetting(field="shared.limit", path="shared_experts.limit"),
            ),
        ),
    ),
    # Real and zero-computation experts share one softmax and one bias; the factor holds for both, nothing renormalises.
    Family(
        name="longcat_flash",
        router={"scale": 6.0},
        layer=BIASED,
        module=ModuleNames(
            classes=("LongcatFlashMoE",),
            router="router.classifier.weight",
            top_k="router.top_k",
            correction_bias="router.e_score_correction_bias",
            settings=(ACT_FN, ModuleSetting(field="router.scale", path="router.routed_scaling_factor")),
        ),
    ),
    # The sigmoid of the picked logit multiplies the expert's input, inside its nonlinearity.
    Family(
        name="llama4",
        router={"score": "none", "weights_from": "sigmoid_topk"},
        layer={"weight_place": "input"},
        shared="plain",
        module=ModuleNames(
            classes=("Llama4TextMoe",),
            router="router.weight",
            top_k="router.top_k",
            transposed=True,
            shared="shared_expert",
        ),
    ),
    # The module is the decoder layer: its whole feed-forward half, x being the residual stream after attention.
    Family(
        name="gemma4",
        router={"normalize": True},
        layer={
            "activation": "gelu_tanh",
            "per_expert_scale": True,
            "router_input": "normed",
            "feed_forward": "normed_residual",
        },
        shared="plain",
        module=ModuleNames(
            classes=("Gemma4TextDecoderLayer",),
            router="router.proj.weight",
            top_k="router.config.top_k_experts",
            per_expert_scale="router.per_expert_scale",
            input_scale="router.scale",
            shared="mlp",
            norms={
                "shared_in": "pre_feedforward_layernorm.weight",
                "routed_in": "pre_feedforward_layernorm_2.weight",
                "shared_out": "post_feedforward_layernorm_1.weight",
                "routed_out": "post_feedforward_layernorm_2.weight",
                "out": "post_feedforward_layernorm.weight",
                "layer_scalar": "layer_scalar",
            },
            unread=("self_attn", "input_layernorm", "post_attention_layernorm"),
            settings=(ACT_FN, ModuleSetting(field="layer.norm_eps", path="router.eps")),
        ),
    ),
    Family(
        name="granitemoe",
        router=TOPK_FIRST,
        module=ModuleNames(classes=("GraniteMoeMoE",), router="router.weight", top_k="router.top_k"),
    ),
    # Its shared MLP stands beside this block, in the decoder layer: a file's layer has it, the module does not.
    Family(
        name="granitemoeshared",
        router=TOPK_FIRST,
        shared="plain",
        module=ModuleNames(classes=("GraniteMoeSharedMoE",), router="router.weight", top_k="router.top_k"),
    ),
    Family(
        name="phimoe",
        router={"score": "none", "weights_from": "sparsemixer"},
        module=ModuleNames(
            classes=("PhimoeSparseMoeBlock",),
            router="router.weight",
            top_k="router.top_k",
            settings=(ACT_FN, ModuleSetting(field="router.jitter_eps", path="router.router_jitter_noise")),
        ),
    ),
    Family(
        name="hunyuan_v1_moe",
        router={"normalize": True},
        shared="plain",
        module=ModuleNames(classes=("HunYuanMoEV1Moe",), router="gate.wg.weight", shared="shared_mlp"),
    ),
    Family(
        name="ernie4_5_moe",
        router={"normalize": True, "norm_kind": "max", "norm_eps": 1e-12},
        layer=BIASED,
        shared="plain",
        module=ModuleNames(
            classes=("Ernie4_5_MoeSparseMoeBlock",),
            correction_bias="gate.moe_statics.e_score_correction_bias",
            shared="shared_experts",
            optional=frozenset({"shared"}),
            settings=(ACT_FN, ModuleSetting(field="router.norm_eps", path="gate.norm_min")),
        ),
    ),
    Family(
        name="minimax_m2",
        router=SIGMOID_BIAS,
        layer=BIASED,
        module=ModuleNames(classes=("MiniMaxM2SparseMoeBlock",), correction_bias="e_score_correction_bias"),
    ),
    Family(
        name="hy_v3",
        router=V3_ROUTER,
        layer=BIASED,
        shared="plain",
        module=ModuleNames(
            classes=("HYV3MoE",),
            correction_bias="e_score_correction_bias",
            shared="shared_experts",
            settings=(ACT_FN, ModuleSetting(field="router.scale", path="gate.router_scaling_factor")),
        ),
    ),
    Family(
        name="lfm2_moe",
        router={**SIGMOID_BIAS, "norm_eps": 1e-6},
        layer=BIASED,
        module=ModuleNames(
            classes=("Lfm2MoeSparseMoeBlock",),
            correction_bias="expert_bias",
            optional=frozenset({"correction_bias"}),
            settings=(ACT_FN, NORM_SETTING, SCALE_SETTING),
        ),
    ),
    # Experts without a gate, in a latent space of their own where the model has one.
    Family(
        name="nemotron_h",
        router=V3_ROUTER,
        layer={"activation": "relu2", "gated": False, **BIASED},
        shared="plain",
        module=ModuleNames(
            classes=("NemotronHMoE",),
            correction_bias=V3_BIAS,
            gate_up=None,
            up="experts.up_proj",
            shared="shared_experts",
            latent=("fc1_latent_proj.weight", "fc2_latent_proj.weight"),
            optional=frozenset({"latent"}),
            settings=V3_SETTINGS,
        ),
    ),
    Family(
        name="cohere2_moe",
        router={"score": "none", "weights_from": "softmax_topk"},
        shared="plain",
        module=ModuleNames(
            classes=("Cohere2MoeSparseMoeBlock",),
            shared="shared_experts",
            optional=frozenset({"shared"}),
            settings=(
                ACT_FN,
                ModuleSetting(
                    field="router.weights_from",
                    path="gate.expert_selection_fn",
                    codes={"softmax": "softmax_topk", "sigmoid": "sigmoid_topk"},
                ),
                ModuleSetting(
                    field="router.normalize", path="gate.norm_topk_prob", when=("gate.expert_selection_fn", "sigmoid")
                ),
                ModuleSetting(field="shared.combine", path="shared_expert_combination_strategy"),
            ),
        ),
    ),
    # The clamp stands behind the activation, and the factor on the routed sum, not on the weights.
    Family(
        name="step3p7",
        router={**SIGMOID_BIAS, "scale_on": "output"},
        layer={"limit_mode": "after", **BIASED},
        shared="plain",
        module=ModuleNames(
            classes=("Step3p7SparseMoeBlock",),
            correction_bias=V3_BIAS,
            shared="shared_experts",
            settings=(
                ACT_FN,
                ModuleSetting(field="router.scale", path="routed_scaling_factor"),
                ModuleSetting(field="layer.limit", path="experts.limit"),
                ModuleSetting(field="shared.limit", path="shared_experts.limit"),
            ),
        ),
    ),
)

ROWS = tuple(replace(row, gguf=GGUF_FILES.get(row.name), hf=HF_FILES.get(row.name)) for row in _ROWS)

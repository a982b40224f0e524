"""A run's flags and its attention name -> refusal of flags that the name does not look at.

Layer: support.
Training arguments -> a refusal of those under which numbers would be wrong.
"""

from collections.abc import Callable
from typing import Any

from .model_rules import NESTED, Rule, raise_if_broken

_LOOKED_AT = (  # field, default, names that look at it, why others do not
    ("longctx_topology", "auto", NESTED, "its plans know no domains"),
    ("longctx_ulysses_size", 1, NESTED, "its plans know no domains"),
    ("longctx_scan", "auto", ("zeco_linear",), "it runs no recurrent layers"),
    ("longctx_softmax", "distca", ("zeco_linear",), "it runs all softmax layers itself"),
)


def validate_unread_flags(arguments: Any, *, name: str, algorithm: str) -> None:
    """Refuse flags that would change nothing.

    Args:
        arguments: What has the `longctx_*` fields.
        name (`str`): The attention name.
        algorithm (`str`): Who plans its softmax layers.

    Raises:
        ValueError: naming the flag, its value, the rule and the remedy.
    """
    for flag, default, names, why in _LOOKED_AT:
        value = getattr(arguments, flag)
        if value != default and not {name, algorithm} & {*names}:
            raise ValueError(
                f"{flag}={value} under attn_implementation={name!r}: {why}; leave it at {default}, "
                f"or use {' or '.join(names)}"
            )


def _unless(field: str, *allowed: object) -> Callable[[Any], object]:
    """The field's value, unless it is one of those allowed."""

    def found(arguments: Any) -> object:
        value = getattr(arguments, field, allowed[0])
        return None if value in allowed else f"{field}={value}"

    return found


def _accelerator_flag(name: str) -> Callable[[Any], object]:
    def found(arguments: Any) -> object:
        config = getattr(arguments, "accelerator_config", None)
        return f"accelerator_config.{name}=True" if getattr(config, name, False) else None

    return found


def _batch_size(arguments: Any) -> object:
    for field in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        value = getattr(arguments, field, 1)
        if value != 1:
            return f"{field}={value}"
    return None


def _losses_in_metrics(arguments: Any) -> object:
    wanted = getattr(arguments, "include_for_metrics", ())
    return f"include_for_metrics={wanted}" if "loss" in wanted else None


# What a DeepSpeed configuration may set: each leaves losses, gradients and steps as they are.
_DEEPSPEED_KEYS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "gradient_clipping", "bf16", "fp16", "zero_optimization", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "steps_per_print", "wall_clock_breakdown", "checkpoint",
}  # fmt: skip


def _deepspeed(arguments: Any) -> object:
    """The first part of a DeepSpeed configuration that is not known to be exact."""
    plugin, given = (getattr(arguments, x, None) for x in ("deepspeed_plugin", "deepspeed"))
    config = plugin.deepspeed_config if plugin else given
    if not isinstance(config, dict):  # a file, before the plugin has read it
        return None
    zero = config.get("zero_optimization", {})
    if zero.get("stage", 0) not in (0, 1, 2):
        return f"zero_optimization.stage={zero['stage']}"
    for part in ("offload_optimizer", "offload_param"):
        device = (zero.get(part) or {}).get("device", "none")
        if device != "none":
            return f"zero_optimization.{part}.device={device}"
    if config.get("fp16", {}).get("enabled") is True:
        return "fp16.enabled=True"
    others = sorted(config.keys() - _DEEPSPEED_KEYS)
    return f"deepspeed keys {others}" if others else None


def _servers_under_deepspeed(arguments: Any) -> object:
    servers = getattr(arguments, "longctx_servers", 0)
    engines = (getattr(arguments, name, None) for name in ("deepspeed", "deepspeed_plugin"))
    deepspeed = any(engine is not None for engine in engines)
    return f"longctx_servers={servers}" if servers and deepspeed else None


def _servers_with_nan_alarm(arguments: Any) -> object:
    servers, debug = (getattr(arguments, n, None) for n in ("longctx_servers", "debug"))
    named = [getattr(option, "value", option) for option in debug or ()]
    alarm = "underflow_overflow" in named
    return f"longctx_servers={servers}, debug=underflow_overflow" if servers and alarm else None


def _servers_with_early_steps(arguments: Any) -> object:
    servers = getattr(arguments, "longctx_servers", 0)
    optimizer = str(getattr(arguments, "optim", "")).rpartition(".")[2].lower()
    early = "lomo" in optimizer or optimizer.endswith("layerwise")
    return f"longctx_servers={servers}, optim={optimizer}" if servers and early else None


def _too_many_devices(arguments: Any) -> object:
    devices = getattr(arguments, "n_gpu", 0)
    return f"{devices} devices in one process" if devices > 1 else None


def _wrapped(arguments: Any) -> object:
    packs = getattr(arguments, "packing", False) or getattr(arguments, "eval_packing", False)
    strategy = getattr(arguments, "packing_strategy", None)
    return f"packing_strategy={strategy}" if packs and strategy == "wrapped" else None


ARGUMENT_RULES: tuple[Rule, ...] = (
    Rule(
        "label smoothing",
        _unless("label_smoothing_factor", 0, 0.0),
        "Trainer's smoother shifts labels again inside a rank's share",
        "set it to 0.0",
    ),
    Rule(
        "per-device batch sizes",
        _batch_size,
        "a batch is one pack per group, sized by --longctx_max_tokens_per_rank",
        "leave both at 1",
    ),
    Rule(
        "loss not averaged over devices",
        _unless("average_tokens_across_devices", True),
        "the loss is the mean over all trainers' tokens",
        "leave it at True",
    ),
    Rule(
        "DataParallel",
        _too_many_devices,
        "one process must drive one device",
        "start one process per device with accelerate launch",
    ),
    Rule(
        "automatic batch size",
        _unless("auto_find_batch_size", False),
        "a restart would change the steps of some ranks only",
        "set --longctx_max_tokens_per_rank to what fits",
    ),
    Rule(
        "split batches",
        _accelerator_flag("split_batches"),
        "batches are cut by the layout",
        "leave it at False",
    ),
    Rule(
        "other sampling strategies",
        _unless("train_sampling_strategy", "random", "sequential"),
        "packs are chosen by hf_longctx",
        "use random or sequential",
    ),
    Rule(
        "metrics of each batch",
        _unless("batch_eval_metrics", False),
        "a batch holds parts of several documents, so metrics are computed of the whole set",
        "leave it at False and reduce logits in preprocess_logits_for_metrics",
    ),
    Rule(
        "predictions as lists",
        _unless("eval_do_concat_batches", True),
        "predictions are put together by document, not by batch",
        "leave it at True",
    ),
    Rule(
        "losses in metrics",
        _losses_in_metrics,
        "losses are summed over packs, not kept by document",
        "compute them from predictions and labels in compute_metrics",
    ),
    Rule(
        "NEFTune",
        _unless("neftune_noise_alpha", None, 0, 0.0),
        "its noise is scaled by the rows of a rank, not by a document's length",
        "leave it out",
    ),
    Rule(
        "float16",
        _unless("fp16", False),
        "the CPU kernels take float32, bf16 and float64 alone",
        "use bf16=True",
    ),
    Rule(
        "wrapped packing",
        _wrapped,
        "it cuts anywhere and keeps no boundaries, so documents would see each other",
        "use bfd_split or bfd, or no packing: hf_longctx packs by itself",
    ),
    Rule(
        "generation as prediction",
        _unless("predict_with_generate", False),
        "batches hold parts of several documents, no prompts",
        "leave it out and call generate in a callback or in compute_metrics",
    ),
    Rule(
        "torch.compile",
        _unless("torch_compile", False),
        "exchanges cannot be traced yet",
        "leave it at False",
    ),
    Rule(
        "DeepSpeed beyond ZeRO 0, 1 and 2",
        _deepspeed,
        "only those stages, without offloading and optimizers of DeepSpeed, are shown to be exact",
        "set zero_optimization.stage to 0, 1 or 2, leave the rest out, and choose --optim",
    ),
    Rule(
        "attention servers under DeepSpeed",
        _servers_under_deepspeed,
        "its engine steps within backward, so a step that lost a server cannot be run again",
        "leave longctx_servers at 0, or leave DeepSpeed out",
    ),
    Rule(
        "attention servers and debug=underflow_overflow",
        _servers_with_nan_alarm,
        "what a lost server owes is NaN until its step runs again, which that option ends",
        "leave longctx_servers at 0, or leave debug out",
    ),
    Rule(
        "attention servers and optimizers that step within backward",
        _servers_with_early_steps,
        "a step that lost a server could not be run again",
        "leave longctx_servers at 0, or use another --optim, as adamw_torch",
    ),
)


def validate_arguments(arguments: Any) -> None:
    """Refuse training arguments under which numbers would be wrong.

    Raises:
        ValueError: with every rule that applies.
    """
    raise_if_broken(ARGUMENT_RULES, arguments)

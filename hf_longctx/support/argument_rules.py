"""Decide which training arguments run exactly, and which flags an attention name does not use.

Layer: support.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .rules import NESTED, Rule, field_except, validate_rules

logger = logging.getLogger(__name__)

_CPU_EXTENSION = "deepspeed_shm_comm"  # DeepSpeed compiles it as its process group starts
_BUILD_SECONDS = 600.0  # ten times what the build takes on one slow core

_USED_BY = (  # flag, default, names that use it, why the others do not
    ("longctx_topology", "auto", NESTED, "its plans do not use domains of ranks"),
    ("longctx_ulysses_size", 1, NESTED, "its plans do not use domains of ranks"),
    ("longctx_scan", "auto", ("zeco_linear",), "it runs no recurrent layers"),
    ("longctx_softmax", "distca", ("zeco_linear",), "it runs all softmax layers itself"),
)


def validate_unread_flags(arguments: Any, *, name: str, algorithm: str) -> None:
    """Raise for flags that would change nothing.

    Args:
        arguments: Anything with the `longctx_*` fields.
        name (`str`): The attention name.
        algorithm (`str`): The algorithm that plans its softmax layers.

    Raises:
        ValueError: Names the flag, its value, the rule and the remedy.
    """
    for flag, default, names, why in _USED_BY:
        value = getattr(arguments, flag)
        if value != default and not {name, algorithm} & {*names}:
            raise ValueError(
                f"{flag}={value} under attn_implementation={name!r}: {why}; leave it at {default}, "
                f"or use {' or '.join(names)}"
            )


def validate_extension_lock(arguments: Any) -> None:
    """Raise if DeepSpeed would wait forever for a build of its CPU extension that was killed.

    torch guards each build of an extension with a lock file. A killed build leaves its lock behind,
    and every later start waits until somebody removes it.

    Args:
        arguments: Training arguments, before Trainer starts the process group.

    Raises:
        ValueError: Names the lock file, its age and the remedy.
    """
    by_launcher = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if not by_launcher and _any_deepspeed(arguments) is None:
        return
    ops = sys.modules.get("deepspeed.ops")
    if ops is not None and not vars(ops).get("__compatible_ops__", True):
        return  # extensions are switched off: nothing is built
    from torch.utils.cpp_extension import get_default_build_root  # slow to import

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    # The default root has a folder for each version of Python; a root of one's own has none.
    for lock in (*root.glob(f"{_CPU_EXTENSION}/lock"), *root.glob(f"*/{_CPU_EXTENSION}/lock")):
        seconds = time.time() - lock.stat().st_mtime
        if seconds > _BUILD_SECONDS:
            raise ValueError(
                f"{lock} is {seconds / 60:.0f} minutes old: a build of DeepSpeed's CPU extension "
                "was killed, and DeepSpeed would wait for it forever. Remove the file and start "
                "again"
            )
        logger.warning(
            "DeepSpeed waits for a build of its CPU extension; if none is running, remove %s", lock
        )


def _accelerator_flag(name: str) -> Callable[[Any], object]:
    def find(arguments: Any) -> object:
        config = getattr(arguments, "accelerator_config", None)
        return f"accelerator_config.{name}=True" if getattr(config, name, False) else None

    return find


def _batch_size(arguments: Any) -> object:
    sizes = (f"per_device_{kind}_batch_size" for kind in ("train", "eval"))
    found = ((name, getattr(arguments, name, 1)) for name in sizes)
    return next((f"{name}={size}" for name, size in found if size != 1), None)


def _losses_in_metrics(arguments: Any) -> object:
    wanted = getattr(arguments, "include_for_metrics", ())
    return f"include_for_metrics={wanted}" if "loss" in wanted else None


# Keys of a DeepSpeed configuration that leave losses, gradients and steps as they are.
_DEEPSPEED_KEYS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "gradient_clipping", "bf16", "fp16", "zero_optimization", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "steps_per_print", "wall_clock_breakdown", "checkpoint",
}  # fmt: skip


def _deepspeed(arguments: Any) -> object:
    """Find the first part of a DeepSpeed configuration that is not known to be exact."""
    plugin, given = (getattr(arguments, x, None) for x in ("deepspeed_plugin", "deepspeed"))
    config = plugin.deepspeed_config if plugin else given
    if not isinstance(config, dict):  # a path; the plugin's copy is checked once it is read
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


def _with_servers(find: Callable[[Any], object]) -> Callable[[Any], object]:
    """Make a finder of what is refused only beside attention servers."""

    def found(arguments: Any) -> object:
        servers, value = getattr(arguments, "longctx_servers", 0), find(arguments)
        return f"longctx_servers={servers}, {value}" if servers and value else None

    return found


def _any_deepspeed(arguments: Any) -> object:
    names = ("deepspeed", "deepspeed_plugin")
    return next((f"{n} is set" for n in names if getattr(arguments, n, None) is not None), None)


def _nan_alarm(arguments: Any) -> object:
    options = getattr(arguments, "debug", None) or ()  # enums, once the arguments are made
    named = [getattr(option, "value", option) for option in options]
    return "debug=underflow_overflow" if "underflow_overflow" in named else None


def _steps_in_backward(arguments: Any) -> object:
    optimizer = str(getattr(arguments, "optim", "")).rpartition(".")[2].lower()
    early = "lomo" in optimizer or optimizer.endswith("layerwise")
    return f"optim={optimizer}" if early else None


def _too_many_devices(arguments: Any) -> object:
    devices = getattr(arguments, "n_gpu", 0)
    return f"{devices} devices in one process" if devices > 1 else None


def _wrapped(arguments: Any) -> object:
    packs = getattr(arguments, "packing", False) or getattr(arguments, "eval_packing", False)
    strategy = getattr(arguments, "packing_strategy", None)
    return f"packing_strategy={strategy}" if packs and strategy == "wrapped" else None


ARGUMENT_RULES: tuple[Rule, ...] = (
    Rule("label smoothing", field_except("label_smoothing_factor", 0, 0.0),
         "Trainer's smoother shifts labels a second time, inside one rank's tokens",
         "set it to 0.0"),
    Rule("per-device batch sizes", _batch_size,
         "a batch is one pack per group, sized by --longctx_max_tokens_per_rank",
         "leave both at 1"),
    Rule("loss not averaged over devices", field_except("average_tokens_across_devices", True),
         "the loss is the mean over all trainers' tokens",
         "leave it at True"),
    Rule("DataParallel", _too_many_devices,
         "one process must drive one device",
         "start one process per device with accelerate launch"),
    Rule("automatic batch size", field_except("auto_find_batch_size", False),
         "a restart would change the steps of only some ranks",
         "set --longctx_max_tokens_per_rank to what fits"),
    Rule("split batches", _accelerator_flag("split_batches"),
         "batches are cut by the layout",
         "leave it at False"),
    Rule("other sampling strategies",
         field_except("train_sampling_strategy", "random", "sequential"),
         "hf_longctx chooses the documents of each batch",
         "use random or sequential"),
    Rule("metrics of each batch", field_except("batch_eval_metrics", False),
         "a batch holds parts of several documents, so metrics need the whole set",
         "leave it at False and reduce logits in preprocess_logits_for_metrics"),
    Rule("predictions as lists", field_except("eval_do_concat_batches", True),
         "predictions are joined by document, not by batch",
         "leave it at True"),
    Rule("losses in metrics", _losses_in_metrics,
         "losses are summed over packs, not kept by document",
         "compute them from predictions and labels in compute_metrics"),
    Rule("NEFTune", field_except("neftune_noise_alpha", None, 0, 0.0),
         "its noise is scaled by the number of a rank's tokens, not by a document's length",
         "leave it out"),
    Rule("float16", field_except("fp16", False),
         "the CPU kernels take only float32, bf16 and float64",
         "use bf16=True"),
    Rule("wrapped packing", _wrapped,
         "it cuts anywhere and keeps no boundaries, so documents would see each other",
         "use bfd_split or bfd, or no packing: hf_longctx packs itself"),
    Rule("generation as prediction", field_except("predict_with_generate", False),
         "batches hold parts of several documents, not prompts",
         "leave it out and call generate in a callback or in compute_metrics"),
    Rule("torch.compile", field_except("torch_compile", False),
         "exchanges cannot be traced yet",
         "leave it at False"),
    Rule("DeepSpeed beyond ZeRO 0, 1 and 2", _deepspeed,
         "only those stages are known to be exact, without offloading and DeepSpeed's optimizers",
         "set zero_optimization.stage to 0, 1 or 2, leave the other keys out, and choose --optim"),
    Rule("attention servers under DeepSpeed", _with_servers(_any_deepspeed),
         "its engine steps within backward, so a step that lost a server cannot be replayed",
         "leave longctx_servers at 0, or leave DeepSpeed out"),
    Rule("attention servers and debug=underflow_overflow", _with_servers(_nan_alarm),
         "results of a lost server are NaN until the step is replayed, and that option stops at "
         "NaN",
         "leave longctx_servers at 0, or leave debug out"),
    Rule("attention servers and optimizers that step within backward",
         _with_servers(_steps_in_backward),
         "a step that lost a server cannot be replayed",
         "leave longctx_servers at 0, or use another --optim, as adamw_torch"),
)  # fmt: skip


def validate_arguments(arguments: Any) -> None:
    """Raise for training arguments under which results would be wrong.

    Raises:
        ValueError: With every rule that applies.
    """
    validate_rules(ARGUMENT_RULES, arguments)

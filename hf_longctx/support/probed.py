"""What a forward on a few tokens shows, beside what a config tells -> why a model is refused.

Floor: support. The probe finds the values; a rule here says why they are refused.
"""

from .rules import NAMES, SOFTMAX_NAMES, WITH_SDPA, Rule


def _as_found(value: object) -> object:
    return value


def _rule(feature: str, rule: str, remedy: str, *, names: tuple[str, ...] = NAMES) -> Rule:
    return Rule(feature, _as_found, rule, remedy, names=names)


NO_KEYWORDS = _rule(
    "forward without **kwargs",
    "documents cannot reach its attention",
    "use a model class whose forward passes keyword arguments on",
)
TENSOR_PARALLEL = _rule(
    "tensor parallel size over 1",
    "ranks that share weights would be taken for ranks that share documents",
    "load it without a tensor parallel plan",
)
BYPASSED = _rule(
    "attention outside the interface",
    "some attention bypasses the interface or drops keyword arguments",
    "train it with its own attention",
)
REPEATED = _rule(
    "several attention calls in a layer",
    "a layer's result is kept once for activation checkpointing, so its second call would be given "
    "the first one's",
    WITH_SDPA,
)
IGNORES_TARGETS = _rule(
    "loss that ignores shift_labels",
    "targets across ranks would be lost",
    "use a model whose loss takes shift_labels",
)
OTHER_LOSS = _rule(
    "loss that is no sum over targets",
    "ranks' losses would not add up to the mean over all trainers' targets",
    "use a model whose loss is its cross entropy over num_items_in_batch",
)
IGNORES_POSITIONS = _rule(
    "positions that are not read",
    "a document cut over ranks would be numbered anew on each",
    "use a model that takes position_ids",
    names=SOFTMAX_NAMES,  # recurrent layers know the order of tokens without positions
)
OTHER_POSITIONS = _rule(
    "positions of its own",
    "documents are numbered 0, 1, 2, ..., which would not be what the model was trained with",
    "use a model that numbers tokens so by itself",
    names=SOFTMAX_NAMES,
)
NEIGHBOURS = _rule(
    "terms from neighbours in the batch",
    "something beside attention crosses documents or counts from the start of the batch",
    WITH_SDPA,
)
COLLATOR = _rule(
    "a data collator of your own",
    "it would build or cut batches on its own",
    "leave it out and pass documents with input_ids (and labels)",
)

PROBE_RULES = (
    NO_KEYWORDS,
    TENSOR_PARALLEL,
    BYPASSED,
    REPEATED,
    IGNORES_TARGETS,
    OTHER_LOSS,
    IGNORES_POSITIONS,
    OTHER_POSITIONS,
    NEIGHBOURS,
    COLLATOR,
)

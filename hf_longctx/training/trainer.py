"""Run a `Trainer` on batches that a group of ranks shares: a cooperative mixin and a ready class.

The mixin checks what it is given, builds the data loaders (documents in, packs out) and decides
what plans depend on. Steps are in `steps`, evaluation in `evaluation`, and the replay of a step
that lost a server in `servers.replay`. Trainer's own loss arithmetic is exact here: every rank
gives `labels` and `shift_labels` of different tokens, and the count of targets is global.
Layer: training.
"""

import logging
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer

from ..attention.spec import log_whole_exchanges, validate_layer_heads
from ..comm.channels import GlooChannel
from ..comm.topology import Topology, find_topology, given_levels, own_place, validate_domains
from ..config import LongCtxArguments
from ..data.documents import column_names
from ..data.sampler import GroupBatchSampler
from ..data.stream import PackStream
from ..planning.layouts.levels import Levels
from ..planning.planners.options import PlanOptions
from ..recurrent.prepare import prepare
from ..runtime.agreement import validate_agreement
from ..runtime.pingpong import enable_pingpong
from ..servers.replay import ReplayMixin
from ..support import (
    NAMES,
    NESTED,
    validate_arguments,
    validate_given,
    validate_model,
    validate_pingpong,
    validate_unread_flags,
    validate_wrappers,
)
from .checks import (
    log_unused_collator,
    position_limit,
    validate_collator,
    validate_collator_targets,
    validate_loaders,
    validate_loss,
    validate_positions,
)
from .evaluation import EvaluationMixin
from .groups import add_channels, find_group, make_runtime, make_server_pool
from .loaders import Loaders
from .measurements import find_auto, flag_options, shared_costs
from .probe import probe, uses_all_parameters
from .report import LongCtxCallback
from .resume import saved_arguments, validate_resumable, validate_same_data
from .steps import StepsMixin

logger = logging.getLogger(__name__)


class LongCtxTrainerMixin(ReplayMixin, StepsMixin, EvaluationMixin):
    """Runs a Trainer whose loss is a sum over tokens on batches that ranks share.

    Put it before the Trainer: `class MyTrainer(LongCtxTrainerMixin, Trainer)`. The model has one of
    our attention names. Data sets hold documents (`input_ids`, optional `labels`), not batches.

    Raises:
        ValueError: At construction, for anything that would not be exact; see `support`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ignored = validate_collator(self.data_collator)
        log_unused_collator(self.data_collator, ignore_id=ignored)
        validate_loaders(self, mixin=LongCtxTrainerMixin)
        validate_loss(self)
        self._longctx_arguments()
        validate_arguments(self.args)
        validate_given(self.model, train_dataset=self.train_dataset)
        self.longctx_group = find_group(self.args)
        given_levels(  # raises, so that a wrong topology shows before data is read
            self.args.longctx_topology,
            ranks=self.longctx_group.size,
            ulysses_size=self.args.longctx_ulysses_size,
        )
        self.longctx_topology: Topology | None = None
        validate_wrappers(self)
        self.longctx_loaders = Loaders(
            self.args,
            self.longctx_group,
            accelerator=self.accelerator,
            vocab_size=self.model.config.get_text_config(decoder=True).vocab_size,
            ignore_id=ignored,
        )
        self._start_report()
        self.args.longctx_trainers = self.longctx_group.trainers
        if self.longctx_attention in NAMES:
            self._adopt()
        else:
            self._restore_name(self.args, source="the training arguments")
        self._position_limit = position_limit(self.model)
        self._check_data()
        self.longctx_runtime = make_runtime(
            self.longctx_group, default_seconds=self.args.ddp_timeout
        )
        self.longctx_servers = make_server_pool(
            self.longctx_runtime, self.longctx_group, self.args, name=self.longctx_attention
        )
        self.longctx_costs = shared_costs(
            self.args, model=self.model, device=self.accelerator.device
        )
        self.add_callback(LongCtxCallback(self))

    def _build_accelerator_args(self, **kwargs: Any) -> Any:
        """Make the Accelerator's arguments; DDP searches for unused parameters only if needed."""
        # The search breaks re-entrant checkpointing of PEFT models, walks through the graph in
        # every step, and warns if it finds none.
        if self.args.ddp_find_unused_parameters is None and self.args.world_size > 1:
            recomputes = self.args.activation_checkpointing
            if recomputes or uses_all_parameters(self.model):
                self.args.ddp_find_unused_parameters = False
        return super()._build_accelerator_args(**kwargs)

    @property
    def longctx_attention(self) -> str:
        """The model's attention name."""
        return str(self.model.config._attn_implementation)

    @property
    def longctx_algorithm(self) -> str:
        """The algorithm that plans the model's softmax layers."""
        return LongCtxArguments.algorithm(self.args, self.longctx_attention)

    def _longctx_arguments(self) -> None:
        """Check that the training arguments have the `longctx_*` fields."""
        if not hasattr(self.args, "longctx_max_tokens_per_rank"):
            raise ValueError(
                f"args is a {type(self.args).__name__} without longctx_* fields; use "
                "LongCtxTrainingArguments, or start the script with `accelerate launch -m "
                "hf_longctx.run`"
            )

    def _adopt(self) -> None:
        """Check and prepare the model under its name, and keep the name for a resume."""
        validate_model(self.model.config, name=self.longctx_attention)
        prepare(self.model)
        validate_layer_heads(
            self.model.config,
            name=self.longctx_algorithm,
            ranks=self.longctx_group.size,
            size=self.args.longctx_ulysses_size,
        )
        given = {"name": self.longctx_attention, "algorithm": self.longctx_algorithm}
        validate_unread_flags(self.args, **given)
        overlap = LongCtxArguments.plan_overlap(self.args, self.longctx_attention)
        log_whole_exchanges(self.model.config, overlap=overlap)
        if not getattr(self, "model_accepts_loss_kwargs", True):
            raise ValueError(
                f"{type(self.model).__name__} does not take num_items_in_batch, so its loss cannot "
                "be a mean over all trainers' tokens; use a model whose loss takes it"
            )
        probe(self.model, name=self.longctx_attention)
        if self.args.longctx_overlap == "pingpong":
            validate_pingpong(self.longctx_attention, trainer=self)
            enable_pingpong(self.model)
        self.args.longctx_attention = self.longctx_attention

    def _check_data(self) -> None:
        """Validate and pack the data sets now, so that their errors show before the first step."""
        self.longctx_sampler: GroupBatchSampler | PackStream | None = None
        given = self.eval_dataset
        named = (
            {f"eval_dataset[{k!r}]": v for k, v in given.items()}
            if isinstance(given, dict)
            else {"eval_dataset": given}
        )
        self.longctx_loaders.validate_same_names({"train_dataset": self.train_dataset, **named})
        if self.train_dataset is not None:
            self.longctx_sampler = self._source(self.train_dataset, name="train_dataset")
        for name, dataset in named.items():
            if dataset is not None:
                self._source(dataset, name=name)

    def _source(self, dataset: Any, *, name: str) -> GroupBatchSampler | PackStream:
        """Make the packs of a data set, and check that the model has positions for them."""
        source = self.longctx_loaders.source(
            dataset, training=name == "train_dataset", description=name
        )
        columns = column_names(dataset)
        validate_collator_targets(self.data_collator, columns)
        if self._position_limit is not None and "position_ids" in columns:
            raise ValueError(
                f"{name} has position_ids, but documents are numbered from 0, which a model with a "
                "table of positions would notice; drop the column, or give seq_lengths"
            )
        if isinstance(source, GroupBatchSampler):  # of a stream, each batch is checked
            lengths = (piece.length for pack in source.packs for piece in pack)
            validate_positions(lengths, limit=self._position_limit)
        return source

    def _loader(self, dataset: Any, *, training: bool) -> DataLoader[Any]:
        """Make a data loader, after what may have changed since construction is checked again."""
        if self.longctx_attention not in NAMES:
            raise ValueError(
                f"the model runs attn_implementation={self.longctx_attention!r}; load it with one "
                f"of {NAMES}, or resume from a checkpoint of such a run"
            )
        if validate_collator(self.data_collator) != self.longctx_loaders.ignore_id:
            raise ValueError(
                "data_collator was replaced after the trainer was made, by one with another "
                "padding token; pass it when the trainer is made"
            )
        self.longctx_options = self._find_options()
        return self.longctx_loaders.loader(dataset, training=training, options=self.longctx_options)

    def _find_options(self) -> PlanOptions:
        """Return what plans depend on: flags, and what the ranks of the group measure together.

        Raises:
            ValueError: The ranks were started with different flags.
        """
        name, ranks = self.longctx_attention, self.longctx_group.size
        options = flag_options(self.args, name=name, ranks=ranks, costs=self.longctx_costs)
        if (channel := self.longctx_runtime.channel) is not None:
            # Before anything is measured: flags decide whether a rank takes part in that.
            what = "the flags of their plans"
            validate_agreement(options.fingerprints, channel=channel, ranks=ranks, what=what)
        self._find_link()
        levels = self._find_levels()
        return replace(options, topology=levels, auto=self.longctx_auto, link=self.longctx_link)

    def _find_levels(self) -> Levels | None:
        """Return the nested domains of the group's ranks if plans use them; they are found once."""
        if self.longctx_topology is None and self.longctx_algorithm in NESTED:
            with self._uncounted():
                self.longctx_topology = self._find_topology()
        return self.longctx_topology.levels if self.longctx_topology else None

    def _find_topology(self) -> Topology:
        """Find the group's topology, and make the channels and measurements that it calls for."""
        arguments, channel = self.args, self.longctx_runtime.channel
        device = self.accelerator.device
        topology = find_topology(
            arguments.longctx_topology,
            ranks=self.longctx_group.size,
            channel=channel,
            place=own_place(device),
        )
        validate_domains(topology, size=arguments.longctx_ulysses_size)
        if isinstance(channel, GlooChannel):
            channels = topology.levels.channels
            add_channels(channel, self.longctx_group, channels=channels, device=device)
        if self.longctx_algorithm == "charm" and arguments.longctx_topology == "auto":
            self.longctx_auto = find_auto(topology, channel, model=self.model, arguments=arguments)
        return topology

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return batches of this rank's group, packed anew each epoch."""
        dataset = self.train_dataset
        if dataset is None:
            raise ValueError("training needs a train_dataset of documents")
        return self._loader(dataset, training=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return batches of evaluation documents, in the same packs each time."""
        given = self.eval_dataset
        if isinstance(eval_dataset, str):
            eval_dataset = given[eval_dataset]
        chosen = given if eval_dataset is None else eval_dataset
        if chosen is None:
            raise ValueError("evaluation needs an eval_dataset of documents")
        return self._loader(chosen, training=False)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return batches of test documents, as `get_eval_dataloader` does."""
        return self._loader(test_dataset, training=False)

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train. A resumed run takes its attention name from the checkpoint's arguments.

        Attention servers that the trainers start live as long as this call.

        Raises:
            ValueError: A resumed run would skip other data than the checkpoint's run trained on;
                see `resume`.
        """
        if self.train_dataset is not None:
            self.args.longctx_train_data = self.longctx_loaders.fingerprint(self.train_dataset)
        if resume_from_checkpoint:
            validate_resumable(self, checkpoint=resume_from_checkpoint)
            saved = saved_arguments(resume_from_checkpoint, output_dir=self.args.output_dir)
            if saved is not None:
                self._restore_name(saved, source="the checkpoint")
                stream = isinstance(self.longctx_sampler, PackStream)
                validate_same_data(
                    saved, self.args, checkpoint=resume_from_checkpoint, stream=stream
                )
        self._forget_evaluation()
        with self.longctx_servers:
            self.longctx_servers.start()
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _forget_evaluation(self) -> None:
        """Let Accelerate prepare a model for training that was only evaluated so far."""
        # An evaluation before training prepares the model without DDP and marks it as prepared.
        # Accelerate would leave it so, and ranks would train separately without a word.
        kind = self.accelerator.distributed_type.value  # FSDP and DeepSpeed wrap in evaluation too
        if kind.startswith("MULTI_") and self.model_wrapped is self.model:
            self.model.__dict__.pop("_is_accelerate_prepared", None)

    def _restore_name(self, saved: Any, *, source: str) -> None:
        """Run a model whose attention name is not ours under the name of an earlier run.

        Args:
            saved: Training arguments of that run; without a name, nothing is done.
            source (`str`): Where these come from, for the log.
        """
        name = getattr(saved, "longctx_attention", None)
        if name and self.longctx_attention not in NAMES:
            logger.warning("resuming with attn_implementation=%r from %s", name, source)
            self.model.set_attn_implementation(name)
            self._adopt()


class LongCtxTrainer(LongCtxTrainerMixin, Trainer):
    """`transformers.Trainer` over batches that a group of ranks shares."""

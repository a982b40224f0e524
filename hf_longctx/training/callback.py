"""Says at the start what a run will do, and at the end how evenly it ran.

Floor: training.
"""

import logging
from typing import Any

from transformers import TrainerCallback

from .report import table

logger = logging.getLogger(__name__)


class LongCtxCallback(TrainerCallback):
    """Start-up arithmetic and the final balance table, on the main process.

    Args:
        trainer: The `LongCtxTrainerMixin` it reports on.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the model, groups, packs and steps."""
        if not state.is_world_process_zero:
            return
        group = self.trainer.longctx_group
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        logger.info(
            "%s: %s, %s parameters; %d trainers = %d group(s) of %d ranks; a batch holds %d x %d = "
            "%d tokens; %s, accumulated %d at a time, %d steps; overlap %s, %d server(s)",
            self.trainer.longctx_attention,
            type(model).__name__,
            f"{sum(p.numel() for p in model.parameters()):,}",
            group.trainers,
            group.groups,
            group.size,
            group.size,
            args.longctx_max_tokens_per_rank,
            group.size * args.longctx_max_tokens_per_rank,
            self.trainer.longctx_sampler.describe(),
            args.gradient_accumulation_steps,
            state.max_steps,
            args.longctx_overlap,
            args.longctx_servers,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the table of steps."""
        if state.is_world_process_zero and any("longctx_tokens" in x for x in state.log_history):
            logger.info(
                "steps (attention max/mean: of softmax layers):\n%s", table(state.log_history)
            )

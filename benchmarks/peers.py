"""Documents -> the stock Trainer that a user of Transformers and TRL would train them with.

Nothing of hf_longctx runs in it.
"""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset, disable_progress_bars
from transformers import Trainer, TrainingArguments


def bfd_packs(documents: Sequence[Sequence[int]], *, length: int) -> list[dict[str, Any]]:
    """TRL's best-fit-decreasing packs: rows of at most `length` ids, with `seq_lengths`.

    Longer documents are cut at `length`, and their rest is lost: that is what `bfd` does.

    Raises:
        ValueError: where TRL is not installed.
    """
    try:
        from trl import pack_dataset
    except ImportError as error:
        raise ValueError("this bench needs TRL for its peer; run `make setup`") from error
    disable_progress_bars()
    rows = Dataset.from_dict({"input_ids": [list(ids) for ids in documents]})
    packs: list[dict[str, Any]] = pack_dataset(rows, seq_length=length, strategy="bfd").to_list()
    return packs


def stock_trainer(model: Any, packs: Sequence[dict[str, Any]], **options: Any) -> Trainer:
    """Transformers' Trainer on such packs, one a rank and step, without padding.

    Documents are told apart by `position_ids`, from which Transformers makes the mask of `sdpa`; a
    pack of one document needs none and runs its causal kernel.

    Args:
        model: Under `sdpa`.
        packs (`Sequence[dict]`): Those of `bfd_packs`.
        options: Fields of `TrainingArguments`.
    """
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    options |= {"per_device_train_batch_size": 1, "remove_unused_columns": False}
    return Trainer(
        model=model,
        args=TrainingArguments(**options),
        train_dataset=Dataset.from_list(list(packs)),
        data_collator=DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
    )

"""Collate a pack of documents into one rank's model inputs, with the batch object attached.

Targets are shifted within each document before anything is cut; then each rank takes the tokens
that the layout gives it. Nothing is padded. Layer: data. Letters: T tokens of this rank.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import Dataset

from ..planning.layouts.layout import cut, halve
from ..planning.planners.options import PlanOptions
from .batch import KEY, LongCtxBatch, halved
from .documents import IGNORE, piece_targets
from .packing import Pack, Piece

_Item = tuple[Pack, Any]


class PackDataset(Dataset):  # type: ignore[type-arg]
    """Documents, indexed by packs: an item is the pack and where to read it.

    The collator reads only the documents that its rank holds tokens of.
    """

    # Accelerate drops `length % batch size` of what it gathers from an epoch's last batch, as
    # repeated samples; packs repeat none.
    total_dataset_length = 0

    def __init__(self, documents: Any) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, pack: Pack) -> _Item:
        return pack, self.documents


@dataclass(frozen=True, kw_only=True)
class LongCtxCollator:
    """Collates one pack for one rank of a group.

    Args:
        rank (`int`): This rank within its group.
        ranks (`int`): Ranks of the group.
        options (`PlanOptions`): What plans depend on, and the name of the layout; see
            `layouts.layout.cut`.
        budget (`int`): Tokens a batch can hold, for the fill.
        halves (`bool`, *optional*, defaults to `False`): Whether to make two halves of each batch
            that can be split; see `layouts.layout.halve`.
    """

    rank: int
    ranks: int
    options: PlanOptions
    budget: int
    halves: bool = False

    def __call__(self, items: Sequence[_Item]) -> dict[str, Any]:
        """Return the inputs of one rank: `input_ids`, `labels`, `shift_labels` and `position_ids`,
        each int64 `[1, T]`, and `longctx_batch`."""
        ((pack, documents),) = items
        # No rank may be without a token: a short pack gets a filler document without targets.
        lengths = [piece.length for piece in pack]
        filler = max(0, self.ranks - sum(lengths))
        if filler:
            lengths.append(filler)
        name, levels = self.options.layout, self.options.topology
        halves = self.halves and halve(lengths, ranks=self.ranks, layout=name)
        if halves:
            layout = halves.whole
        else:
            layout = cut(lengths, ranks=self.ranks, layout=name, levels=levels)
        columns: dict[str, list[np.ndarray]] = {"input_ids": [], "labels": [], "shift_labels": []}
        segments = layout.of_rank(self.rank)
        # Only documents that this rank holds tokens of are read.
        held = {
            d: _filler(filler) if d == len(pack) else _read(documents, pack[d])
            for d in {segment.document for segment in segments}
        }
        for segment in segments:
            for name, values in held[segment.document].items():
                columns[name].append(values[segment.start : segment.stop])
        inputs: dict[str, Any] = {
            name: torch.from_numpy(np.concatenate(runs))[None] for name, runs in columns.items()
        }
        inputs["position_ids"] = torch.from_numpy(layout.positions(self.rank))[None]
        pieces = np.asarray([astuple(piece) for piece in pack], "<i8").reshape(-1, 3)
        inputs[KEY] = LongCtxBatch(
            layout,
            self.rank,
            self.options,
            budget=self.budget,
            filler=filler,
            contents=crc32(
                pieces.tobytes(),
                getattr(documents, "fingerprint", 0),  # a stream's; other documents were scanned
            ),
            stream=getattr(documents, "stream", 0),
            pieces=pieces,
            halves=halved(halves, self.rank, options=self.options) if halves else (),
        )
        return inputs


def _read(documents: Any, piece: Piece) -> dict[str, np.ndarray]:
    """Read one piece of a document: ids, labels, and targets shifted over the whole document."""
    row = documents[piece.document]
    ids = np.asarray(row["input_ids"], np.int64)
    given = row.get("labels")
    labels = ids if given is None else np.asarray(given, np.int64)
    rows = slice(piece.start, piece.stop)
    return {
        "input_ids": ids[rows],
        "labels": labels[rows],
        "shift_labels": piece_targets(labels, piece=piece),
    }


def _filler(tokens: int) -> dict[str, np.ndarray]:
    """Make a document of `tokens` tokens without targets."""
    ignored = np.full(tokens, IGNORE, np.int64)
    return {"input_ids": np.zeros(tokens, np.int64), "labels": ignored, "shift_labels": ignored}

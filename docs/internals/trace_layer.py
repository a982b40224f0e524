"""One tiny layer over two ranks -> which files of hf_longctx its forward and backward enter.

    python docs/internals/trace_layer.py --first 40 --cached 24

A Llama of one layer runs under `distca` over two gloo processes, as a training step has it: the
collator's inputs, the model's forward through Transformers, and `loss.backward()`. A file is
*entered* where a rank calls a function of it between `model(**inputs)` and the end of the backward
pass. The first step makes the plan; the later one has it from the batch. The rank that enters more
is shown. Exits 1 where more files are entered than are allowed.
"""

import argparse
import os
import sys
import threading
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# All names of the package that this script knows:
import hf_longctx
from hf_longctx.data.collator import LongCtxCollator
from hf_longctx.data.packing import Piece
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.runtime.executor import Runtime
from hf_longctx.verify.rank_pool import RankContext, RankPool

PACKAGE = Path(hf_longctx.__file__).parent
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
# One document spans both ranks, and with it tasks move: queries and keys are exchanged.
LENGTHS = (1500, 37, 301, 1, 500)
RANKS, STEPS = 2, 3
Entered = dict[str, str]  # file -> the first function of it, in order


class Trace:
    """Keeps, while it is on, the first function that is called of each file of the package."""

    def __init__(self) -> None:
        self.entered: Entered = {}
        self.calls: dict[str, int] = {"forward": 0, "backward": 0}
        self.direction = "forward"

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>":  # an import alone is no entry
            path = Path(code.co_filename)
            if path.is_relative_to(PACKAGE):
                self.calls[self.direction] += 1
                first = f"{self.direction}: {code.co_qualname}"
                self.entered.setdefault(str(path.relative_to(PACKAGE)), first)

    def __enter__(self) -> "Trace":
        threading.setprofile(self)  # in threads that start now
        if sys.version_info >= (3, 12):
            threading.setprofile_all_threads(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        if sys.version_info >= (3, 12):
            threading.setprofile_all_threads(None)


def steps(context: RankContext) -> tuple[list[Entered], int]:
    """A rank: what each step enters, and the bytes that it sent."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**CONFIG), attn_implementation="distca", dtype=torch.float32
    )
    hf_longctx.prepare(model)
    model.train()
    model.config.use_cache = False
    noise = torch.Generator().manual_seed(0)
    documents = [
        {"input_ids": torch.randint(0, 64, (n,), generator=noise).tolist()} for n in LENGTHS
    ]
    collator = LongCtxCollator(
        rank=context.rank,
        ranks=context.ranks,
        options=PlanOptions(layout="contiguous"),
        budget=sum(LENGTHS),
    )
    pack = tuple(Piece(document=d, start=0, stop=n) for d, n in enumerate(LENGTHS))
    inputs = collator([(pack, documents)])
    runtime = Runtime(channel=context.channel)
    inputs["longctx_batch"].bind(runtime)
    found = []
    for _ in range(STEPS):
        trace = Trace()
        with trace:
            loss = model(**inputs, num_items_in_batch=sum(LENGTHS)).loss
            trace.direction = "backward"
            loss.backward()
        assert all(trace.calls.values()), f"a direction was not seen: {trace.calls}"
        found.append(trace.entered)
    return found, runtime.sent_bytes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--first", type=int, help="Files that the first step may enter.")
    parser.add_argument("--cached", type=int, help="Files that a step with its plan may enter.")
    asked = parser.parse_args()
    with RankPool(RANKS) as pool:
        ranks = pool.run(steps)
    assert all(sent for _, sent in ranks), "the ranks exchanged nothing"
    found, _ = max(ranks, key=lambda of_rank: [len(entered) for entered in of_rank[0]])
    broken = False
    for name, entered, bound in (
        ("first step", found[0], asked.first),
        ("later step, plan cached", found[-1], asked.cached),
    ):
        limit = "" if bound is None else f" of {bound} at most"
        print(f"{name}: {len(entered)} files{limit}")  # noqa: T201
        for file, function in entered.items():
            print(f"  {file:28} {function}")  # noqa: T201
        broken |= bound is not None and len(entered) > bound
    sys.exit(int(broken))


if __name__ == "__main__":
    main()

"""What a run does when its plan is done: measure the held-out text beside the yardsticks, and write something."""

from __future__ import annotations

from typing import Any

from trine.data import Shards, Tokenizer
from trine.engine import Sampling, generate
from trine.evals.baselines import baselines
from trine.evals.bits import held_out_bits
from trine.model import Model
from trine.train.config import EvalConfig

TEMPERATURE, TOP_P = 0.7, 0.95  # of the sample: lively, without the long tail of a small model's mistakes


def evaluate(model: Model, shards: Shards, config: EvalConfig | None = None, *, threads: int = 1) -> dict[str, Any]:
    """Held-out bits per byte of a model and the baselines on the same bytes, as ``eval.json`` holds them.

    ``bits_per_byte`` and ``baselines`` leave near-copy families out (they are the numbers to quote);
    ``bits_per_byte_all`` and ``baselines_all`` take every held-out document. Where all are near-copies, the first two
    are those of all.

    Args:
        model: any `trine.Model` of the shards' vocabulary.
        shards: the data; baselines are kept beside them.
        config: context and yardsticks.
        threads: compressions at the same time.

    Raises:
        DataError: nothing is held out.
    """
    config = config or EvalConfig()
    report = held_out_bits(model, shards, context=config.context, tokens_per_call=max(4096, config.context))
    found = baselines(shards, primed=config.primed, threads=threads)
    values = report.to_json()
    if values["bits_per_byte"] is None:
        values["bits_per_byte"] = values["bits_per_byte_all"]
    every, honest = found["held_out_all"], found["held_out"] or found["held_out_all"]
    return {**values, "baselines": honest, "baselines_all": every}


def write(model: Model, tokenizer: Tokenizer, prompt: str, tokens: int, seed: int = 0) -> str:
    """Let a model go on from ``prompt`` for ``tokens`` tokens at most; returns prompt and continuation."""
    start = [tokenizer.eod_id, *tokenizer.encode(prompt)]
    sampling = Sampling(max_tokens=tokens, temperature=TEMPERATURE, top_p=TOP_P, seed=seed)
    (done,) = generate(model, [start], sampling, tokenizer=tokenizer, end_token=tokenizer.eod_id)
    return prompt + done.text

"""The packing plan: every token once, boundaries right, and a pure function of the step."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.data import IGNORE_INDEX, Batch, DataError, PackingPlan, Shards
from trine.data.packing import best_fit, cut, split_mix, spread_order


def _plan(shards: Shards, **changes: object) -> PackingPlan:
    sizes: dict[str, object] = {"row_length": 16, "tokens_per_step": 256, "micro_batch_tokens": 64, "seed": 3}
    return PackingPlan(shards, **{**sizes, **changes})  # type: ignore[arg-type]


def _digest(plan: PackingPlan, steps: range) -> str:
    """Everything the given steps hold, in one number."""
    digest = hashlib.sha256()
    for step in steps:
        for batch in plan.micro_batches(step):
            for part in (batch.tokens_T, batch.targets_T, batch.weights_T, batch.cu_seqlens_N1, batch.document_N):
                assert part is not None
                digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def _sequences(batch: Batch) -> list[tuple[int, int, list[int], list[int], list[float]]]:
    """Document, start, inputs, targets and weights of each sequence."""
    assert batch.document_N is not None and batch.start_N is not None
    found = []
    bounds = batch.cu_seqlens_N1.tolist()
    for n, (a, b) in enumerate(pairwise(bounds)):
        found.append(
            (
                int(batch.document_N[n]),
                int(batch.start_N[n]),
                batch.tokens_T[a:b].tolist(),
                batch.targets_T[a:b].tolist(),
                batch.weights_T[a:b].tolist(),
            )
        )
    return found


# -- the two pure pieces of arithmetic ---------------------------------------------------------------------------------


def _naive_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rooms = [(capacity - sum(lengths[i] for i in b), n) for n, b in enumerate(bins)]
        fitting = [(room, n) for room, n in rooms if room >= lengths[item]]
        if fitting:
            bins[min(fitting)[1]].append(item)
        else:
            bins.append([item])
    return bins


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 33))
def test_best_fit_equals_its_definition(lengths: list[int], capacity: int) -> None:
    assert best_fit(np.array(lengths, dtype=np.int64), capacity) == _naive_best_fit(lengths, capacity)


def test_best_fit_by_hand() -> None:
    assert best_fit(np.array([5, 7, 3, 4, 1]), 10) == [[1, 2], [0, 3, 4]]
    assert best_fit(np.array([], dtype=np.int64), 10) == []


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=8), st.integers(2, 9))
def test_cut_pieces_are_consecutive_and_only_the_first_and_last_are_short(
    streams: list[tuple[int, int]], row_length: int
) -> None:
    lengths = np.array([length for length, _ in streams])
    first = np.array([head for _, head in streams])
    stream, start, length = cut(lengths, row_length, first)
    assert length.min() >= 1 and length.max() <= row_length
    for i, (total, head) in enumerate(streams):
        mine = [(int(s), int(n)) for s, n in zip(start[stream == i], length[stream == i], strict=True)]
        assert mine[0][0] == 0 and sum(n for _, n in mine) == total
        assert all(a + n == b for (a, n), (b, _) in pairwise(mine))
        assert all(n == row_length for _, n in mine[1:-1])
        assert len(mine) == 1 if total <= row_length else mine[0][1] == min(head, row_length)


def test_cut_by_hand() -> None:
    stream, start, length = cut(np.array([9, 4, 8]), 4)
    assert stream.tolist() == [0, 0, 0, 1, 2, 2]
    assert start.tolist() == [0, 4, 8, 0, 0, 4]
    assert length.tolist() == [4, 4, 1, 4, 4, 4]
    _, start, length = cut(np.array([9, 4]), 4, np.array([3, 1]))
    assert start.tolist() == [0, 3, 7, 0] and length.tolist() == [3, 4, 2, 4]


def test_generator_gives_the_published_numbers() -> None:
    assert split_mix(1, 0).tolist() == [0xE220A8397B1DCDAF]
    assert split_mix(3, 1234567).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


# -- every token once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_length", [2, 16, 33, 4096])
def test_every_token_of_the_training_split_is_a_target_once_an_epoch(shards: Shards, row_length: int) -> None:
    chosen = shards.select("train")[: {2: 3, 16: 8, 33: 8}.get(row_length)]
    sizes = {"row_length": row_length, "micro_batch_tokens": row_length, "tokens_per_step": row_length}
    plan = _plan(shards, documents=chosen, **sizes)
    step = 0
    for epoch in range(2):
        seen: dict[int, dict[int, int]] = {}
        supervised = 0
        for _ in range(plan.report(epoch).bins):
            (batch,) = plan.micro_batches(step)
            step += 1
            supervised += batch.bytes
            for document, start, inputs, targets, weights in _sequences(batch):
                if document < 0:
                    assert set(targets) == {IGNORE_INDEX} and set(weights) == {0.0}
                    continue
                assert set(weights) == {1.0}
                places = seen.setdefault(document, {})
                stream = shards.stream(document).tolist()
                assert inputs == stream[start : start + len(inputs)], "a later piece begins with the token before it"
                for i, target in enumerate(targets):
                    assert start + i not in places
                    places[start + i] = target
        assert sorted(seen) == chosen.tolist()
        for document, places in seen.items():
            targets = [places[i] for i in range(len(places))]
            assert targets == [*shards.stream(document)[1:].tolist(), shards.tokenizer.eod_id]
            assert shards.tokenizer.decode(targets) == shards.text(document)
        assert supervised == sum(shards.documents[i].bytes for i in chosen)
    assert plan.epoch_of(step) == 2.0


def test_steps_that_span_two_epochs_lose_and_repeat_nothing(shards: Shards) -> None:
    plan = _plan(shards)
    bins = [plan.report(epoch).bins for epoch in range(3)]
    assert bins[0] % 16 and (bins[0] + bins[1]) % 16, "the boundary must fall inside a step"
    steps = (bins[0] + bins[1]) // 16
    count: Counter[tuple[int, int]] = Counter()
    for step in range(steps):
        for m in range(plan.micro_batches_per_step):
            for piece in plan.pieces(step, m):
                count.update((piece.document, piece.start + i) for i in range(piece.length))
    places = int(np.diff(shards.offsets)[shards.select("train")].sum())
    assert len(count) == places and set(count.values()) <= {1, 2}
    assert 1.9 < plan.epoch_of(steps) < 2.0
    assert plan.epoch_of(0) == 0.0 and plan.steps_per_epoch() == bins[0] / 16


def test_held_out_documents_are_never_packed_and_a_choice_is_obeyed(shards: Shards) -> None:
    held = set(shards.select("held_out").tolist())
    plan = _plan(shards)
    packed = {p.document for step in range(40) for m in range(4) for p in plan.pieces(step, m)}
    assert packed and not packed & held
    few = _plan(shards, documents=np.array([5, 2]))
    assert {p.document for m in range(4) for p in few.pieces(0, m)} == {2, 5}


# -- boundaries --------------------------------------------------------------------------------------------------------


def test_boundaries_of_documents_are_boundaries_of_sequences(shards: Shards) -> None:
    plan = _plan(shards)
    for step in range(30):
        for batch in plan.micro_batches(step):
            bounds = batch.cu_seqlens_N1.tolist()
            assert bounds[0] == 0 and bounds[-1] == batch.tokens == 64
            lengths = np.diff(bounds)
            assert lengths.min() >= 1 and lengths.max() <= 16
            for document, start, inputs, _, _ in _sequences(batch):
                ends = [i for i, token in enumerate(inputs) if token == shards.tokenizer.eod_id]
                assert document < 0 or ends == ([0] if start == 0 else []), "the start symbol stands only at a start"


def test_full_pieces_come_first_and_padding_last_as_sequences_of_its_own(shards: Shards) -> None:
    plan = _plan(shards, row_length=32, micro_batch_tokens=128, tokens_per_step=256)
    padded = 0
    for step in range(int(plan.steps_per_epoch()) + 1):
        for batch in plan.micro_batches(step):
            lengths = np.diff(batch.cu_seqlens_N1.numpy())
            real = batch.source_N.numpy() >= 0
            full = lengths[real] == 32
            assert (full[:-1] >= full[1:]).all()
            assert (real[:-1] >= real[1:]).all()
            assert (batch.document_N.numpy() >= 0).tolist() == real.tolist()  # type: ignore[union-attr]
            pads = int(lengths[~real].sum())
            assert float(batch.weights_T.sum()) == batch.tokens - pads
            assert int((batch.targets_T == IGNORE_INDEX).sum()) == pads
            if pads:
                padded += 1
                assert batch.mask_T is not None and not batch.mask_T[-pads:].any() and batch.mask_T[:-pads].all()
                assert (batch.tokens_T[-pads:] == shards.tokenizer.eod_id).all()
            else:
                assert batch.mask_T is None
    assert padded, "the case must occur"


def test_report_counts_what_packing_did(shards: Shards) -> None:
    plan = _plan(shards, documents=np.arange(6), row_length=64, micro_batch_tokens=64, tokens_per_step=64)
    targets = np.diff(shards.offsets)[:6]
    report = plan.report()
    assert report.documents == 6 and report.supervised_tokens == targets.sum()
    assert report.cut_documents == (targets > 64).sum() > 0
    assert report.full_pieces == (targets // 64).sum()
    assert report.pieces == (-(-targets // 64)).sum()
    assert report.padding_share == pytest.approx(1 - targets.sum() / (64 * report.bins))
    assert plan.describe()["data"] == shards.hash and plan.describe()["bins"] == report.bins


# -- a pure function of (data, seed, stage, step) ----------------------------------------------------------------------


def test_resume_replays_nothing_sample_ids_depend_on_the_step_alone(shards: Shards) -> None:
    straight = _plan(shards)
    ids = [[piece for m in range(4) for piece in straight.pieces(step, m)] for step in range(120)]
    assert straight.epoch_of(60) < 1 < straight.epoch_of(119), "resume in another epoch too"
    resumed = _plan(shards)
    for step in [119, 60, 61, 0, 95, 30]:
        assert [piece for m in range(4) for piece in resumed.pieces(step, m)] == ids[step]
    assert ids[0] != ids[1]


def test_same_rows_in_another_process(shards: Shards) -> None:
    code = """
import hashlib, sys
from trine.data import PackingPlan, Shards, Tokenizer
shards = Shards.open(sys.argv[1])
plan = PackingPlan(shards, row_length=16, tokens_per_step=256, micro_batch_tokens=64, seed=3)
digest = hashlib.sha256()
for step in range(50, 60):
    for batch in plan.micro_batches(step):
        for part in (batch.tokens_T, batch.targets_T, batch.weights_T, batch.cu_seqlens_N1, batch.document_N):
            digest.update(part.numpy().tobytes())
texts = [shards.text(i) for i in shards.select("train")]
print(digest.hexdigest(), Tokenizer.train(texts, 512).sha256)
"""
    done = subprocess.run([sys.executable, "-c", code, str(shards.folder)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [_digest(_plan(shards), range(50, 60)), shards.tokenizer.sha256]


@pytest.mark.parametrize(
    ("count", "together"), [(0, 4), (1, 4), (3, 4), (4, 4), (10, 4), (64, 1), (1000, 32), (1003, 32)]
)
def test_every_run_of_bins_holds_one_from_each_part_of_the_whole(count: int, together: int) -> None:
    order = spread_order(count, together, "a seed")
    assert sorted(order.tolist()) == list(range(count))
    for begin in range(0, count - together + 1, together):
        parts = sorted((order[begin : begin + together] * together // count).tolist())
        assert parts == list(range(together)), begin
    if count == 1000:  # and which bins meet is drawn
        assert (order != spread_order(count, together, "another seed")).any()
        first_part = order[order < count // together].tolist()
        assert first_part != sorted(first_part)


def test_seed_stage_and_epoch_change_the_order_and_nothing_else_does(shards: Shards) -> None:
    base = _digest(_plan(shards), range(4))
    assert _digest(_plan(shards), range(4)) == base
    assert _digest(_plan(shards, seed=4), range(4)) != base
    assert _digest(_plan(shards, stage=1), range(4)) != base
    plan = _plan(shards, shift_cuts=False)
    assert _digest(plan, range(4)) == base, "the first epoch is cut at multiples of the row length either way"
    one, two = plan.epoch(0), plan.epoch(1)
    assert (one.start_P == two.start_P).all() and (one.order_B != two.order_B).any()
    assert sorted(two.order_B.tolist()) == list(range(two.order_B.size))


def test_later_epochs_cut_elsewhere(shards: Shards) -> None:
    plan = _plan(shards)
    one, two, three = (plan.epoch(n) for n in range(3))
    starts = [set(zip(e.document_P.tolist(), e.start_P.tolist(), strict=True)) for e in (one, two, three)]
    assert len(starts[0] & starts[1]) < 0.5 * len(starts[0])
    assert len(starts[1] & starts[2]) < 0.5 * len(starts[1])


def test_ranks_take_slices_of_the_same_step(shards: Shards) -> None:
    plan = _plan(shards)
    whole = [batch.tokens_T.tolist() for batch in plan.micro_batches(9)]
    halves = [[batch.tokens_T.tolist() for batch in plan.micro_batches(9, rank, 2)] for rank in range(2)]
    assert [halves[i % 2][i // 2] for i in range(4)] == whole


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_length": 1}, "row_length: found 1, need at least 2"),
        ({"micro_batch_tokens": 8}, "micro_batch_tokens: found 8, need a multiple of row_length 16"),
        ({"micro_batch_tokens": 40}, "micro_batch_tokens: found 40, need a multiple of row_length 16"),
        ({"tokens_per_step": 32}, "tokens_per_step: found 32, need a multiple of micro_batch_tokens 64"),
        ({"tokens_per_step": 200}, "tokens_per_step: found 200, need a multiple of micro_batch_tokens 64"),
        ({"documents": np.zeros(0, np.int64)}, "packing plan: no documents to train on in"),
        ({"documents": np.array([0, 60])}, "documents: need different indices from 0 to 59"),
        ({"documents": np.array([-1, 3])}, "documents: need different indices from 0 to 59"),
        ({"documents": np.array([3, 3])}, "documents: need different indices from 0 to 59"),
    ],
)
def test_sizes_that_do_not_fit_are_named(shards: Shards, changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _plan(shards, **changes)


def test_steps_and_ranks_out_of_range_are_named(shards: Shards) -> None:
    plan = _plan(shards)
    with pytest.raises(DataError, match="step -1, micro-batch 0: need step >= 0"):
        plan.micro_batches(-1)
    with pytest.raises(DataError, match="micro-batch 4: need step >= 0 and micro-batch 0 to 3"):
        plan.pieces(0, 4)
    with pytest.raises(DataError, match="rank 0 of 3: need a world size that divides 4 micro-batches"):
        plan.micro_batches(0, 0, 3)
    with pytest.raises(DataError, match="rank 2 of 2"):
        plan.micro_batches(0, 2, 2)

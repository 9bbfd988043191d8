"""Mixtures: shares to within a row, every token once, later stages go on where earlier ones stopped."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.config import SourceShare
from trine.data import DataError, MixturePlan, PackingPlan, Shards, Tokenizer, write_shards
from trine.data.mixture import apportion, shares
from trine.data.sources import make_corpus


@pytest.fixture(scope="module")
def two(tokenizer: Tokenizer, words, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """Two sources: forty short documents of a few words, twelve long ones; one in five held out."""
    short = [(f"s{i:02d}", words(1000 + i, 3 + i % 40).encode()) for i in range(40)]
    long = [(f"l{i:02d}", words(2000 + i, 150 + 37 * i).encode()) for i in range(12)]
    corpora = [make_corpus(n, t, licence="CC0-1.0", one_in=5) for n, t in (("short", short), ("long", long))]
    return write_shards(tmp_path_factory.mktemp("two"), corpora, tokenizer)


SIZES = {"row_length": 16, "tokens_per_step": 64, "micro_batch_tokens": 32, "seed": 3}


def _plan(shards: Shards, *mixture: SourceShare, **changes: object) -> MixturePlan:
    return MixturePlan(shards, mixture, **{**SIZES, "steps": 10, **changes})  # type: ignore[arg-type]


def _seen(plan: MixturePlan) -> Counter[tuple[int, int]]:
    """How often each (document, place) is a target in the stage."""
    count: Counter[tuple[int, int]] = Counter()
    for step in range(plan.steps):
        for m in range(plan.micro_batches_per_step):
            for piece in plan.pieces(step, m):
                count.update((piece.document, piece.start + i) for i in range(piece.length))
    return count


def _rows(plan: MixturePlan) -> list[list[tuple[int, int, int]]]:
    rows = range(plan.steps * plan.tokens_per_step // plan.row_length)
    return [[(p.document, p.start, p.length) for p in plan._row_pieces(r, r + 1)] for r in rows]


# -- shares ------------------------------------------------------------------------------------------------------------


def test_shares_by_hand() -> None:
    mixture = (SourceShare("a", 3.0, end=1.0), SourceShare("b", 1.0))
    got = shares(mixture, 2)
    # At a quarter of the stage the weights are 2.5 and 1, at three quarters 1.5 and 1.
    assert np.allclose(got, [[2.5 / 3.5, 1.5 / 2.5], [1 / 3.5, 1 / 2.5]], rtol=0, atol=1e-15)


def test_apportioned_rows_by_hand() -> None:
    assert apportion(np.full((1, 3), 1.0)).tolist() == [0, 0, 0]
    half = apportion(np.full((2, 6), 0.5)).tolist()
    assert [half.count(0), half.count(1)] == [3, 3] and all(a != b for a, b in zip(half[::2], half[1::2], strict=True))
    quarter = apportion(np.repeat([[0.75], [0.25]], 8, axis=1))
    assert np.bincount(quarter).tolist() == [6, 2]


# no denormals: where a test before has switched them off, hypothesis refuses to draw them
WEIGHTS = st.floats(0, 5, allow_subnormal=False)


@settings(max_examples=80, deadline=None, database=None)
@given(
    st.lists(st.tuples(WEIGHTS, st.none() | WEIGHTS), min_size=1, max_size=6),
    st.integers(1, 97),
)
def test_no_part_is_ever_a_row_away_from_its_share(weights: list[tuple[float, float | None]], rows: int) -> None:
    mixture = [SourceShare(f"s{i}", a + 0.01, end=b) for i, (a, b) in enumerate(weights)]
    share = shares(mixture, rows)
    part = apportion(share)
    given_to = np.cumsum(part == np.arange(len(mixture))[:, None], axis=1)
    away = np.abs(given_to - np.cumsum(share, axis=1)).max()
    limit = 1 - 1 / (2 * len(mixture) - 2) if len(mixture) > 1 else 0
    assert away <= limit + 1e-9


def test_rows_of_a_stage_follow_shares_that_change(two: Shards) -> None:
    mixture = (SourceShare("short", 0.9, end=0.1), SourceShare("long", 0.1, end=0.9))
    plan = _plan(two, *mixture, steps=20, allow_repeats=True)
    source = np.array([two.source_of[row[0][0]] for row in _rows(plan)])
    assert all(len({int(two.source_of[d]) for d, _, _ in row}) == 1 for row in _rows(plan)), "a row has one source"
    share = shares(mixture, source.size)[1]
    assert np.abs(np.cumsum(source) - np.cumsum(share)).max() <= 0.5 + 1e-9
    assert source[:20].sum() < 5 and source[-20:].sum() > 15
    report = plan.report()
    assert [part.rows for part in report.parts] == [int((source == 0).sum()), int((source == 1).sum())] == [40, 40]


# -- every token once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_length", [2, 16, 33])
def test_every_token_of_each_part_once_a_pass(two: Shards, row_length: int) -> None:
    sizes = {"row_length": row_length, "tokens_per_step": row_length, "micro_batch_tokens": row_length}
    mixture = (SourceShare("long", 1.0, shortest=700), SourceShare("short", 1.0))
    rows = 3200 // row_length
    plan = _plan(two, *mixture, **sizes, steps=rows, allow_repeats=True)
    seen = _seen(plan)
    targets = np.diff(two.offsets)
    for part, member in zip(plan.report().parts, plan._members, strict=True):
        counts = Counter(seen[d, i] for d in member.tolist() for i in range(int(targets[d])))
        whole = int(part.epochs)
        assert set(counts) <= {whole, whole + 1}, "nobody is read again before everybody was"
        assert part.available_tokens == targets[member].sum()
        assert part.epochs == sum(k * n for k, n in counts.items()) / part.available_tokens
    assert {two.documents[d].split for d, _ in seen} == {"train"}
    assert (plan.used_D == np.bincount([d for d, _ in seen.elements()], minlength=targets.size)).all()


def test_pieces_of_a_document_are_consecutive_and_its_text_is_what_a_batch_holds(two: Shards) -> None:
    plan = _plan(two, SourceShare("long"), steps=6)
    for step in range(plan.steps):
        for batch in plan.micro_batches(step):
            bounds = batch.cu_seqlens_N1.tolist()
            for n, (a, b) in enumerate(pairwise(bounds)):
                document, start = int(batch.document_N[n]), int(batch.start_N[n])  # type: ignore[index]
                if document < 0:
                    continue
                stream = [*two.stream(document).tolist(), two.tokenizer.eod_id]
                assert batch.tokens_T[a:b].tolist() == stream[start : start + b - a]
                assert batch.targets_T[a:b].tolist() == stream[start + 1 : start + 1 + b - a]
                assert int(batch.source_N[n]) == 1


def test_limits_choose_documents_by_their_tokens(two: Shards) -> None:
    sizes = {d: two.documents[d].tokens for d in two.select("train", source="short").tolist()}
    middle = sorted(sizes.values())[len(sizes) // 2]
    low = _plan(two, SourceShare("short", longest=middle), steps=4, allow_repeats=True)
    high = _plan(two, SourceShare("short", shortest=middle + 1), steps=4, allow_repeats=True)
    assert {d for d, n in sizes.items() if n <= middle} == set(low._members[0].tolist())
    assert {d for d, n in sizes.items() if n > middle} == set(high._members[0].tolist())
    one = _plan(two, SourceShare("short", shortest=middle, longest=middle), steps=1, allow_repeats=True)
    assert all(two.documents[d].tokens == middle for d in one._members[0].tolist())


def test_a_star_stands_for_every_source_not_named(two: Shards) -> None:
    every = _plan(two, SourceShare("*"), steps=4)
    assert every._members[0].tolist() == two.select("train").tolist()
    rest = _plan(two, SourceShare("short", 0.5), SourceShare("*", 0.5), steps=4)
    assert rest._members[1].tolist() == two.select("train", source="long").tolist()


# -- without a mixture -------------------------------------------------------------------------------------------------


def test_no_mixture_is_the_plain_packing_plan_bit_for_bit(shards: Shards) -> None:
    sizes = {"row_length": 16, "tokens_per_step": 256, "micro_batch_tokens": 64, "seed": 3, "stage": 1}
    plain = PackingPlan(shards, **sizes)  # type: ignore[arg-type]
    steps = int(2.5 * plain.steps_per_epoch())
    plan = MixturePlan(shards, steps=steps, **sizes)  # type: ignore[arg-type]
    for step in [*range(12), steps - 1]:
        for m in range(4):
            assert plan.pieces(step, m) == plain.pieces(step, m)
    for ours, theirs in zip(plan.micro_batches(steps - 2), plain.micro_batches(steps - 2), strict=True):
        for name in ("tokens_T", "targets_T", "weights_T", "cu_seqlens_N1", "source_N", "document_N", "start_N"):
            assert getattr(ours, name).equal(getattr(theirs, name))
        assert ours.bytes == theirs.bytes
    assert plan.report().parts[0].epochs == pytest.approx(plain.epoch_of(steps), abs=0.01)


# -- stages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixture", [(SourceShare("*"),), (SourceShare("short", 0.3), SourceShare("long", 0.7))])
def test_a_later_stage_repeats_nothing_until_all_is_read(two: Shards, mixture: tuple[SourceShare, ...]) -> None:
    plans: list[MixturePlan] = []
    for stage, (length, steps) in enumerate([(16, 9), (32, 7), (64, 11)]):
        sizes = {"row_length": length, "micro_batch_tokens": 64, "steps": steps, "stage": stage}
        plans.append(_plan(two, *mixture, **sizes, before=tuple(plans), allow_repeats=True))
        total = sum((_seen(plan) for plan in plans), Counter())
        assert max(total.values()) == 1, f"stage {stage} repeats a token"
    left = [plan.used_D % np.diff(two.offsets) for plan in plans]
    assert (left[0] > 0).any(), "a document is left in the middle"
    last = plans[-1].report().parts
    used = sum(plan.used_D for plan in plans)
    for part, member in zip(last, plans[-1]._members, strict=True):
        assert part.epochs_in_all == pytest.approx(used[member].sum() / part.available_tokens)


def test_the_document_in_which_a_stage_stopped_is_gone_on_with(two: Shards) -> None:
    first = _plan(two, SourceShare("long"), steps=4)
    targets = np.diff(two.offsets)
    (stopped,) = np.flatnonzero((first.used_D > 0) & (first.used_D < targets))
    second = _plan(two, SourceShare("long"), row_length=32, steps=20, stage=1, before=(first,), allow_repeats=True)
    starts = [start for row in _rows(second) for document, start, _ in row if document == stopped]
    assert min(starts) == first.used_D[stopped]


def test_a_second_pass_begins_when_the_first_is_over_across_stages(two: Shards) -> None:
    first = _plan(two, SourceShare("short"), steps=5)
    second = _plan(two, SourceShare("short"), row_length=32, steps=40, stage=1, before=(first,), allow_repeats=True)
    total = _seen(first) + _seen(second)
    targets = np.diff(two.offsets)
    places = [(d, i) for d in two.select("train", source="short").tolist() for i in range(int(targets[d]))]
    counts = Counter(total[place] for place in places)
    assert set(counts) == {1, 2}


def test_documents_read_in_part_all_over_the_place_come_after_those_not_read(shards: Shards) -> None:
    sizes = {"row_length": 16, "tokens_per_step": 64, "micro_batch_tokens": 64}
    first = MixturePlan(shards, steps=4, **sizes)
    second = MixturePlan(shards, (SourceShare("made"),), steps=8, stage=1, before=(first,), **sizes)
    assert not (second.used_D[first.used_D > 0] > 0).any()


# -- a pure function of the step ---------------------------------------------------------------------------------------


def test_one_two_and_one_processes_read_the_same_order(two: Shards) -> None:
    mixture = (SourceShare("short", 0.5), SourceShare("long", 0.5))
    straight = _plan(two, *mixture, allow_repeats=True)
    order = [batch.tokens_T.tolist() for step in range(10) for batch in straight.micro_batches(step)]
    found = []
    for step in range(10):
        plan = _plan(two, *mixture, allow_repeats=True)  # as after a resume: nothing is carried
        world = 2 if 3 <= step < 7 else 1
        ranks = [plan.micro_batches(step, rank, world) for rank in range(world)]
        found += [ranks[m % world][m // world].tokens_T.tolist() for m in range(2)]
    assert found == order


def test_seed_stage_and_steps_change_the_rows_and_nothing_else_does(two: Shards) -> None:
    base = _rows(_plan(two, SourceShare("long")))
    assert _rows(_plan(two, SourceShare("long"))) == base
    assert _rows(_plan(two, SourceShare("long"), seed=4)) != base
    assert _rows(_plan(two, SourceShare("long"), stage=1)) != base


# -- reports -----------------------------------------------------------------------------------------------------------


def test_report_counts_what_the_stage_holds(two: Shards) -> None:
    plan = _plan(two, SourceShare("short", 1), SourceShare("long", 3), steps=10)
    rows = _rows(plan)
    report = plan.report()
    lengths = [n for row in rows for _, _, n in row]
    assert (report.bins, report.pieces, report.supervised_tokens) == (40, len(lengths), sum(lengths))
    assert report.full_pieces == lengths.count(16)
    assert report.padding_share == pytest.approx(1 - sum(lengths) / 640)
    used = {d for row in rows for d, _, _ in row}
    assert report.documents == len(used)
    assert report.cut_documents == sum(two.documents[d].tokens + 1 > 16 for d in used)
    assert [part.share for part in report.parts] == [0.25, 0.75]
    assert report.long_share is None and report.warnings == ()
    described = plan.describe()
    assert described["data"] == two.hash and described["parts"][1]["source"] == "long"
    assert plan.steps_per_epoch() == pytest.approx(
        10 * sum(part.available_tokens for part in report.parts) / sum(lengths)
    )


def test_too_few_long_documents_in_a_later_stage_are_a_warning(two: Shards) -> None:
    first = _plan(two, SourceShare("short"), steps=2)
    sizes = {"row_length": 32, "steps": 4, "stage": 1, "before": (first,)}
    few = _plan(two, SourceShare("short", 0.8), SourceShare("long", 0.2), **sizes, allow_repeats=True).report()
    tokens = [two.documents[d].tokens for d in range(len(two.documents))]
    plan = _plan(two, SourceShare("short", longest=16), SourceShare("long", 0.0, end=1.0), **sizes, allow_repeats=True)
    report = plan.report()
    by_hand = sum(n for row in _rows(plan) for d, _, n in row if tokens[d] > 16) / report.supervised_tokens
    assert report.long_share == pytest.approx(by_hand) and by_hand < 0.4
    (warning,) = report.warnings
    assert warning == (
        f"stage 2: {by_hand:.0%} of the tokens come from documents longer than the 16 tokens of the stage before, need "
        "40% for rows of 32 to teach more than shorter ones; raise the share of long documents"
    )
    assert few.long_share is not None and (not few.warnings) == (few.long_share >= 0.4)
    assert _plan(two, SourceShare("long"), **sizes).report().warnings == ()


def test_a_part_without_a_row_is_a_warning(two: Shards) -> None:
    plan = _plan(two, SourceShare("short", 1e-6), SourceShare("long"), steps=2)
    assert plan.report().warnings == ("stage 1: mixture part short gets none of the 8 rows; its share is too small",)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_source_read_too_often_is_refused_unless_allowed(two: Shards) -> None:
    with pytest.raises(DataError) as caught:
        _plan(two, SourceShare("short"), steps=400)
    part = _plan(two, SourceShare("short"), steps=400, allow_repeats=True).report().parts[0]
    assert str(caught.value) == (
        f"stage 1: mixture part short would be read {part.epochs:.1f} times ({part.documents} documents, "
        f"{part.available_tokens} tokens), need at most 4: add data, lower its share, or allow repeats"
    )
    once = int(part.available_tokens / 64)
    first = _plan(two, SourceShare("short"), steps=2 * once)
    with pytest.raises(DataError, match=r"stage 2: mixture part short would be read 5\.\d times"):
        _plan(two, SourceShare("short"), steps=4 * once, stage=1, before=(first,))


@pytest.mark.parametrize(
    ("mixture", "changes", "message"),
    [
        ((SourceShare("shorr"),), {}, "mixture: no source 'shorr', the data has short, long; did you mean short?"),
        ((SourceShare("zzz"),), {}, "mixture: no source 'zzz', the data has short, long"),
        (
            (SourceShare("long", shortest=10**6),),
            {},
            "mixture part long (from 1000000 tokens): holds no training document; its documents have 341 to 1245 "
            "tokens: change the limits, or give the stage no mixture",
        ),
        (
            (SourceShare("short"), SourceShare("long"), SourceShare("*")),
            {},
            "mixture part *: holds no training document",
        ),
        ((), {"steps": 0}, "steps: found 0, need at least 1"),
        ((), {"row_length": 1}, "row_length: found 1, need at least 2"),
        ((), {"micro_batch_tokens": 40}, "micro_batch_tokens: found 40, need a multiple of row_length 16"),
    ],
)
def test_mixtures_and_sizes_that_cannot_be_are_named(
    two: Shards, mixture: tuple[SourceShare, ...], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        _plan(two, *mixture, **changes)
    assert str(caught.value) == message


def test_parts_that_share_documents_are_refused(two: Shards) -> None:
    with pytest.raises(DataError) as caught:
        _plan(two, SourceShare("long"), SourceShare("long", shortest=900))
    both = [d for d in two.select("train", source="long").tolist() if two.documents[d].tokens >= 900]
    one = two.documents[both[0]]
    assert str(caught.value) == (
        f"mixture part long (from 900 tokens): shares {len(both)} documents with mixture part long, for example "
        f"{one.name} ({one.tokens} tokens); need parts without a common document"
    )


def test_steps_outside_the_stage_and_plans_of_other_data_are_refused(two: Shards, shards: Shards) -> None:
    plan = _plan(two, SourceShare("long"), steps=3)
    with pytest.raises(DataError, match=r"^step 3: need 0 to 2$"):
        plan.micro_batches(3)
    with pytest.raises(DataError, match="step -1"):
        plan.micro_batches(-1)
    with pytest.raises(DataError, match="before: a plan of other data"):
        _plan(shards, SourceShare("made"), before=(plan,))

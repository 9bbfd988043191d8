"""The hash of a bias, and what a comparison of ranks says; two real ranks: test_policies.py."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from trine.balance import Freeze, RankChecked, RankMismatch, bias_hash, check_same_bias
from trine.ops.router import RouterStats


def by_hand(bias_LE: torch.Tensor) -> int:
    """The sum of SplitMix64's finaliser over (bits + place * golden ratio), unsigned, modulo 2^64."""
    whole, total = 2**64, 0
    for place, bits in enumerate(bias_LE.reshape(-1).view(torch.int32).tolist(), start=1):
        z = (bits % 2**32 + place * 0x9E3779B97F4A7C15) % whole
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % whole
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % whole
        total += z ^ (z >> 31)
    return total % whole


def test_hash_is_the_published_mixer() -> None:
    bias_LE = torch.randn(3, 7)
    found = bias_hash(bias_LE)
    assert found.dtype == torch.int64 and found.shape == ()
    assert int(found) % 2**64 == by_hand(bias_LE)
    assert by_hand(torch.zeros(0)) == int(bias_hash(torch.zeros(0, 4)))


def test_hash_sees_one_bit_a_swap_and_a_sign_of_zero() -> None:
    bias_LE = torch.randn(2, 5)
    last_bit = bias_LE.clone()
    last_bit[1, 2] = torch.nextafter(last_bit[1, 2], torch.tensor(9.0))
    swapped = bias_LE[:, [1, 0, 2, 3, 4]]
    zero, negative = torch.zeros(2, 5), torch.zeros(2, 5)
    negative[0, 0] = -0.0
    hashes = {int(bias_hash(one)) for one in (bias_LE, last_bit, swapped, bias_LE.flip(0), zero, negative)}
    assert len(hashes) == 6
    assert int(bias_hash(bias_LE.t().contiguous().t())) == int(bias_hash(bias_LE)), "layout does not matter"


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({3: 7}, "found 0000000000000007 on rank 3, need {mine}, that of rank 0, 1, 2 (64-bit hashes)"),
        (
            {0: -1, 2: 5},
            "found ffffffffffffffff on rank 0, 0000000000000005 on rank 2, need {mine}, that of rank 1, 3 ",
        ),
        ({0: 9, 1: 9, 3: 9}, "found {mine} on rank 2, need 0000000000000009, that of rank 0, 1, 3 "),
    ],
)
def test_the_majority_is_right(monkeypatch: pytest.MonkeyPatch, others: dict[int, int], message: str) -> None:
    stats = RouterStats.allocate(1, 4)

    def all_gather(gathered: list[torch.Tensor], mine: torch.Tensor, group: object) -> None:
        for rank, one in enumerate(gathered):
            one.copy_(torch.tensor([others[rank]]) if rank in others else mine)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2, 3])
    monkeypatch.setattr(dist, "all_gather", all_gather)
    mine = f"{int(bias_hash(stats.bias_LE)) % 2**64:016x}"
    with pytest.raises(RankMismatch) as error:
        check_same_bias(stats)
    assert message.format(mine=mine) in str(error.value)
    others.clear()
    check_same_bias(stats)


def test_compared_after_the_first_step_and_then_every_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    done: list[int] = []
    monkeypatch.setattr("trine.balance.rank_check.check_same_bias", lambda stats, group: seen.append(len(done)))
    policy, stats = RankChecked(Freeze(), 3), RouterStats.allocate(1, 4)
    for step in range(8):
        assert policy.step(stats).tokens_L.tolist() == [0]
        done.append(step)
    assert seen == [0, 3, 6]
    assert policy.state_dict() == {}
    with pytest.raises(ValueError, match="Freeze remembers nothing"):
        policy.load_state_dict({"x": 1})


def test_bad_every() -> None:
    with pytest.raises(ValueError, match="every: found 0, need at least 1"):
        RankChecked(Freeze(), 0)

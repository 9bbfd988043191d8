"""Snapshot, fork, restore, save: the cache is a value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trine.cache import HybridCache
from trine.config import ModelConfig, to_dict
from trine.model import Model

Tiny = Callable[..., ModelConfig]


def ready(config: ModelConfig, tokens: int = 21) -> tuple[Model, HybridCache]:
    model = Model(config).eval()
    cache = HybridCache(config)
    with torch.no_grad():
        model(torch.randint(97, (tokens,)), cache=cache)
    return model, cache


@torch.no_grad()
def test_forks_go_their_own_way_and_leave_the_origin(tiny_config: Tiny) -> None:
    model, cache = ready(tiny_config())
    expected = [model(torch.tensor([t]), cache=cache.snapshot()) for t in (5, 6, 7)]
    forks = cache.fork(3)
    together_ND = model(torch.tensor([5, 6, 7]), cache=forks)
    torch.testing.assert_close(together_ND, torch.cat(expected), rtol=0, atol=1e-5)
    assert cache.lengths_N.tolist() == [21]
    assert forks.lengths_N.tolist() == [22] * 3
    again = model(torch.tensor([5]), cache=cache.snapshot())
    assert torch.equal(again, expected[0])


@torch.no_grad()
def test_two_snapshots_of_one_state_do_not_write_into_each_other(tiny_config: Tiny) -> None:
    model, cache = ready(tiny_config())
    a, b = cache.snapshot(), cache.snapshot()
    first = [model(torch.tensor([5]), cache=a), model(torch.tensor([9]), cache=a)]
    model(torch.tensor([44]), cache=b)
    model(torch.tensor([45, 46, 47]), cache=b)
    fresh = cache.snapshot()
    second = [model(torch.tensor([5]), cache=fresh), model(torch.tensor([9]), cache=fresh)]
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)


@torch.no_grad()
def test_restore_goes_back(tiny_config: Tiny) -> None:
    model, cache = ready(tiny_config())
    mark = cache.snapshot()
    first = model(torch.tensor([3, 4]), cache=cache)
    cache.restore(mark)
    assert torch.equal(model(torch.tensor([3, 4]), cache=cache), first)
    assert mark.lengths_N.tolist() == [21]


@torch.no_grad()
def test_save_and_load_continue_bit_for_bit(tiny_config: Tiny, tmp_path: Path) -> None:
    model, cache = ready(tiny_config())
    cache.save(tmp_path / "a.cache")
    loaded = HybridCache.load(tmp_path / "a.cache")
    assert loaded.lengths_N.tolist() == [21]
    assert loaded.config == cache.config
    assert torch.equal(model(torch.tensor([3]), cache=loaded), model(torch.tensor([3]), cache=cache))
    assert not list(tmp_path.glob("*.tmp"))


def test_damaged_and_newer_files_are_refused(tiny_config: Tiny, tmp_path: Path) -> None:
    _, cache = ready(tiny_config())
    path = tmp_path / "a.cache"
    cache.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"a\.cache: not a readable cache file"):
        HybridCache.load(path)
    save_file({"x": torch.zeros(1)}, path, metadata={"format_version": "99"})
    with pytest.raises(ValueError, match=r"a\.cache: found cache format 99, need 1"):
        HybridCache.load(path)


def test_files_of_something_else_are_named(tiny_config: Tiny, tmp_path: Path) -> None:
    config, cache = tiny_config(), ready(tiny_config())[1]
    path, good, tensors = tmp_path / "a.cache", json.dumps(to_dict(config)), cache._tensors()

    def message(meta: dict[str, str] | None, change: dict[str, torch.Tensor | None]) -> str:
        kept = {name: x for name, x in {**tensors, **change}.items() if x is not None}
        save_file(kept, path, metadata=meta)
        with pytest.raises(ValueError) as error:
            HybridCache.load(path)
        assert str(error.value).startswith(f"{path}: ")
        return str(error.value).removeprefix(f"{path}: ")

    version = {"format_version": "1"}
    assert message(None, {}) == "found cache format none, need 1"
    assert message({"format_version": "one"}, {}) == "found cache format one, need 1"
    assert message(version, {}) == "damaged cache file, found no config"
    assert message(version | {"config": "{"}, {}).startswith("damaged cache file (Expecting property name")
    assert message(version | {"config": "[]"}, {}).startswith("damaged cache file (")
    assert message(version | {"config": "{}"}, {}) == "damaged cache file (width: missing from the model configuration)"
    whole = version | {"config": good}
    assert message(whole, {"lengths_N": None}) == "damaged cache file, found no lengths_N"
    assert message(whole, {"0.state_NHKV": None}) == "damaged cache file, found no 0.state_NHKV"
    wrong = torch.zeros(2, 2, 16, 16)
    found = message(whole, {"0.state_NHKV": wrong})
    assert found == "damaged cache file (0.state_NHKV: found shape (2, 2, 16, 16), need (1, 2, 16, 16))"


@torch.no_grad()
def test_cat_and_select_are_inverse(tiny_config: Tiny) -> None:
    model, a = ready(tiny_config(), 21)
    b = HybridCache(tiny_config())
    model(torch.randint(97, (3,)), cache=b)
    both = HybridCache.cat([a, b])
    assert both.lengths_N.tolist() == [21, 3]
    apart = [model(torch.tensor([8]), cache=c.snapshot()) for c in (b, a)]
    together = model(torch.tensor([8, 8]), cache=both.select([1, 0]))
    torch.testing.assert_close(together, torch.cat(apart), rtol=0, atol=1e-5)


def test_fork_is_nearly_free_and_bytes_are_the_presets(tiny_config: Tiny) -> None:
    _, cache = ready(tiny_config())
    state = 3 * 4 * (2 * 16 * 16 + 3 * 3 * 2 * 16)
    latents = 2 * 4 * 21 * (16 + 8)
    assert state + latents <= cache.bytes() <= state + latents + 100


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, m: c.select([1]), "indices: found 1, need 0 to 0"),
        (lambda c, m: c.select([]), "indices: found none, need at least one sequence"),
        (lambda c, m: c.fork(0), "copies: found 0, need at least 1"),
        (lambda c, m: HybridCache.cat([]), "caches: found none, need at least one"),
        (lambda c, m: HybridCache(c.config, 0), "n_sequences: found 0, need at least 1"),
        (
            lambda c, m: m(torch.tensor([1, 2, 3]), cache=c.fork(2)),
            "tokens_T: found 3 tokens for 2 sequences, need 2 or cu_seqlens",
        ),
        (
            lambda c, m: m(torch.tensor([1, 2, 3]), torch.tensor([0, 3]), cache=c.fork(2)),
            "cu_seqlens: found 1 sequences, the cache holds 2",
        ),
    ],
)
def test_misuse_is_named(tiny_config: Tiny, call: Callable[[HybridCache, Model], object], message: str) -> None:
    model, cache = ready(tiny_config())
    with pytest.raises(ValueError) as error:
        call(cache, model)
    assert str(error.value) == message

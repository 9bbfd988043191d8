"""The presets are K3's structure, and what cannot work is refused by name."""

from __future__ import annotations

import dataclasses

import pytest

from trine.config import PRESETS, from_dict, preset, to_dict


def test_k3_layout_is_the_released_one() -> None:
    k3 = preset("k3")
    assert len(k3.kda_layers) == 69
    assert len(k3.mla_layers) == 24
    assert k3.mla_layers[:2] == (3, 7)
    assert k3.mla_layers[-2:] == (91, 92)
    assert k3.moe_layers == tuple(range(1, 93))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_ends_in_mla_and_starts_dense(name: str) -> None:
    config = preset(name)
    assert config.mla_layers[-1] == config.layers - 1
    assert config.dense_layers == 1
    assert config.shared_experts == 2
    assert 4 <= config.depth_sources - 1 <= 8


# Failure B014: off by one in the number of depth sources.
@pytest.mark.parametrize(("layers", "block", "sources"), [(93, 12, 9), (24, 12, 3), (5, 2, 4), (2, 1, 3), (1, 12, 2)])
def test_b014_depth_sources_count_embedding_blocks_and_partial(layers: int, block: int, sources: int) -> None:
    config = dataclasses.replace(preset("smoke"), layers=layers, mla_layers=(layers - 1,), block_layers=block)
    assert config.depth_sources == sources


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 16}, "top_k: found 16, need less than experts = 16"),
        ({"heads": 0}, "heads: found 0, need at least 1"),
        ({"mla_layers": (3, 5)}, "mla_layers: found 5, need 0-based layer numbers from 0 to 4"),
        ({"mla_layers": (3, 3)}, "mla_layers: found (3, 3), need each layer once"),
        ({"mla_layers": [3]}, "mla_layers: found [3], need a tuple of 0-based layer numbers"),
        (
            {"tile": 32},
            "g_min: found -5.0, need tile * |g_min| < 88 (the range of float32), found 32 * 5 = 160",
        ),
        ({"g_min": 0.0}, "g_min: found 0.0, need a negative log-decay"),
        (
            {"tile": 1, "g_min": -50.0},  # KDA's own tile has 16 rows
            "g_min: found -50.0, need tile * |g_min| < 88 (the range of float32), found 16 * 50 = 800",
        ),
        ({"g_min": float("nan")}, "g_min: found nan, need a finite number"),
        ({"situ_beta": float("inf")}, "situ_beta: found inf, need a finite number"),
        ({"init_std": -1.0}, "init_std: found -1.0, need None or a positive number"),
        ({"init_std": 0.0}, "init_std: found 0.0, need None or a positive number"),
        ({"gate_kind": "clamp"}, "gate_kind: found 'clamp', need one of bounded, softplus"),
        (
            {"residual": "plian"},
            "residual: found 'plian', need one of attn_res, plain, chunk, shallow_to_deep; did you mean 'plain'?",
        ),
        ({"residual": "shallow_to_deep"}, "shallow_layers: found (), need at least one layer"),
        (
            {"residual": "shallow_to_deep", "shallow_layers": (1, 3), "deep_layers": (3,)},
            "deep_layers: found (3,), need layers after the last of shallow_layers (1, 3)",
        ),
        ({"dense_layers": 6}, "dense_layers: found 6, need 0 to 5"),
        ({"embed_std": 0.0}, "embed_std: found 0.0, need a positive number"),
        ({"norm_eps": -1.0}, "norm_eps: found -1.0, need zero or more"),
    ],
)
def test_what_cannot_work_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        dataclasses.replace(preset("smoke"), **change)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"preset: found 'laptp', need one of smoke, .*; did you mean 'laptop'\?"):
        preset("laptp")


def test_dictionary_round_trip_and_its_errors() -> None:
    values = to_dict(preset("laptop"))
    assert from_dict(values) == preset("laptop")
    with pytest.raises(ValueError, match=r"topk: no such field of ModelConfig; did you mean 'top_k'\?"):
        from_dict({**values, "topk": 2})
    del values["width"]
    with pytest.raises(ValueError, match="width: missing"):
        from_dict(values)

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trine.config import ModelConfig
from trine.data import Batch
from trine.model import Model
from trine.nn import GatedMLA
from trine.nn.mla import HeadPeaks
from trine.train.config import OptimizerConfig, Stage
from trine.train.optimizers import Optimizers
from trine.train.qk_clip import ClippedHead, head_factors, qk_clip, watch_heads
from trine.train.run_folder import RunFolder
from trine.train.schedule import lay_out
from trine.train.trainer import Trainer


class Layer(nn.Module):
    """An attention with a name in front."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.attention = GatedMLA(12, 3, 4, q_rank=6, kv_rank=5, shared_key_dim=2).to(dtype)


@torch.no_grad()
def scores(module: GatedMLA, x_TD: Tensor) -> Tensor:
    """[H, T, T] scaled scores, -inf after the query, written out from the definition."""
    q_HTC = module.q_up(module.q_norm(module.q_down(x_TD))).unflatten(-1, (3, 6)).transpose(0, 1)
    latent_TR, shared_TS = module.kv_down(x_TD).tensor_split((5,), -1)
    up_HKR = module.kv_up.weight.view(3, 8, 5)[:, :4]
    content_HTK = torch.einsum("tr,hkr->htk", module.kv_norm(latent_TR), up_HKR)
    key_HTC = torch.cat((content_HTK, shared_TS.expand(3, -1, -1)), -1)
    found_HTT = torch.einsum("htc,hjc->htj", q_HTC, key_HTC) * 6**-0.5
    return found_HTT.masked_fill(torch.ones(len(x_TD), len(x_TD)).triu(1).bool(), -torch.inf)


def test_factors_are_those_of_the_formula() -> None:
    query_R, key_R = head_factors(Layer().attention, torch.tensor([0.25, 1.0, 0.81]))
    # 4 content rows with sqrt(gamma), 2 rows that meet the shared key with gamma; 4 key rows, 4 value rows
    assert query_R.tolist() == pytest.approx([0.5] * 4 + [0.25] * 2 + [1.0] * 6 + [0.9] * 4 + [0.81] * 2)
    assert key_R.tolist() == pytest.approx([0.5] * 4 + [1.0] * 4 + [1.0] * 8 + [0.9] * 4 + [1.0] * 4)


def test_after_a_clip_the_peak_is_the_limit_and_other_heads_are_what_they_were() -> None:
    layer, x_TD = Layer(), torch.randn(19, 12, dtype=torch.float64)
    module = layer.attention
    with torch.no_grad():
        module.q_up.weight.view(3, 6, 6)[1] *= 40
    before_HTT = scores(module, x_TD)
    peak_H = before_HTT.amax((1, 2))
    limit = float(peak_H.sort().values[1:].mean())  # between the second and the largest
    assert float(peak_H[1]) == float(peak_H.max()) and float(peak_H[1]) > limit
    watch_heads(module, limit)
    value_before = module.kv_up.weight.view(3, 8, 5)[:, 4:].clone()
    module(x_TD)
    assert module.peaks is not None and torch.allclose(module.peaks.peak_H, peak_H, rtol=1e-12)
    clipped = qk_clip(layer, Optimizers(layer, OptimizerConfig()))
    assert clipped == [ClippedHead("attention", 1, pytest.approx(float(peak_H[1])))]
    after_HTT = scores(module, x_TD)
    assert float(after_HTT[1].max()) == pytest.approx(limit, rel=1e-12)
    seen = before_HTT[1] > -torch.inf
    torch.testing.assert_close(after_HTT[1][seen], before_HTT[1][seen] * (limit / peak_H[1]), rtol=1e-11, atol=1e-13)
    assert torch.equal(after_HTT[[0, 2]], before_HTT[[0, 2]])
    assert torch.equal(module.kv_up.weight.view(3, 8, 5)[:, 4:], value_before)


def test_below_the_limit_nothing_moves_and_zero_ends_the_watch() -> None:
    layer, x_TD = Layer(), torch.randn(5, 12, dtype=torch.float64)
    module = layer.attention
    before = {name: value.clone() for name, value in module.state_dict().items()}
    watch_heads(module, 1e6)
    module(x_TD)
    assert qk_clip(layer, Optimizers(layer, OptimizerConfig())) == []
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    watch_heads(module, 0.0)
    assert module.peaks is None


def test_only_training_is_watched() -> None:
    module, x_TD = Layer().attention, torch.randn(5, 12, dtype=torch.float64)
    watch_heads(module, 0.1)
    with torch.no_grad():
        module(x_TD)
    module.eval()(x_TD)
    assert module.peaks is not None and bool((module.peaks.peak_H == -torch.inf).all())


def test_masters_of_sixteen_bit_weights_are_scaled() -> None:
    module = Layer(torch.bfloat16).attention
    optimizers = Optimizers(module, OptimizerConfig())
    before = optimizers.state_tensors()["q_up.weight/master"].clone()
    optimizers.scale_rows("q_up.weight", torch.arange(18) / 10)
    master = optimizers.state_tensors()["q_up.weight/master"]
    torch.testing.assert_close(master, before * (torch.arange(18) / 10)[:, None])
    assert torch.equal(module.q_up.weight, master.to(torch.bfloat16))


def test_peaks_merge_to_the_larger() -> None:
    mine, other = HeadPeaks(2, 1.0), HeadPeaks(2, 1.0)
    mine.see(torch.tensor([1.0, -3.0]))
    other.see(torch.tensor([0.5, 4.0]))
    mine.merge_(other)
    assert mine.peak_H.tolist() == [1.0, 4.0]
    mine.zero_()
    assert mine.peak_H.tolist() == [-torch.inf, -torch.inf]


def batches(vocab: int, count: int) -> list[Batch]:
    found = []
    for seed in range(count):
        ids = torch.randint(vocab, (41,), generator=torch.Generator().manual_seed(seed))
        bounds = torch.tensor([0, 17, 40], dtype=torch.int32)
        found.append(Batch(ids[:-1], ids[1:], torch.ones(40), bounds, torch.zeros(2, dtype=torch.int64)))
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_clips_after_its_update_whatever_the_number_of_threads(
    tiny_config: Callable[..., ModelConfig], tmp_path: Path, recompute: bool
) -> None:
    config = tiny_config(mtp=True)
    stage = Stage(length=40, step_tokens=80, micro_tokens=40, recompute=recompute)

    def trained(limit: float, workers: int, folder: RunFolder | None = None) -> Model:
        torch.manual_seed(0)
        model = Model(config)
        assert model.mtp is not None
        model.mtp.weight = 0.3
        constants = OptimizerConfig(qk_clip=limit)
        trainer = Trainer(
            *(model, lay_out((stage,), 80 * 2), lambda span, step: batches(97, 2), constants),
            workers=workers,
            folder=folder,
        )
        record = trainer.train_step()
        assert record.updated and record.mtp_loss is not None and abs(record.mtp_loss - record.loss) < 1.0
        assert (record.clipped_heads > 0) == (limit == 0.05)
        return model

    with RunFolder(tmp_path / "run") as folder:
        clipped = trained(0.05, 1, folder)
        (event,) = [json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()]
    assert event["kind"] == "qk_clip" and event["step"] == 1
    side_by_side, free = trained(0.05, 2), trained(0.0, 1)
    for name, value in clipped.state_dict().items():
        assert torch.equal(value, side_by_side.state_dict()[name]), name
    by_head = {(one["module"], one["head"]): one["peak"] for one in event["heads"]}
    content, shared = config.head_dim, config.shared_key_dim
    for layer in config.mla_layers:
        name = f"layers.{layer}.attention"
        mine, other = (m.get_submodule(name).q_up.weight.view(config.heads, -1, config.q_rank) for m in (clipped, free))
        for head in range(config.heads):
            gamma = 0.05 / by_head[name, head] if (name, head) in by_head else 1.0
            torch.testing.assert_close(mine[head, :content], other[head, :content] * gamma**0.5)
            torch.testing.assert_close(mine[head, content:], other[head, content:] * gamma)
            assert mine[head, content:].shape[0] == shared

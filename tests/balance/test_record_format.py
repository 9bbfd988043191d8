from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest

from trine.balance.record_format import (
    FRAME_BYTES,
    PRECISIONS,
    SUMMARY,
    Arrays,
    Frame,
    Precision,
    RecordError,
    Shape,
    bias_words,
    combine,
    load_shift,
    load_values,
    load_words,
    pack_arrays,
    pack_summary,
    pack_to_fit,
    unpack_summary,
)


def frame_of(loads_LE: np.ndarray, bias_LE: np.ndarray, number: int = 1) -> Frame:
    layers = len(loads_LE)
    loads_LE = loads_LE.astype(np.float64)
    count_L = np.arange(layers, dtype=np.int64) + (1 << 40)
    return Frame(
        first=number,
        last=number,
        steps=1,
        loads_LE=loads_LE,
        bias_LE=bias_LE.astype(np.float32),
        tokens_L=count_L,
        dropped_L=count_L * 0 + 3,
        saturated_L=count_L + 1,
        overflow_L=count_L + 2,
        margins_LQ=np.linspace(-1, 1, 5 * layers, dtype=np.float32).reshape(layers, 5),
        lowest_LE=loads_LE,
        highest_LE=loads_LE,
        summary_KLM=np.random.default_rng(number).normal(size=(1, layers, len(SUMMARY))).astype(np.float32),
    )


def random_frame(layers: int = 3, experts: int = 7, mean: float = 40.0, seed: int = 0) -> Frame:
    rng = np.random.default_rng(seed)
    return frame_of(rng.poisson(mean, (layers, experts)), rng.normal(0, 0.1, (layers, experts)), seed + 1)


@pytest.mark.parametrize("bits", [11, 9, 8])
def test_loads_keep_their_bound(bits: int) -> None:
    rng = np.random.default_rng(1)
    loads = np.concatenate((np.arange(5000), (10 ** rng.uniform(0, 9.3, 5000)).astype(np.int64), [2**31]))
    shift = load_shift(float(loads.max()))
    found = load_values(load_words(loads, shift, bits), shift, bits)
    exact = loads <= 2**bits
    assert np.array_equal(found[exact], loads[exact].astype(float))
    assert np.abs(found[~exact] / loads[~exact] - 1).max() <= 2.0**-bits
    # a mean below one token is not nothing
    assert load_values(load_words(np.array([1e-9, 0.0]), 16, bits), 16, bits).tolist() == pytest.approx(
        [2.0 ** (16 - 24 + 11 - bits), 0.0]
    )


@pytest.mark.parametrize(("largest", "shift"), [(0.0, 0), (32768.0, 0), (32769.0, 1), (65536.0, 1), (2.0**31, 16)])
def test_shift(largest: float, shift: int) -> None:
    assert load_shift(largest) == shift


@pytest.mark.parametrize("bits", [16, 12, 10, 8])
def test_biases_keep_their_bound(bits: int) -> None:
    bias_LE = np.random.default_rng(2).normal(0.3, (0.001,), (4, 61)).astype(np.float32)
    bias_LE[2] = 0.25
    bias_LE[3, 0] = -7.0
    words_LE, scale_L2 = bias_words(bias_LE, bits)
    found_LE = scale_L2[:, :1] + words_LE * scale_L2[:, 1:]
    bound_L = (bias_LE.max(1) - bias_LE.min(1)) / (2 * (2**bits - 1))
    assert (np.abs(found_LE - bias_LE).max(1) <= bound_L * 1.0001 + 1e-12).all() and np.all(found_LE[2] == 0.25)


@pytest.mark.parametrize(("layers", "experts"), [(1, 1), (3, 7), (5, 18), (2, 9000), (20, 896)])
def test_a_frame_comes_back(layers: int, experts: int) -> None:
    frame = random_frame(layers, experts)
    blob, number = pack_to_fit(frame)
    kept = Arrays.of(blob, Shape(layers, experts))
    found = kept.frame(1, 1, 1, frame.summary_KLM)
    assert number == 0 or layers * experts > 16_384
    assert np.array_equal(found.loads_LE, frame.loads_LE) and found.loads_LE.dtype == np.float64
    error = np.abs(found.bias_LE - frame.bias_LE).max()
    assert (
        error <= np.ptp(frame.bias_LE, axis=1).max() / (2 ** PRECISIONS[number].bias - 1)
        and found.bias_LE.dtype == np.float32
    )
    for name in ("tokens_L", "dropped_L", "saturated_L", "overflow_L", "margins_LQ"):
        assert np.array_equal(getattr(found, name), getattr(frame, name)), name
    assert np.array_equal(found.highest_LE, frame.loads_LE) and found.precision == PRECISIONS[number]
    for layer in {0, layers // 2, layers - 1}:
        assert np.array_equal(kept.loads(0, layer), found.loads_LE[layer])
        assert np.array_equal(kept.bias(layer), found.bias_LE[layer])


def test_no_layers_at_all() -> None:
    blob, _ = pack_to_fit(frame_of(np.zeros((0, 4)), np.zeros((0, 4))))
    found = Arrays.of(blob, Shape(0, 4)).frame(1, 1, 1, np.zeros((1, 0, len(SUMMARY))))
    assert found.loads_LE.shape == found.bias_LE.shape == (0, 4) and found.tokens_L.shape == (0,)


@pytest.mark.parametrize(
    ("mean", "skew"), [(146.0, 0.0), (1500.0, 0.0), (75_000.0, 0.0), (1500.0, 1.0), (75_000.0, 1.0)]
)
def test_k3s_frames_fit(mean: float, skew: float) -> None:
    """92 x 896: at balance with the noise of sampling, and with loads spread over two orders of magnitude."""
    rng = np.random.default_rng(3)
    shape = (92, 896)
    loads_LE = rng.poisson(mean * np.exp(rng.normal(0, 1, shape) * skew))
    frame = frame_of(loads_LE, rng.normal(0, 0.08, shape) + rng.normal(0, 0.003, shape))
    blob, number = pack_to_fit(frame)
    assert len(blob) <= FRAME_BYTES and len(blob) + len(pack_summary(frame.summary_KLM)) <= 200_000
    found = Arrays.of(blob, Shape(*shape)).loads()
    most = 2.0 ** -PRECISIONS[number].loads
    assert np.abs(found - loads_LE).max() <= most * loads_LE.max() and np.array_equal(found == 0, loads_LE == 0)


def test_many_steps_as_one() -> None:
    """Least and largest survive, means weigh steps, figures nobody has stay unknown."""
    frames = [random_frame(seed=seed) for seed in range(3)]
    frames[1].summary_KLM[0, 1, 2] = np.nan
    frames[2].loads_LE[0, 0] = frames[2].highest_LE[0, 0] = 999.0
    for frame in frames:
        frame.summary_KLM[0, 0, 0] = np.nan
    ten = combine(frames[:2])
    whole = combine([ten, frames[2]])
    assert (whole.first, whole.last, whole.steps) == (1, 3, 3)
    stacked = np.stack([frame.loads_LE for frame in frames])
    assert np.allclose(whole.loads_LE, stacked.mean(0)) and np.array_equal(whole.highest_LE, stacked.max(0))
    assert whole.highest_LE[0, 0] == 999 and np.array_equal(whole.lowest_LE, stacked.min(0))
    assert whole.dropped_L.tolist() == [9, 9, 9] and np.allclose(
        whole.bias_LE, np.mean([frame.bias_LE for frame in frames], 0), atol=1e-7
    )
    rows = np.stack([frame.summary_KLM[0] for frame in frames])
    assert whole.summary_KLM[0, 2] == pytest.approx(rows[:, 2].mean(0), abs=1e-6)
    assert whole.summary_KLM[1, 2] == pytest.approx(rows[:, 2].min(0))
    assert whole.summary_KLM[2, 1, 2] == np.nanmax(rows[:, 1, 2]) and np.isnan(whole.summary_KLM[:, 0, 0]).all()
    blob = pack_arrays(whole, Precision(11, 16))
    found = Arrays.of(blob, Shape(3, 7)).frame(1, 3, 3, whole.summary_KLM)
    assert np.allclose(found.highest_LE, whole.highest_LE, rtol=2**-11)
    assert np.allclose(found.lowest_LE, whole.lowest_LE, rtol=2**-11)
    assert np.allclose(found.loads_LE, whole.loads_LE, rtol=2**-11)
    assert found.summary("max_vio", 2)[0] != found.summary("max_vio", 2)[1]


def test_summary_comes_back_or_is_refused() -> None:
    rows = np.arange(3 * 2 * 4, dtype=np.float32).reshape(3, 2, 4)
    blob = pack_summary(rows)
    assert np.array_equal(unpack_summary(blob, Shape(2, 5), 4), rows)
    assert unpack_summary(pack_summary(rows[:1]), Shape(2, 5), 4).shape == (1, 2, 4)
    for bad in (b"", blob[:-1], blob[:8] + b"x" + blob[9:]):
        with pytest.raises(RecordError, match="damaged"):
            unpack_summary(bad, Shape(2, 5), 4)
    with pytest.raises(RecordError, match="the summary has 96 bytes, need 36 or 108"):
        unpack_summary(blob, Shape(3, 5), 3)


def test_a_frame_of_other_sizes_is_refused() -> None:
    blob = pack_arrays(random_frame(), Precision(11, 16))
    for shape in (Shape(2, 7), Shape(4, 7)):
        with pytest.raises(RecordError, match=r"header is .* need one of [24] layers"):
            Arrays.of(blob, shape)
    with pytest.raises(RecordError, match="plane has 7"):
        Arrays.of(blob, Shape(3, 2)).loads()
    for size in (0, 3, 4, 9):
        with pytest.raises(RecordError):
            Arrays.of(blob[:size], Shape(3, 7))


def test_a_bomb_does_not_unfold() -> None:
    """A plane that would become a gigabyte is refused after what a plane may be, checksum right or not."""
    frame = random_frame(1, 4)
    good = pack_arrays(frame, Precision(11, 16))
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = squeeze.compress(bytes(1 << 24)) + squeeze.flush()
    body = bytearray(good[4:])
    fixed = int.from_bytes(body[4:8], "little")
    sizes = np.frombuffer(bytes(body[8 + fixed - 16 : 8 + fixed]), dtype="<u4").copy()
    rest = body[8 + fixed + int(sizes[0]) :]
    sizes[0] = len(bomb)
    body = bytes(body[: 8 + fixed - 16]) + sizes.tobytes() + bomb + bytes(rest)
    blob = zlib.crc32(body).to_bytes(4, "little") + body
    with pytest.raises(RecordError, match="plane has 5 bytes or more, need 4"):
        Arrays.of(blob, Shape(1, 4)).loads()


def test_replace_keeps_frames_frozen() -> None:
    frame = random_frame()
    assert replace(frame, first=5).first == 5 and frame.first == 1

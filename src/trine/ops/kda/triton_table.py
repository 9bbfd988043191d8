"""The committed launch parameters of the forward kernels; ``trine tune kda --write`` writes them anew."""

CARD = "NVIDIA H200"

# (operands, K padded): value channels a program of the scan, its warps and stages, warps of the first kernel.
FORWARD: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("16-bit", 32): (64, 4, 3, 2),
    ("16-bit", 64): (64, 4, 3, 2),
    ("16-bit", 128): (64, 4, 3, 2),
    ("16-bit", 256): (32, 4, 2, 4),
    ("fp32", 32): (32, 4, 1, 8),
    ("fp32", 64): (32, 4, 1, 8),
    ("fp32", 128): (32, 4, 1, 8),
    ("fp32", 256): (16, 4, 1, 8),
}

# Value heads up to: tokens a segment. More heads than the last walk every sequence from end to end.
SEGMENTS: tuple[tuple[int, int], ...] = (
    (2, 2048),
    (4, 1024),
    (8, 5056),
    (16, 1184),
    (20, 1376),
    (24, 1664),
    (40, 2048),
)

"""Attention Residuals in a transformer of one's own: every sublayer chooses which earlier outputs it reads.

The only change to an ordinary pre-norm transformer is the line marked (*): where it would read the running sum of all
earlier outputs, it reads a learned softmax mix of them. Queries start at zero, so at first all sources weigh the same.

    python examples/attn_res_in_a_small_transformer.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trine.ops.attn_res import attn_res, attn_res_weights

WIDTH, HEADS, LAYERS, CONTEXT, STEPS = 64, 4, 3, 48, 81


class SelfAttention(nn.Module):
    """Plain causal attention; nothing of it is special to this example."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, h_BTD: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(h_BTD)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Transformer(nn.Module):
    """Bytes in, scores of the next byte out; sublayers read mixes over depth instead of a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.sublayers = nn.ModuleList(make() for _ in range(LAYERS) for make in (SelfAttention, feed_forward))
        self.query = nn.Parameter(torch.zeros(len(self.sublayers) + 1, WIDTH))
        self.gain = nn.Parameter(torch.ones(len(self.sublayers) + 1, WIDTH))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, bytes_BT: Tensor) -> Tensor:
        sources = self.sources(bytes_BT)
        return self.head(attn_res(sources, self.query[-1], self.gain[-1]))

    def sources(self, bytes_BT: Tensor) -> list[Tensor]:
        sources = [self.embed(bytes_BT) + self.place.weight]
        for i, sublayer in enumerate(self.sublayers):
            h_BTD = attn_res(sources, self.query[i], self.gain[i])  # (*) instead of h = sum(sources)
            sources.append(sublayer(h_BTD))
        return sources


def main() -> float:
    """Train on this very file; returns the loss of the last step in bits per byte."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    bits = float("nan")
    for step in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT, (16,))
        rows = torch.stack([text[s : s + CONTEXT + 1] for s in starts])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bits = loss.item() / 0.6931
        if step % 20 == 0:
            print(f"step {step:3d}  {bits:.2f} bits per byte")
    weights = attn_res_weights(model.sources(rows[:, :-1]), model.query[-1], model.gain[-1]).mean((1, 2))
    print("what the head reads:", ", ".join(f"{w:.2f}" for w in weights.tolist()), "(embedding first)")
    return bits


if __name__ == "__main__":
    main()

"""Kimi Delta Attention in a block of one's own, learning to look things up, then decoding token by token.

Each row shows 16 keys with values drawn anew, some keys twice: the later value replaces the earlier one. Then it asks
for a key. No weight can know the answer; it has to be written into the state S [K, V] and read out of it.

    python examples/kda_in_your_block.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trine.ops.kda import kda, kda_step

WIDTH, HEADS, DIM, KEYS, VALUES, PAIRS = 64, 2, 32, 24, 16, 16


class Block(nn.Module):
    """A pre-norm block around the operator: projections are yours, the recurrence is Trine's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.gate = (nn.Linear(WIDTH, HEADS * DIM, bias=False) for _ in range(4))
        self.beta, self.out = nn.Linear(WIDTH, HEADS, bias=False), nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.dt_bias = nn.Parameter(torch.full((HEADS, DIM), -5.0))  # start with a long memory

    def inputs(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        h_BTD = self.norm(x_BTD)
        heads = [f(h_BTD).unflatten(-1, (HEADS, DIM)) for f in (self.q, self.k, self.v, self.gate)]
        return *heads, self.beta(h_BTD)

    def forward(self, x_BTD: Tensor) -> Tensor:
        o_BTHV, _ = kda(*self.inputs(x_BTD), dt_bias=self.dt_bias)
        return x_BTD + self.out(o_BTHV.flatten(2))

    def step(self, x_BD: Tensor, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
        one = [a[:, 0] for a in self.inputs(x_BD[:, None])]
        o_BHV, state_BHKV = kda_step(*one, state_BHKV, dt_bias=self.dt_bias)
        return x_BD + self.out(o_BHV.flatten(1)), state_BHKV


class Lookup(nn.Module):
    """Pairs in, value of the asked key out."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Embedding(KEYS, WIDTH), nn.Embedding(VALUES + 1, WIDTH)
        self.block, self.norm, self.head = Block(), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VALUES)

    def forward(self, keys_BT: Tensor, values_BT: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.key(keys_BT) + self.value(values_BT))[:, -1]))


def rows(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of `count` rows, the asked key last with an empty value, and the answers."""
    keys, values = torch.randint(KEYS, (count, PAIRS)), torch.randint(VALUES, (count, PAIRS))
    asked = keys.gather(1, torch.randint(PAIRS, (count, 1)))
    newest = ((keys == asked) * torch.arange(1, PAIRS + 1)).argmax(1, keepdim=True)
    answers = values.gather(1, newest)[:, 0]
    return torch.cat([keys, asked], 1), torch.cat([values, torch.full((count, 1), VALUES)], 1), answers


def main(steps: int = 120) -> float:
    """Train, then check decoding; returns the share of right answers."""
    torch.manual_seed(0)
    model = Lookup()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    right = 0.0
    for step in range(steps + 1):
        keys, values, answers = rows(64)
        scores = model(keys, values)
        right = (scores.argmax(-1) == answers).float().mean().item()
        if step % 40 == 0:
            print(f"step {step:3d}  {right:4.0%} right (chance {1 / VALUES:.0%})")
        loss = F.cross_entropy(scores, answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with torch.no_grad():  # the same rows again, one token at a time with a state of fixed size
        keys, values, _ = rows(4)
        x_BTD = model.key(keys) + model.value(values)
        state = torch.zeros(4, HEADS, DIM, DIM)
        for t in range(x_BTD.shape[1]):
            y_BD, state = model.block.step(x_BTD[:, t], state)
        error = (y_BD - model.block(x_BTD)[:, -1]).abs().max().item()
    print(f"decoding differs from the parallel form by {error:.0e}; the state holds {state[0].numel()} numbers")
    return right


if __name__ == "__main__":
    main()

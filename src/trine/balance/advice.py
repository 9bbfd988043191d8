"""What may help against an imbalance, by how long it lasts and by the policy that it came about under."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trine.balance.saved_loads import Loads
from trine.config import BalanceConfig

FEWEST = 20
"""Steps from which on it can be said whether an imbalance lasts; as many as a router may take to settle."""
_MEANING = {
    "lasting": "the same experts are full or empty throughout",
    "drifting": "which experts are full changes slowly",
    "changing": "other experts are full at each step",
}
_SATURATED = 0.01  # as the rule of alerts
_FEW_TOKENS = 4.0  # tokens an expert below which `QuantileBalancing` makes only part of each change
_UNFORESEEN = "no bias can foresee it; take more tokens a step"
_IN_TIME = "or let thresholds of the batch itself act (balance.policy stateless; docs/balance.md has what they cost)"


def advise(lasts: str, loads: Loads, layers: Sequence[int]) -> str:
    """What an imbalance means, and what may help.

    Args:
        lasts: how long it lasts, see `LayerAnalysis.lasts`; not ``""``.
        loads: what was analyzed, with the policy they came about under where that is known.
        layers: those that are uneven in this way.
    """
    if lasts == "unknown":
        return f"too few steps to say whether it lasts: {FEWEST} are needed"
    if lasts == "falling":
        return (
            "it is going away by itself, to less than half over these steps, so whether any of it lasts is not known "
            "yet: look at later steps (--last)"
        )
    remedy = _remedy(lasts, loads, layers)
    return f"{_MEANING[lasts]}{', ' if remedy.startswith('although') else ': '}{remedy}"


def _remedy(lasts: str, loads: Loads, layers: Sequence[int]) -> str:
    c = loads.balance
    if c is None or c.policy in ("none", "freeze"):
        why = {"none": "the run balances nothing; ", "freeze": "the bias is frozen; "}.get(c.policy, "") if c else ""
        remedies = {
            "lasting": "a bias policy can remove it (balance.policy qb)",
            "drifting": "a bias solved at every step follows it (balance.policy qb)",
            "changing": _UNFORESEEN,
        }
        return why + remedies[lasts]
    if c.policy == "replay":
        return "they came with the batches (balance.policy replay), so nothing in this run moves them"
    if c.policy == "stateless" and c.threshold_source == "batch":
        return _stateless(c)
    if lasts == "changing":
        swings = f"steps of balance.sign_step {c.sign_step:g} may overshoot (alert oscillation); otherwise "
        return f"{swings if c.policy == 'sign' else ''}{_UNFORESEEN}, {_IN_TIME}"
    if c.policy in ("qb", "stateless"):
        return _solved(lasts, c, loads, layers)
    slow = {
        "sign": f"steps of balance.sign_step {c.sign_step:g} are too short for it",
        "aux": f"the loss's weight, balance.aux_weight {c.aux_weight:g}, is too small for it",
        "load_quantile": f"balance.load_rate {c.load_rate:g} every {c.load_window} steps is too slow for it",
    }[c.policy]
    return f"{slow}, so raise it, or take balance.policy qb, which has no such dial"


def _stateless(c: BalanceConfig) -> str:
    if c.mode == "dual":
        return f"in-batch thresholds stop short of it: raise balance.rounds (now {c.rounds})"
    left = "tokens beyond it are dropped" if c.mode == "drop" else "tokens beyond it go elsewhere"
    lower = "lower it towards 1, or " if c.capacity > 1 else ""
    return f"balance.capacity {c.capacity:g} cuts off what is full ({left}), no more: {lower}take balance.mode dual"


def _solved(lasts: str, c: BalanceConfig, loads: Loads, layers: Sequence[int]) -> str:
    """Where the bias is solved at every step already: why that may not be enough."""
    late = []
    if c.ema:
        late.append(f"balance.ema {c.ema:g} keeps that much of each old bias: 0 keeps nothing")
    if c.service != "off":
        lag = f"{c.service_lag} step{'s' * (c.service_lag != 1)} old" if c.service_lag >= 0 else "as old as it is slow"
        late.append(f"the service's bias is {lag} (balance.service_lag): off solves it between steps")
    if loads.told and any(alert.begins for alert in loads.told):
        late.append("the service fell silent (alert stale)")
    if lasts == "drifting":
        found = [*late, "a lower learning rate moves routers less"]
        return f"a bias solved at every step follows it one step late; {'; '.join(found)}, {_IN_TIME}"
    found = list(late)
    scores = sum(one.tokens_L for one in loads.windows_S) * loads.loads_SLE.shape[-1]
    saturated = sum(one.saturated_L for one in loads.windows_S) / np.maximum(scores, 1)
    worst = float(saturated[list(layers)].max()) if loads.windows_S else 0.0
    if c.score_domain == "sigmoid" and worst > _SATURATED:
        found.append(
            f"{worst:.0%} of the scores are saturated, and no bias parts scores that are equal (balance.score_domain "
            "logit)"
        )
    if c.policy == "qb" and c.score_domain == "sigmoid" and c.estimator == "report":
        found.append("equal bins may be too coarse for skewed scores (balance.estimator signed_log)")
    solved = "although the bias is solved at every step"
    mean = float(loads.loads_SLE.mean(-1)[:, list(layers)].mean())
    if mean < _FEW_TOKENS:
        found.append(f"an expert gets {mean:.1f} tokens a step, too few to solve by (take more tokens a step)")
    if not found:
        return f"{solved}, and none of the usual reasons is here (saturated scores, coarse bins, late bias, few tokens)"
    return f"{solved}. Possible reasons: {'; '.join(found)}"

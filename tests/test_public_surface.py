"""The public names and their parameters are a promise; a change of either shows up here, on purpose.

After a change that is meant, and noted in CHANGELOG.md:

    python tests/test_public_surface.py

writes tests/public_names.txt anew.
"""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from pathlib import Path

SNAPSHOT = Path(__file__).with_name("public_names.txt")


def describe(module_name: str, name: str, value: object) -> str:
    """One line: the name, and the parameters of what can be called."""
    where = f"{module_name}.{name}"
    if inspect.isfunction(value):
        parameters = [p.replace(annotation=p.empty) for p in inspect.signature(value).parameters.values()]
        return f"{where}{inspect.Signature(parameters)}"
    if inspect.isclass(value):
        methods = [n for n, v in vars(value).items() if not n.startswith("_") and callable(getattr(value, n, v))]
        return f"class {where}: {', '.join(sorted(methods)) or '-'}"
    return where


def public_names() -> list[str]:
    """Every public name of `trine` and `trine.ops.*`, sorted, one line each."""
    operators = import_module("trine.ops")
    modules = ["trine", "trine.ops"]
    modules += [f"trine.ops.{m.name}" for m in pkgutil.iter_modules(operators.__path__) if not m.name.startswith("_")]
    lines = []
    for module_name in modules:
        module = import_module(module_name)
        lines += [describe(module_name, name, getattr(module, name)) for name in module.__all__]
    return sorted(lines)


def test_public_names_are_those_of_the_snapshot() -> None:
    found, promised = public_names(), SNAPSHOT.read_text().splitlines()
    gone, new = sorted(set(promised) - set(found)), sorted(set(found) - set(promised))
    assert (gone, new) == ([], [])


def test_names_that_acceptance_relies_on_are_among_them() -> None:
    text = "\n".join(public_names())
    for name in (
        "trine.ops.kda.kda(q, k, v, gate, beta, *, A_log=None, dt_bias=None, gate_kind='bounded', lower_bound=-5.0, "
        "qk_norm=True, beta_is_logit=True, beta_max=1.0, scale=None, initial_state=None, output_final_state=False, "
        "cu_seqlens=None, plan='auto', backend='auto'",
        "trine.ops.kda.kda_step(",
        "trine.ops.kda.segment_state(",
        "trine.ops.kda.bounded_gate(",
        "trine.ops.situ.situ_glu(gate, up, beta=4.0, linear_beta=25.0",
        "trine.ops.attn_res.attn_res(",
        "trine.ops.router.route(",
        "trine.ops.router.solve_bias(",
        "class trine.Model:",
        "class trine.ModelConfig:",
        "class trine.HybridCache:",
    ):
        assert name in text


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(public_names()) + "\n")

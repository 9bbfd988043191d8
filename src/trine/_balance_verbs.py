"""`trine balance VERB`: what saved loads say, forced imbalance, policies compared, and the balancing service."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional

from trine._options import dispatch, parse
from trine.train.compare_config import CompareConfig

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HELP = """\
usage: trine balance VERB [options]

  analyze LOADS      is there imbalance, does it last, of experts or of ranks, which alert would have begun
  stress             force a chosen imbalance: what it costs the experts, or how fast each policy removes it
  compare            eight policies on the same rows: which balances, what it costs, and whether text suffers
  serve              the balancing service, for runs that name its address as balance.service

trine balance VERB --help tells the options of one.
"""

# Policies that move a bias, so that a router which does not learn can show what they do.
Policy = Literal["qb", "sign", "load_quantile", "freeze"]


@dataclass(frozen=True)
class Analyze:
    """Is there imbalance in saved loads, does it last, is it of experts or of ranks, which alert would have begun.

    LOADS is a run (a folder, or a name inside runs/) or its recorder's file; .npy or .npz with [steps, layers, experts]
    or [steps, experts] token counts; or .csv with a row a step and a column an expert, or with the columns step, layer,
    expert, load, where what has no row counts as 0 (how many is told) and other columns are ignored.
    """

    loads: Annotated[Positional[str], tyro.conf.arg(metavar="LOADS")]
    ranks: int = 1  # expert-parallel ranks, each with a row of neighbouring experts
    last: int = 1000  # newest steps to read
    json: bool = False  # print JSON instead of a table


@dataclass(frozen=True)
class Stress:
    """Force a chosen imbalance, and see what it costs or how fast it goes.

    --what policies drives each policy through it, on a router that does not learn, and counts the steps until MaxVio is
    within twice what chance gives. --what experts times the routed experts at loads of exactly that MaxVio.
    """

    what: Literal["policies", "experts"] = "policies"
    max_vio: tuple[float, ...] = ()  # largest load over mean load, minus 1; else those of 0.2, 1, 4 that can be
    tokens: int = 8192  # tokens a step
    experts: int = 64  # experts of the layer
    k: int = 4  # experts a token
    policies: tuple[Policy, ...] = ("qb", "sign", "load_quantile", "freeze")  # which (policies)
    steps: int = 40  # updates (policies)
    latent: int = 64  # width of what experts read (experts)
    hidden: int = 64  # width inside an expert (experts)
    backward: bool = False  # time the backward pass as well (experts)
    repeats: int = 5  # timings of each load, of which the median counts (experts)
    seed: int = 0  # of tokens and names
    json: bool = False  # print JSON instead of a table


@dataclass(frozen=True)
class Serve:
    """Solve biases for runs on this machine, until interrupted.

    The key, at least 16 bytes that both sides must know, comes from --key or from TRINE_BALANCE_KEY. The address is
    printed once connections are taken.
    """

    address: str = "127.0.0.1:0"  # 127.0.0.1:PORT (0 takes any), or unix:PATH
    key: str = ""  # file with the key, readable by its owner only
    threads: int = 1  # CPU threads for solving


def main(args: list[str]) -> int:
    """Run one `trine balance` command line."""
    return dispatch("balance", VERBS, HELP, args)


def _analyze(args: list[str]) -> int:
    options = parse("balance analyze", Analyze, args)
    from rich.console import Console

    from trine.balance.analyze import analyze
    from trine.balance.saved_loads import read_loads
    from trine.views.balance import analysis_table

    named = Path("runs") / options.loads
    loads = named if named.is_dir() and not Path(options.loads).exists() else options.loads
    found = analyze(read_loads(loads, options.last), options.ranks)
    if options.json:
        print(json.dumps(found.to_json()))
        return 0
    console = Console()
    _show(console, analysis_table(found))
    for sentence in found.verdict:
        console.print(sentence, markup=False, highlight=False, soft_wrap=not console.is_terminal)
    return 0


def _stress(args: list[str]) -> int:
    options = parse("balance stress", Stress, args)
    for name, values in (("max-vio", options.max_vio), ("policies", options.policies)):
        if f"--{name}" in args and not values:
            raise ValueError(f"{name}: found no value, need at least one")
    from rich.console import Console

    from trine.balance import stress
    from trine.views.balance import recovery_table, timing_table

    sizes = (options.tokens, options.experts, options.k)
    max_vio = options.max_vio or stress.possible(*sizes)
    title = f"{options.tokens} tokens, {options.experts} experts, {options.k} a token"
    if options.what == "experts":
        timings = stress.time_experts(
            *sizes,
            latent=options.latent,
            hidden=options.hidden,
            max_violations=max_vio,
            repeats=options.repeats,
            backward=options.backward,
            seed=options.seed,
        )
        found, table = [one.to_json() for one in timings], timing_table(timings, title)
    else:
        recoveries = stress.recoveries(options.policies, max_vio, *sizes, steps=options.steps, seed=options.seed)
        found, table = [one.to_json() for one in recoveries], recovery_table(recoveries, title)
    if options.json:
        print(json.dumps(found))
    else:
        _show(Console(), table)
    return 0


def _show(console: Console, table: Table) -> None:
    """A terminal has a width; whoever reads a pipe wants every column whole."""
    if console.is_terminal:
        console.print(table)
    else:
        type(console)(file=console.file, width=10_000).print(table)


def _serve(args: list[str]) -> int:
    options = parse("balance serve", Serve, args)
    from trine.balance.service_protocol import parse_address, read_key

    if options.threads < 1:
        raise ValueError(f"threads: found {options.threads}, need at least 1")
    address, key = parse_address(options.address), read_key(options.key)
    import torch

    from trine.balance.service_server import serve

    torch.set_num_threads(options.threads)
    serve(address, key, on_ready=lambda where: print(f"balance service at {where}", flush=True))
    return 0


def _compare(args: list[str]) -> int:
    options = parse("balance compare", CompareConfig, args)
    from trine.train.machine import prepare_machine

    prepare_machine(options.threads)
    from rich.console import Console

    from trine.train.compare_balance import run_compare
    from trine.views.balance_compare import compare_table, write_compare

    console = Console()
    found = run_compare(options, console)
    console.print(compare_table(found))
    console.print(f"page: {write_compare(found, Path(options.folder))}", markup=False, highlight=False)
    return 0


VERBS: dict[str, Callable[[list[str]], int]] = {
    "analyze": _analyze,
    "stress": _stress,
    "compare": _compare,
    "serve": _serve,
}

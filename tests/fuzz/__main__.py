# SPDX-License-Identifier: Apache-2.0
"""Runs random cases against ONNX Runtime's CPU provider: `python -m tests.fuzz graphs --cases 1000 --seed 1`.

The same command runs the same cases. Findings are shrunk and saved; `replay` runs one again. The exit code is 1 if
there are any.
"""

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before onnxruntime is imported

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.fuzz.campaign import Campaign
from tests.fuzz.findings import judge_saved, load_case, save_finding
from tests.fuzz.graphs.strategy import INSTRUCTION_SETS
from tests.fuzz.oracle import Finding, Oracle
from tests.fuzz.worker import ROOT, Worker

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console()

Cases = Annotated[int, typer.Option("--cases", help="How many cases.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the cases; the same seed makes the same ones.")]
Sanitize = Annotated[bool, typer.Option("--sanitize", help="Under AddressSanitizer and UBSan, with build/sanitize.")]
Library = Annotated[Path | None, typer.Option("--library", help="The build to test; none: build/testing or sanitize.")]
Isa = Annotated[list[str] | None, typer.Option("--isa", help="Instruction sets to take turns with.")]
Minutes = Annotated[float | None, typer.Option("--minutes", help="Stop after so many minutes.")]
Output = Annotated[Path, typer.Option("--output", help="Folder for what is found.")]
Seconds = Annotated[float, typer.Option("--seconds", help="Until a case is taken for hung.")]

FOUND = ROOT / "out/fuzz"
REFERENCE_BYTES = 8 << 30


def _library(given: Path | None, sanitize: bool) -> Path:
    return given or ROOT / f"build/{'sanitize' if sanitize else 'testing'}/libflownpu_ep.so"


@contextmanager
def _workers(library: Path | None, sanitize: bool, seconds: float) -> Iterator[tuple[Worker, Worker]]:
    with (
        Worker(seconds=seconds) as reference,
        Worker(_library(library, sanitize), sanitize=sanitize, seconds=seconds) as ours,
    ):
        yield reference, ours


@app.command()
def graphs(
    cases: Cases = 1000, seed: Seed = 1, sanitize: Sanitize = False, library: Library = None, isa: Isa = None,
    minutes: Minutes = None, output: Output = FOUND, seconds: Seconds = 20.0,
) -> None:  # fmt: skip
    """Random graphs over every operator that the CPU device takes."""
    from tests.fuzz.graphs.strategy import cases as strategy

    with _workers(library, sanitize, seconds) as (reference, ours):
        oracle = Oracle(reference, ours)
        _run("graphs", strategy(tuple(isa or INSTRUCTION_SETS)), oracle.judge, cases, seed, minutes, output)


@app.command()
def decoders(
    cases: Cases = 200, seed: Seed = 1, sanitize: Sanitize = False, library: Library = None, isa: Isa = None,
    minutes: Minutes = None, output: Output = FOUND, seconds: Seconds = 300.0,
) -> None:  # fmt: skip
    """Random small decoders: prompts, chunks, tokens, rewinds, batches."""
    from tests.fuzz.decoders import oracle

    with _workers(library, sanitize, seconds) as (reference, ours):
        strategy = oracle.cases(tuple(isa or INSTRUCTION_SETS))
        judge = oracle.DecoderOracle(reference, ours).judge
        _run("decoders", strategy, judge, cases, seed, minutes, output)


@app.command()
def damage(
    cases: Cases = 1000, seed: Seed = 1, sanitize: Sanitize = False, library: Library = None,
    minutes: Minutes = None, output: Output = FOUND, seconds: Seconds = 20.0,
) -> None:  # fmt: skip
    """Damaged files of every kind that is read."""
    from tests.fuzz.damage.damager import Damager, corpus, save_finding

    with Worker(_library(library, sanitize), sanitize=sanitize, seconds=seconds) as worker, Damager(worker) as damager:
        _run("damage", damager.cases(), damager.judge, cases, seed, minutes, output, (corpus(), save_finding))


@app.command()
def server(
    time_: Annotated[float, typer.Option("--seconds", help="How long.")] = 60.0,
    clients: Annotated[int, typer.Option("--clients", help="Of which one in four asks what is right.")] = 32,
    seed: Seed = 1, output: Output = FOUND,
    kinds: Annotated[list[str] | None, typer.Option("--kind", help="Kinds of requests; all, if none is named.")] = None,
    without: Annotated[list[str] | None, typer.Option("--without", help="Kinds of requests to leave out.")] = None,
) -> None:  # fmt: skip
    """Hostile requests to `flownpu serve`, beside clients that must get their answers, right and in time."""
    from tests.fuzz.server import command, report
    from tests.fuzz.server.kinds import KINDS

    chosen = [name for name in kinds or KINDS if name not in (without or ())]
    if unknown := set(chosen) - set(KINDS):
        raise typer.BadParameter(f"expected some of {', '.join(KINDS)}, got {', '.join(unknown)}")
    found = command.attack(command.command_of(output / "models"), time_, clients, seed, chosen)
    report.write(found, output / "server")
    console.print(report.text_of(found), markup=False, highlight=False, soft_wrap=True)
    if found.findings:
        raise typer.Exit(1)


@app.command()
def replay(
    path: Annotated[Path, typer.Argument(help="A .npz file that was saved here.")],
    sanitize: Sanitize = False, library: Library = None, seconds: Seconds = 60.0,
) -> None:  # fmt: skip
    """Run a case that was saved."""
    case = load_case(path)
    with _workers(library, sanitize, seconds) as (reference, ours):
        verdict = judge_saved(case, reference, ours)
    console.print(verdict.category, style="bold")
    if verdict.finding is not None:
        console.print(f"{verdict.finding.signature}\n{verdict.finding.text}", markup=False, highlight=False)
        raise typer.Exit(1)


def _limit_memory() -> None:
    """Limits the memory of this process, which computes the reference: a case may hold gigabytes between its nodes."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (REFERENCE_BYTES, hard))


def _run(
    name: str, strategy: Any, judge: Any, cases: int, seed: int, minutes: float | None, output: Path,
    files: tuple[list[Any], Callable[[Any, Finding, Path], Path]] | None = None,
) -> None:  # fmt: skip
    """Judges random cases; `files`: saved cases that are judged first, and what saves a finding that is no model."""
    _limit_memory()
    begin = time.monotonic()
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, redirect_stdout=False) as progress:
        task = progress.add_task(name, total=cases, rate="")

        def advance(done: int) -> None:
            rate = f"{done / (time.monotonic() - begin):.1f}/s, {len(campaign.findings)} findings"
            if done % 20 == 0:
                progress.update(task, completed=done, rate=rate)
            if done % 1000 == 0 and not console.is_terminal:  # a log has no bar
                progress.console.print(f"{done} cases, {rate}")

        def report(case: Any, finding: Finding) -> None:
            path = (
                save_finding(case, finding, output / name) if files is None else files[1](case, finding, output / name)
            )
            how = f"python -m tests.fuzz replay {path}" if files is None else f"{case!r}\n  {path}"
            progress.console.print(f"[red]{finding.signature}[/red]\n  {how}", soft_wrap=True)

        campaign = Campaign(strategy, judge, report, advance)
        for case in files[0] if files else ():
            if finding := judge(case).finding:
                campaign.findings[finding.signature] += 1
                report(case, finding)
        campaign.run(cases, seed, minutes)
    seconds = time.monotonic() - begin
    told = ", ".join(f"{category} {count}" for category, count in campaign.counts.most_common())
    console.print(f"{name}, seed {seed}: {campaign.cases} cases in {seconds:.0f} s ({told})", soft_wrap=True)
    for signature, count in campaign.findings.most_common():
        console.print(f"  {count} x {signature}", markup=False, highlight=False, soft_wrap=True)
    if campaign.findings:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()

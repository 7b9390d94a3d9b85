# SPDX-License-Identifier: Apache-2.0
"""The results of `flownpu bench` as a table, as Markdown and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from flownpu.bench.measurement import Case, Measurement, Measurements, Spread
from flownpu.bench.roofline import DecodeTraffic
from flownpu.machine import Machine


@dataclass(frozen=True)
class BenchReport:
    """Measurements, and what they depend on.

    Attributes:
        machine: where it was measured.
        model: the model's folder, as it was given.
        settings: the options of the command.
        traffic: what a decode step must read; None if that is not known.
        found: what was measured; ratios compare the first engine with each of the others.
    """

    machine: Machine
    model: str
    settings: dict[str, Any]
    traffic: DecodeTraffic | None
    found: Measurements

    def header(self) -> list[str]:
        """Machine, versions, model and roof: a line each."""
        machine, measured = self.machine, self.found.engines
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        lines = [
            f"{machine.cpu}, {machine.isa}, {machine.cores} cores, {machine.memory / 2**30:.1f} GiB, {machine.system}",
            f"Python {machine.python}, {versions}",
        ]
        peers = [f"{name}: {peer.version}" for name, peer in list(measured.items())[1:] if peer.version]
        lines += [", ".join(peers)] if peers else []
        placement = next(iter(measured.values())).placement
        lines += [f"{self.model}: {placement}"] if placement else [self.model]
        if self.found.bandwidth:
            rate = Spread.of(self.found.bandwidth)
            threads, busy = self.settings["threads"], self.settings.get("busy", 0)
            beside = f" beside {busy} busy processes" if busy else ""
            lines.append(
                f"Memory read roof, {max(1, threads - busy)} threads{beside}: {rate.median / 1e9:.1f} GB/s "
                f"({rate.minimum / 1e9:.1f} to {rate.maximum / 1e9:.1f})"
            )
        return lines

    def footer(self) -> list[str]:
        """The failures, a line each; whether energy was not measured; whether the run was interrupted."""
        lines = [f"{name} failed and was left out: {reason}" for name, reason in self.found.failures.items()]
        if not any(m.decode_joules for m in self._measurements):
            lines.append("Energy was not measured: there are no counters in /sys/class/powercap that may be read.")
        return lines + (["Interrupted: what had been measured until then."] if self.found.interrupted else [])

    def columns(self) -> list[str]:
        """The table's headings."""
        own, *peers = self.found.engines
        ratios = [heading for peer in peers for heading in (peer, f"{own} / {peer}")]
        return ["tokens/s", own, *(["of roof"] if self.traffic else []), *ratios]

    def rows(self) -> Iterator[list[str]]:
        """The table: a rate is the median of the runs, with the least and the most."""
        for case in self.found.cases:
            yield self._row(_prefill_text(case), [m.prefill_rate(case) for m in self._measurements], "")
        for case in self.found.cases:
            rates = [m.decode_rate(case) for m in self._measurements]
            yield self._row(f"decode at {case.context}", rates, self._share_of_roof(case))

    def resources(self) -> Iterator[list[str]]:
        """Rows of the same columns with time to load and memory, without ratios."""
        quantities = {}
        for case in self.found.cases:
            if "+" in self.settings.get("device", ""):
                quantities[f"switch after {case.context}, ms"] = self._each(case, "switch", 1e-3)
            if any(m.decode_joules for m in self._measurements):
                quantities[f"J, {_prefill_text(case)}"] = self._each(case, "prefill_joules", 1)
                quantities[f"J a token at {case.context}"] = self._each(case, "decode_joules", case.generate - 1)
        quantities |= {
            "load, s": [_middle(m.load, 1.0, ".2f") for m in self._measurements],
            "memory, MiB": [_middle(m.memory_resident, 2.0**20, ".0f") for m in self._measurements],
            "not of a file": [_middle(m.memory_anonymous, 2.0**20, ".0f") for m in self._measurements],
            "at most": [_middle(m.memory_peak, 2.0**20, ".0f") for m in self._measurements],
        }
        for name, (own, *peers) in quantities.items():
            yield [name, own, *([""] if self.traffic else []), *(cell for peer in peers for cell in (peer, ""))]

    def markdown(self) -> str:
        """The table and its header, to paste into a page."""
        table = [self.columns(), ["---", *["---:"] * (len(self.columns()) - 1)], *self.rows(), *self.resources()]
        lines = [f"{line}  " for line in self.header()]  # two blanks break a line
        rows = ["| " + " | ".join(cells) + " |" for cells in table]
        return "\n".join([*lines, "", *rows, *([""] if self.footer() else []), *self.footer()]) + "\n"

    def json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "machine": asdict(self.machine),
            "model": self.model,
            "settings": self.settings,
            "read_bandwidth": _spread(self.found.bandwidth),
            "engines": {name: self._engine(measured) for name, measured in self.found.engines.items()},
            "failures": self.found.failures,
            "interrupted": self.found.interrupted,
        }

    def roof(self, case: Case) -> float | None:
        """The memory roof: tokens per second of a step that only reads the bytes it must, halfway in the case."""
        roofs = self._roofs(case)
        return median(roofs) if roofs else None

    def _roofs(self, case: Case) -> list[float]:
        """The memory roof in each round."""
        if self.traffic is None:
            return []
        step = self.traffic.bytes_at(case.context + case.generate // 2)
        return [bandwidth / step for bandwidth in self.found.bandwidth]

    def _each(self, case: Case, quantity: str, unit: float) -> list[str]:
        return [_middle(getattr(m, quantity).get(case, []), unit, ".3g") for m in self._measurements]

    @property
    def _measurements(self) -> list[Measurement]:
        return list(self.found.engines.values())

    def _row(self, name: str, rates: list[Spread | None], roof: str) -> list[str]:
        own, *peers = rates
        cells = [cell for peer in peers for cell in (_rate(peer), _ratio(own, peer))]
        return [name, _rate(own), *([roof] if self.traffic else []), *cells]

    def _share_of_roof(self, case: Case) -> str:
        """The median share of the memory roof; each round has its own roof."""
        times = self._measurements[0].decode.get(case, [])
        # The roof of a round that was interrupted is missing.
        shares = [(case.generate - 1) / time / roof for time, roof in zip(times, self._roofs(case), strict=False)]
        return f"{100 * median(shares):.0f} %" if shares else ""

    def _engine(self, measured: Measurement) -> dict[str, Any]:
        memory = {
            "before": measured.memory_before,
            "resident": measured.memory_resident,
            "anonymous": measured.memory_anonymous,
            "peak": measured.memory_peak,
        }
        return {
            "version": measured.version,
            "placement": measured.placement,
            "load_seconds": _spread(measured.load),
            "memory": {name: max(values, default=0) for name, values in memory.items()},
            "cases": [self._case(measured, case) for case in self.found.cases if case in measured.prefill],
        }

    def _case(self, measured: Measurement, case: Case) -> dict[str, Any]:
        own = self._measurements[0]
        rates = {"prefill": Measurement.prefill_rate, "decode": Measurement.decode_rate}
        document: dict[str, Any] = {**asdict(case), "runs": len(measured.prefill[case])}
        for name, rate_of in rates.items():
            rate, ours = rate_of(measured, case), rate_of(own, case)
            document[f"{name}_rate"] = asdict(rate) if rate else None
            # The speed of the first engine as a multiple of this engine's.
            document[f"{name}_ratio"] = ours.median / rate.median if ours and rate else None
        pair = "+" in self.settings.get("device", "")
        return {
            **document,
            "first_token_seconds": _spread(measured.first_token[case]),
            "decode_roof": self.roof(case),
            "switch_seconds": _spread(measured.switch.get(case, [])) if pair else None,
            "prefill_joules": _spread(measured.prefill_joules.get(case, [])),
            "decode_joules": _spread(measured.decode_joules.get(case, [])),
        }


def _prefill_text(case: Case) -> str:
    return f"prefill {case.prompt}" + (f" after {case.depth}" if case.depth else "")


def _rate(spread: Spread | None) -> str:
    return f"{spread.median:.1f} ({spread.minimum:.1f}–{spread.maximum:.1f})" if spread else ""


def _ratio(own: Spread | None, peer: Spread | None) -> str:
    return f"{own.median / peer.median:.2f}" if own and peer else ""


def _spread(values: list[float]) -> dict[str, float] | None:
    return asdict(Spread.of(values)) if values else None


def _middle(values: list[float] | list[int], unit: float, form: str) -> str:
    return format(median(values) / unit, form) if values else ""

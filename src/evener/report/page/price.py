"""What a run costs where the fleet file gives prices or watts, device by device."""

from evener.core.fleet import Device
from evener.report.page.cells import columns, number, word
from evener.report.page.document import Cell, Table
from evener.report.page.files import RunFiles
from evener.report.results import RunReport
from evener.report.tables import duration, sourced

UNKNOWN = "no price_per_hour and no watts of any device of the plan are in the run's fleet.json"


def cost(run: RunFiles, report: RunReport | None) -> tuple[Table | None, str]:
    """(table of prices, sentence): money per million samples from price per hour and measured samples/s.

        money per 10^6 samples = Σ price_per_hour / 3600 / (samples/s) · 10^6
        kWh per 10^6 samples   = Σ watts / 3.6e6 / (samples/s) · 10^6

    Money is that of the fleet file. Example: 2 devices of 0.36 an hour at 100 samples/s: 2.0 per million.
    """
    here = {d.name: d for d in run.fleet.devices} if run.fleet else {}
    devices = [here[name] for name in run.plan.devices if name in here]
    priced = [d for d in devices if d.price_per_hour]
    powered = [d for d in devices if d.watts]
    rate = report.samples_per_s if report else _rate(run)
    if not (priced or powered) or not rate:
        return None, UNKNOWN if not (priced or powered) else "no step has been taken yet"
    samples = run.plan.samples_by_device()
    rows = [_row(d, rate, samples[d.name] / run.plan.global_batch) for d in devices]
    whole = len(priced) == len(run.plan.devices), len(powered) == len(run.plan.devices)
    money = sum(d.price_per_hour.value for d in priced if d.price_per_hour) if whole[0] else None
    watts = sum(d.watts.value for d in powered if d.watts) if whole[1] else None
    rows.append((word("the job"), *_prices(money, watts, rate), number(1.0, ".1%"), word("")))
    missing = [name for name in run.plan.devices if name not in {d.name for d in priced}]
    spent_s = sum(r.step_s for r in run.records)
    said = f"at {rate:.4g} samples/s, measured"
    if money is not None:
        said += f"; the {duration(spent_s)} of its steps cost {money * spent_s / 3600:.4g}"
    if missing:
        said += f"; no sum: no price is known of {', '.join(missing)}"
    header = columns(
        "device",
        ("price", "money of the fleet file, an hour"),
        ("power", "W"),
        ("cost", "money per million samples"),
        ("energy", "kWh per million samples"),
        ("work", "part of the samples"),
        "source",
    )
    return Table(caption="Cost by device and of the job", columns=header, rows=tuple(rows), total=True), said


def _row(device: Device, rate: float, share: float) -> tuple[Cell, ...]:
    figures = [f for f in (device.price_per_hour, device.watts) if f]
    money = device.price_per_hour.value if device.price_per_hour else None
    watts = device.watts.value if device.watts else None
    sources = ", ".join(dict.fromkeys(sourced(f) for f in figures)) or "–"
    return (word(device.name), *_prices(money, watts, rate), number(share, ".1%"), word(sources))


def _prices(money: float | None, watts: float | None, rate: float) -> tuple[Cell, ...]:
    return (
        number(money),
        number(watts),
        number(None if money is None else money / 3600 / rate * 1e6),
        number(None if watts is None else watts / 3.6e6 / rate * 1e6),
    )


def _rate(run: RunFiles) -> float:
    seconds = sum(r.step_s for r in run.records)
    return sum(r.samples for r in run.records if not r.skipped) / seconds if seconds else 0.0

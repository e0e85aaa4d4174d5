"""A run for Prometheus: https://prometheus.io/docs/instrumenting/exposition_formats/."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from evener.core.records import StepRecord
from evener.core.trace import CAUSES
from evener.report.page.build import tried
from evener.report.page.files import RunFiles
from evener.report.page.losses import report_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(run: RunFiles, seen: int) -> bytes:
    """The metrics of `run`, of which `seen` steps were recorded in all, as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(_Run(run, seen))
    return generate_latest(registry)


class _Run(Collector):
    """The newest step and the plan; samples and steps count up over what was recorded."""

    def __init__(self, run: RunFiles, seen: int) -> None:
        self._run, self._seen = run, seen

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        run = self._run
        yield InfoMetricFamily(
            "evener_run", "The run that is watched", {"name": run.name, "schedule": run.plan.schedule}
        )
        yield CounterMetricFamily("evener_steps", "Steps recorded", self._seen)
        yield GaugeMetricFamily("evener_global_batch_samples", "Samples of a step", run.plan.global_batch)
        yield GaugeMetricFamily("evener_finished", "1 when the run has written its report", bool(run.ending))
        if run.info:
            yield GaugeMetricFamily("evener_planned_steps", "Steps the run will take", run.info.total_steps)
        if told := run.plan.prediction:
            yield GaugeMetricFamily("evener_predicted_step_seconds", "Predicted step", told.step_s)
        yield from self._newest()

    def _newest(self) -> Iterator[Metric]:
        if not self._run.records:
            return
        last = self._run.records[-1]
        skipped = sum(1 for r in self._run.records if r.skipped)
        yield GaugeMetricFamily("evener_step", "Number of the newest step", last.step)
        yield GaugeMetricFamily("evener_skipped_steps", "Steps skipped among the newest", skipped)
        yield GaugeMetricFamily("evener_step_seconds", "Measured seconds of the newest step", last.step_s)
        rate = 0.0 if last.skipped else last.samples / last.step_s
        yield GaugeMetricFamily("evener_samples_per_second", "Samples/s of the newest step", rate)
        if last.loss is not None:
            yield GaugeMetricFamily("evener_loss", "Mean training loss of the newest step", last.loss)
        if last.lr is not None:
            yield GaugeMetricFamily("evener_learning_rate", "Learning rate of the newest step", last.lr)
        seconds = GaugeMetricFamily(
            "evener_device_seconds", "Seconds of the newest step by cause", labels=("device", "cause")
        )
        for device, by_cause in last.seconds.items():
            for cause in CAUSES:
                seconds.add_metric((device, cause), by_cause.get(cause, 0.0))
        yield seconds
        yield from _lookups(last)
        report = tried("the accounting", lambda: report_of(self._run), [])  # why not stands on the page
        if report:
            help_ = "Samples/s over the sum of what each offered device does alone"
            yield GaugeMetricFamily("evener_efficiency_ratio", help_, report.efficiency)


def _lookups(last: StepRecord) -> Iterator[Metric]:
    labels = ("table", "device")
    ids = GaugeMetricFamily("evener_table_ids", "Ids looked up in the newest step", labels=labels)
    rows = GaugeMetricFamily(
        "evener_table_rows", "Rows looked up, each once for a micro-batch, in the newest step", labels=labels
    )
    hits = GaugeMetricFamily(
        "evener_table_hit_ratio",
        "Part of the newest step's rows that this memory of a tiered table had",
        labels=(*labels, "memory"),
    )
    for name, told in last.tables.items():
        ids.add_metric((name, told.device), told.ids)
        rows.add_metric((name, told.device), told.rows)
        for memory, part in told.hit_rates.items():
            hits.add_metric((name, told.device, memory), part)
    if last.tables:
        yield from (ids, rows, hits)

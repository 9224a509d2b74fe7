"""Values on a page of Prometheus metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def metric_values(page: str) -> dict[str, float]:
    """Values by ``name{label="value",…}``, labels sorted. Fails for a sample that is there twice."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            place = f"{sample.name}{{{labels}}}"
            assert place not in found
            found[place] = sample.value
    return found

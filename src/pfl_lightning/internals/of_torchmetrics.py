"""Private names of torchmetrics."""

from torchmetrics import Metric


def count_updates(metric: Metric, updates: int) -> None:
    """Set the number of a metric's updates, for a metric with states that were accumulated elsewhere.

    Otherwise torchmetrics warns that ``compute`` was called before ``update``; the public ``update_count`` can only be
    read.

    Args:
        metric: the metric.
        updates: the number of updates behind the states.
    """
    metric._update_count = updates

"""Names of record columns for people."""

SPLITS = {"train": "training", "val": "validation", "test": "test"}
METRICS = {"acc": "accuracy, %"}


def in_words(column: str) -> str:
    """Return a record column's name for an axis.

    >>> in_words("test/acc"), in_words("val/loss"), in_words("test/global_acc"), in_words("lr")
    ('test accuracy, %', 'validation loss', "test accuracy, %, of the server's model", 'lr')

    Args:
        column: name of the column.
    """
    split, slash, metric = column.rpartition("/")
    server = metric.startswith("global_")
    metric = metric.removeprefix("global_")
    words = f"{SPLITS.get(split, split.replace('_', ' '))} " if slash else ""
    return f"{words}{METRICS.get(metric, metric)}" + (", of the server's model" if server else "")

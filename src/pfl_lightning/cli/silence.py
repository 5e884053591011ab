"""Filter warnings and log lines on which a user of the command line can't act."""

import logging
import warnings


def silence() -> None:
    """Filter warnings and log lines on which a user of the command line can't act."""
    # Lightning's own use of a name that torch deprecates
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
    # the parser looks at classes by all names that they have, also by those that are out of use
    warnings.filterwarnings("ignore", message=r"pfl_lightning\.methods\.", module="jsonargparse")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(is_news)


def is_news(record: logging.LogRecord) -> bool:
    """Return False for Lightning's advertisements and for the line after the last epoch."""
    # Lightning advertises packages of its own (litlogger, litmodels), and ends every run with "stopped: max_epochs",
    # which reads like a failure.
    said = record.getMessage()
    return not any(part in said for part in ("/litlogger/", "/litmodels/", "stopped: `max_epochs="))

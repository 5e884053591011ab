"""What holds for tests and doctests."""

from importlib.util import find_spec

# what needs an extra that isn't there has no doctests
collect_ignore_glob = [] if find_spec("flwr") else ["src/pfl_lightning/flower/*"]

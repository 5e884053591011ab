"""Private names of other packages, with a file per package; no other file of this package uses any.

An upgrade may change a private name without notice. A test of each name, in ``tests/internals``, runs at both ends of
the versions in ``setup.cfg``.
"""

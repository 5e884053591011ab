"""Reads what Weights & Biases writes offline."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32_768, 7


def records(path: Path) -> Iterator[Any]:
    """The records of a ``.wandb`` file: LevelDB's log format behind a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    position, parts = HEADER, b""
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        parts += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""

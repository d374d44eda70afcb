#!/usr/bin/env python3
"""Makes the committed sample scans from the full archives (see README.md beside this file).

    python tests/data/make_sample.py FOLDER_WITH_NPZ_FILES [target folder]
"""
import sys
from pathlib import Path

import numpy as np

from muvox.data import convert

LIMIT = 11_950_000  # bytes of both samples together


def sample_volumes(archive: Path, training: int) -> list[int]:
    """All validation volumes, the 40 training volumes of the baseline's first ten steps, then others in order."""
    with np.load(archive) as data:
        split = data["split"]
    ids = np.flatnonzero(split == 0)
    first = np.random.default_rng(11).permutation(ids)[:40]
    rest = np.setdiff1d(ids, first)
    return sorted(map(int, np.concatenate([np.flatnonzero(split == 1), first, rest[:training - 40]])))


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parent)
    convert(source / "tiny.npz", target / "tiny.h5", compression=9)
    room = LIMIT - (target / "tiny.h5").stat().st_size
    file = target / "x0net250-sample.h5"
    low, high = 40, 1000
    while high - low > 1:
        middle = (low + high) // 2
        convert(source / "x0net250.npz", file, sample_volumes(source / "x0net250.npz", middle), compression=9)
        low, high = (middle, high) if file.stat().st_size <= room else (low, middle)
    count = convert(source / "x0net250.npz", file, sample_volumes(source / "x0net250.npz", low), compression=9)
    print(f"{file}: {count} volumes, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()

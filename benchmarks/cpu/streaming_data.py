"""Read a large JSONL file as a shuffled stream and compare with `datasets` and a plain json.loads loop.

    python benchmarks/cpu/streaming_data.py --gb 2

The readers run one after another in separate processes, and each reads the whole file. The table shows rows per second
and peak memory (maximum resident set size); "growth" is peak memory minus the size after imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

BUFFER_ROWS = 10_000


def write_file(path: Path, num_bytes: int) -> int:
    """Write rows of about 1 kB with a prompt, a label and metadata. Return the number of rows."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5000)]
    bodies = [" ".join(rng.choices(words, k=rng.randint(80, 220))) for _ in range(2000)]
    rows = size = 0
    with path.open("w", encoding="ascii") as file:
        while size < num_bytes:
            row = {"prompt": f"{rows} {bodies[rows % 2000]}", "label": str(rows * 7), "metadata": {"source": rows % 13}}
            size += file.write(json.dumps(row) + "\n")
            rows += 1
    return rows


def furlong_stream(path: Path) -> Iterator[str]:
    """Yield labels from a shuffled furlong stream of one-sample groups, without a tokenizer."""
    from furlong.data.dataset import open_prompts
    from furlong.data.prompt import PromptFormat
    from furlong.data.source import RolloutDataSource

    yield ""
    fmt = PromptFormat(input_key="prompt", label_key="label")
    prompts = open_prompts(
        str(path), tokenizer=None, prompt_format=fmt, streaming=True, shuffle_buffer_size=BUFFER_ROWS
    )
    source = RolloutDataSource(prompts, shuffle=True, num_epoch=1)
    while groups := source.next_groups(256):
        for group in groups:
            yield group.samples[0].label


def datasets_stream(path: Path) -> Iterator[str]:
    """Yield labels from `datasets`' streaming JSON loader with the same shuffle buffer size."""
    import datasets

    yield ""
    data = datasets.load_dataset("json", data_files=str(path), streaming=True, split="train")
    for row in data.shuffle(seed=42, buffer_size=BUFFER_ROWS):
        yield row["label"]


def json_loop(path: Path) -> Iterator[str]:
    """Yield labels with json.loads on every line: no validation, no shuffling, no sample objects."""
    yield ""
    with path.open() as file:
        for line in file:
            yield json.loads(line)["label"]


READERS = {"furlong": furlong_stream, "datasets": datasets_stream, "json loop": json_loop}


def measure(name: str, path: Path) -> dict[str, float]:
    """Read the whole file in this process."""
    rows = READERS[name](path)
    next(rows)  # imports
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.perf_counter()
    count = checksum = 0
    for label in rows:
        count += 1
        checksum += int(label)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"rows": count, "checksum": checksum, "seconds": seconds, "peak_mb": peak, "growth_mb": peak - imported}


def main() -> None:
    """Write the file, run every reader, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the file")
    parser.add_argument("--dir", default=None, help="folder for the file (default: the system's temporary folder)")
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader:
        print(json.dumps(measure(args.reader, Path(args.file))))
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        path = Path(folder) / "rows.jsonl"
        num_rows = write_file(path, int(args.gb * 1e9))
        print(f"{path.stat().st_size / 1e9:.2f} GB, {num_rows} rows, shuffle buffer {BUFFER_ROWS} rows")
        env = {**os.environ, "HF_HOME": folder, "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        results: dict[str, dict[str, float]] = {}
        for name in READERS:
            command = [sys.executable, __file__, "--reader", name, "--file", str(path)]
            output = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
            results[name] = json.loads(output.splitlines()[-1])
        assert len({(r["rows"], r["checksum"]) for r in results.values()}) == 1, results
        own = results["furlong"]["seconds"]
        print(f"{'reader':<12}{'rows/s':>12}{'peak MB':>10}{'growth MB':>11}{'time / furlong':>16}")
        for name, r in results.items():
            rate, ratio = r["rows"] / r["seconds"], r["seconds"] / own
            print(f"{name:<12}{rate:>12.0f}{r['peak_mb']:>10.0f}{r['growth_mb']:>11.0f}{ratio:>16.2f}")


if __name__ == "__main__":
    main()

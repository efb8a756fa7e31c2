"""Train asynchronously with slime's command line: `python train_async.py FLAGS`."""

from furlong.cli import main_async

if __name__ == "__main__":
    raise SystemExit(main_async())

"""Quantize a Hugging Face checkpoint to FP8: `furlong convert hf-to-fp8`."""

import sys

from furlong.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hf-to-fp8", *sys.argv[1:]]))

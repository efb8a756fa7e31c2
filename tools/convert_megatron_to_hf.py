"""Convert a Megatron-LM checkpoint to a Hugging Face checkpoint: `furlong convert megatron-to-hf`."""

import sys

from furlong.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))

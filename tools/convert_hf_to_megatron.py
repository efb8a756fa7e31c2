"""Convert a Hugging Face checkpoint to a Megatron-LM checkpoint: `furlong convert hf-to-megatron`."""

import sys

from furlong.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hf-to-megatron", *sys.argv[1:]]))

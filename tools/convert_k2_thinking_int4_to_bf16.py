"""Write an INT4 Hugging Face checkpoint in bfloat16: `furlong convert dequantize`."""

import sys

from furlong.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "dequantize", *sys.argv[1:]]))

"""Quantize a Hugging Face checkpoint to INT4, by default its routed experts: `furlong convert hf-to-int4`."""

import sys

from furlong.cli import main

if __name__ == "__main__":
    has_rules = any(word.startswith(("--ignore-rules", "--ignore_rules")) for word in sys.argv)
    sys.exit(main(["convert", "hf-to-int4", *([] if has_rules else ["--only-experts"]), *sys.argv[1:]]))

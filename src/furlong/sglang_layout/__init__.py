"""SGLang's memory layout of model weights, and checksums of tensors in that layout. See README.md."""

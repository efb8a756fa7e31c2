"""How SGLang lays out a model's weights in memory, and checksums of tensors in that layout."""

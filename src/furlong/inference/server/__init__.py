"""The HTTP server over the embedded engine: the protocols of SGLang and OpenAI, and weight updates."""

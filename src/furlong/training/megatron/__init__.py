"""Training with Megatron-core: tensor, pipeline, context and expert parallelism. Nothing else imports `megatron`."""

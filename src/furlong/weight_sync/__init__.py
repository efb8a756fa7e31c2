"""Carries weights from the trainer to the engines and proves that they arrived. One file per transport."""

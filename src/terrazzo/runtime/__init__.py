"""Executes a Plan on torch.distributed: exchange, norm, random, gradients, agreement."""

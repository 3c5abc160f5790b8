"""Reinforcement-learning post-training of language models on PyTorch Monarch, torchtitan and vLLM."""

__version__ = "0.1.0"

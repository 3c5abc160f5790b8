"""Tests run on GPUs where there are four, and on the CPU elsewhere: every process of a test needs a device of its own."""

import os

import hypothesis
import torch

if torch.cuda.device_count() < 4:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# The same examples in every run, and nothing left behind.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")

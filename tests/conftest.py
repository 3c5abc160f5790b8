"""Tests run on GPUs where there are four, and on the CPU elsewhere: every process of a test needs a device of its own."""

import os

import torch

if torch.cuda.device_count() < 4:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
